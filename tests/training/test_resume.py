"""A run that is resumed in new processes is bit for bit equal to an uninterrupted one."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.support.processes import Pools
from tests.support.selection import slow
from tests.support.training import SMALL
from tests.support.waiting import MOST_SECONDS
from titan_async.monitor.journal import journal_path

Trained = list[dict[str, dict[str, torch.Tensor]]]
"""Each rank's weights after training ("model"), the rest of its state ("state"), and observations ("seen"):
the next random numbers, whether a save was pending after each step, whether files were written into a folder
that looked like a complete checkpoint, and whether each batch began with nothing left to stage."""


def train(rank, group, folder, steps, flags, *, slow_writes=0.0, held_writes=False, random_state=True):
    """Train up to `steps`, from the checkpoint in `folder` if there is one.

    With `held_writes`, a thread that writes a checkpoint first waits for the end of a step.
    """
    from titan_async.config.device import ensure_device

    ensure_device()
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    from titan_async.checkpoint._dcp_internals import ChecksumWriter
    from titan_async.config.recipe_file import resolve

    _clear_sharding_prop_cache()  # which remembers the meshes of an earlier trainer

    os.environ.update(LOCAL_RANK=str(rank), LOG_RANK="0,1,2,3")
    config = resolve(
        [
            str(SMALL), "--module", "tests.support.recipes", "--dump_folder", folder,
            "--training.steps", str(steps), "--training.seq_len", "32", "--training.local_batch_size", "4",
            "--parallelism.pipeline_parallel_microbatch_size", "1",
            "--parallelism.pipeline_parallel_degree", str(group.size()), "--lr_scheduler.warmup_steps", "3",
            "--lr_scheduler.total_steps", "8", "--validator.no-enable", "--checkpoint.interval", "4",
            *flags,
        ]
    )  # fmt: skip
    trainer = config.build()
    if not random_state:
        state = trainer.train_state.state_dict
        trainer.train_state.state_dict = lambda: {k: v for k, v in state().items() if k != "random_state"}
    step, write, run = trainer.train_step, ChecksumWriter.write_data, trainer.forward_backward_step
    wait, in_flight, into_whole, calls = trainer.checkpointer.maybe_wait_for_staging, [], [False], []
    stepped = threading.Event()

    def drawing_step(batches):
        # Nothing in this model draws, so without this all states of the generators would be the same.
        torch.rand(3)
        step(batches)
        saving = getattr(trainer.checkpointer, "save_future", None)
        in_flight.append(saving is not None and not saving.done())
        stepped.set()

    def slow_write(writer, *args):
        time.sleep(slow_writes)
        if held_writes and threading.current_thread() is not threading.main_thread():
            stepped.clear()
            assert stepped.wait(MOST_SECONDS), "training does not continue while files are written"
        into_whole.append((Path(writer.path) / ".metadata").exists())
        return write(writer, *args)

    def noted(name, function):
        return lambda *args, **kwargs: (calls.append(name), function(*args, **kwargs))[1]

    trainer.train_step, ChecksumWriter.write_data = drawing_step, slow_write
    trainer.forward_backward_step = noted("batch", run)
    trainer.checkpointer.maybe_wait_for_staging = noted("wait", wait)
    try:
        trainer.train()
        model = {name: value for part in trainer.model_parts for name, value in part.state_dict().items()}
        state = trainer.optimizers.state_dict() | trainer.state_dict().get("next_weights", {})
        return {
            "model": tensors(model),
            "state": tensors(state),
            "seen": {
                "rand": torch.rand(3),
                "in_flight": torch.tensor(in_flight),
                "into_whole": torch.tensor(into_whole),
                "staged": torch.tensor([a == "wait" for a, b in pairwise(["", *calls]) if b == "batch"]),
            },
        }
    finally:
        ChecksumWriter.write_data = write
        trainer.close()


def tensors(state):
    return {
        name: getattr(value, "full_tensor", lambda value=value: value)().detach().clone()
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


class Runs:
    """Runs of any number of ranks, in persistent processes, or in others that have not trained yet."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._anew = Pools(most_calls=1)

    def __call__(
        self, ranks: int, folder: Path, steps: int, *flags: str, anew: bool = False, **kwargs: object
    ) -> Trained:
        pool = (self._anew if anew else self._pools)(ranks)
        return pool.run(ranks, train, str(folder), steps, flags, timeout=300, **kwargs)

    def close(self) -> None:
        self._anew.close()


@pytest.fixture(scope="module")
def runs(trainer_pools: Pools) -> Iterator[Runs]:
    runs = Runs(trainer_pools)
    yield runs
    runs.close()


SHARDED = ("--parallelism.pipeline_parallel_degree", "2", "--parallelism.data_parallel_shard_degree", "2")
"""Two stages of two ranks each."""

BFLOAT16 = ("--training.mixed_precision_param", "bfloat16", "--optimizer.muon.compute_dtype", "bfloat16")

LAYOUTS = [
    slow(1, (), id="1 stage"),
    slow(2, (), id="2 stages"),
    slow(4, (), id="4 stages"),
    pytest.param(4, SHARDED, id="2 stages on 2 shards each"),
    slow(2, BFLOAT16, id="2 stages in bfloat16"),
]
"""Numbers of ranks, and their additional flags."""

PLAIN = ("--optimizer.name", "sgd")
"""An optimizer that does not amplify rounding: Muon and AdamW make 1e-4 of 1e-8 in four steps."""

SYNCHRONOUS = ("--parallelism.pipeline_parallel_schedule", "1F1B")


@pytest.fixture(scope="module")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Trained]]:
    """For a layout: eight steps in one go, and the folder with the checkpoints of steps 4 and 8."""
    done: dict[tuple, tuple[Path, Trained]] = {}

    def get(ranks: int, *flags: str) -> tuple[Path, Trained]:
        if (ranks, flags) not in done:
            folder = tmp_path_factory.mktemp("whole")
            done[ranks, flags] = folder, runs(ranks, folder, 8, *flags)
        return done[ranks, flags]

    return get


def half(source: Path, target: Path) -> Path:
    """A copy of a run's folder as it was after step 4."""
    shutil.copytree(source / "checkpoint/step-4", target / "checkpoint/step-4")
    return target


def merged(trained: Trained, kind: str) -> dict[str, torch.Tensor]:
    return {name: value for rank in trained for name, value in rank[kind].items()}


def assert_same(one: Trained, other: Trained, *kinds: str) -> None:
    for kind in kinds:
        first, second = merged(one, kind), merged(other, kind)
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert torch.equal(value, second[name]), name


def difference(one: Trained, other: Trained) -> float:
    """The largest difference between two weights."""
    first, second = merged(one, "model"), merged(other, "model")
    assert first.keys() == second.keys()
    return max(float((value - second[name]).abs().max()) for name, value in first.items())


@pytest.mark.parametrize(("ranks", "flags"), LAYOUTS)
def test_resuming_in_new_processes_changes_nothing(
    runs: Runs, whole: Callable[..., tuple[Path, Trained]], tmp_path: Path, ranks: int, flags: tuple
) -> None:
    _, undisturbed = whole(ranks, *flags)
    runs(ranks, tmp_path, 4, *flags)
    resumed = runs(ranks, tmp_path, 8, *flags, anew=True)
    assert_same(resumed, undisturbed, "model", "state")
    for mine, theirs in zip(resumed, undisturbed, strict=True):
        assert torch.equal(mine["seen"]["rand"], theirs["seen"]["rand"]), "the generators' states differ"


@pytest.mark.parametrize(
    ("ranks", "flags"), [(2, ()), slow(4, SHARDED, id="2 stages on 2 shards each"), slow(2, PLAIN)]
)
@pytest.mark.parametrize("steps", ["6", "4", slow("3")])
def test_a_synchronous_start_resumes_before_and_after_its_end(
    runs: Runs,
    whole: Callable[..., tuple[Path, Trained]],
    tmp_path: Path,
    steps: str,
    ranks: int,
    flags: tuple[str, ...],
) -> None:
    # The checkpoint is that of step 4.
    flags = (*flags, "--pipeline.synchronous_steps", steps)
    folder, undisturbed = whole(ranks, *flags)
    resumed = runs(ranks, half(folder, tmp_path), 8, *flags, anew=True)
    assert_same(resumed, undisturbed, "model", "state")


@pytest.mark.parametrize("mode", [slow("disabled"), "async"])
def test_an_async_save_holds_its_step_while_training_continues(
    runs: Runs, whole: Callable[..., tuple[Path, Trained]], tmp_path: Path, mode: str
) -> None:
    # The files are written while training continues, long after the weights of step 4 were overwritten.
    saving = runs(2, tmp_path / "saving", 8, "--checkpoint.async_mode", mode, held_writes=True)
    for rank in saving:
        assert rank["seen"]["in_flight"].any() == (mode == "async")
        assert rank["seen"]["staged"].all(), "the weights of the next batch are valid until it begins"
    assert_same(saving, whole(2)[1], "model", "state")
    resumed = runs(2, half(tmp_path / "saving", tmp_path / "resumed"), 8, anew=True)
    assert_same(resumed, whole(2)[1], "model", "state")


def test_an_overwritten_checkpoint_is_invalidated_first(
    runs: Runs, whole: Callable[..., tuple[Path, Trained]], tmp_path: Path
) -> None:
    # Otherwise a kill in the middle would leave a checkpoint of old and new files that looks complete.
    folder, undisturbed = whole(2)
    shutil.copytree(folder / "checkpoint", tmp_path / "checkpoint")
    again = runs(2, tmp_path, 8, "--checkpoint.load_step", "4", slow_writes=0.1)
    assert_same(again, undisturbed, "model", "state")
    for rank in again:
        assert not rank["seen"]["into_whole"].any()


@pytest.mark.parametrize("schedule", [(), slow(SYNCHRONOUS)], ids=["delayed", "synchronous"])
def test_a_checkpoint_resumes_at_another_number_of_stages(
    runs: Runs, whole: Callable[..., tuple[Path, Trained]], tmp_path: Path, schedule: tuple
) -> None:
    flags = (*schedule, *PLAIN)
    folder, undisturbed = whole(2, *flags)
    resumed = runs(4, half(folder, tmp_path), 8, *flags)
    assert difference(resumed, undisturbed) < 1e-6


@pytest.mark.parametrize("ranks", [1, slow(4)])
def test_all_state_is_loaded_at_another_number_of_stages(
    runs: Runs, whole: Callable[..., tuple[Path, Trained]], tmp_path: Path, ranks: int
) -> None:
    folder, _ = whole(2)
    there = runs(2, half(folder, tmp_path / "2"), 4)
    here = runs(ranks, half(folder, tmp_path / "other"), 4)
    assert_same(here, there, "model")
    if ranks > 1:
        assert_same(here, there, "state")
    else:  # one stage is synchronous
        mine, all_ = merged(here, "state"), merged(there, "state")
        assert mine.keys() < all_.keys()
        assert all(torch.equal(value, all_[name]) for name, value in mine.items())


@pytest.mark.slow
def test_a_sharded_checkpoint_resumes_without_sharding(
    runs: Runs, whole: Callable[..., tuple[Path, Trained]], tmp_path: Path
) -> None:
    sharded = (*SHARDED, *PLAIN)
    folder, _ = whole(4, *sharded)
    there = runs(4, half(folder, tmp_path / "there"), 4, *sharded)
    # Positions in the data are those of two readers, so reading starts from the beginning.
    flags = (*PLAIN, "--checkpoint.exclude_from_loading", "dataloader")
    here = runs(2, half(folder, tmp_path / "here"), 4, *flags)
    assert_same(here, there, "model", "state")

    further = {
        (ranks, schedule): runs(ranks, half(folder, tmp_path / f"{ranks}{schedule}"), 8, *flags, *schedule)
        for ranks, schedule in [(2, ()), (4, ()), (2, SYNCHRONOUS), (1, SYNCHRONOUS)]
    }
    assert difference(further[2, ()], further[4, ()]) < 1e-6
    assert difference(further[2, SYNCHRONOUS], further[1, SYNCHRONOUS]) < 1e-6
    assert difference(further[2, ()], further[2, SYNCHRONOUS]) > 1e-4
    assert difference(further[2, ()], there) > 1e-4


def test_a_synchronous_run_resumes_delayed(
    runs: Runs, whole: Callable[..., tuple[Path, Trained]], tmp_path: Path
) -> None:
    flags = (*SYNCHRONOUS, *PLAIN)
    folder, synchronous = whole(2, *flags)
    # Without older weights the first batch reads the newest ones, and without a history its update is not
    # corrected: it is that of a synchronous run.
    delayed = runs(2, half(folder, tmp_path / "delayed"), 5, *PLAIN)
    next_step = runs(2, half(folder, tmp_path / "synchronous"), 5, *flags)
    assert difference(delayed, next_step) < 1e-6
    further = runs(2, tmp_path / "delayed", 8, *PLAIN)
    assert 1e-4 < difference(further, synchronous) < 1
    # The first of the two reports the change, and the second has none to report.
    journals = [journal_path(run).read_text() for run in (tmp_path / "delayed/events").iterdir()]
    counts = [journal.count("the checkpoint's run had no delay, this one has one") for journal in journals]
    assert sorted(counts) == [0, 1]


@pytest.mark.slow
def test_a_delayed_run_resumes_synchronously(
    runs: Runs, whole: Callable[..., tuple[Path, Trained]], tmp_path: Path
) -> None:
    folder, undisturbed = whole(2, *PLAIN)
    pipelined = runs(2, half(folder, tmp_path / "2"), 8, *SYNCHRONOUS, *PLAIN)
    alone = runs(1, half(folder, tmp_path / "1"), 8, *PLAIN)
    assert difference(pipelined, alone) < 1e-6
    assert difference(pipelined, undisturbed) > 1e-4


def test_a_checkpoint_without_random_state_resumes(
    runs: Runs, whole: Callable[..., tuple[Path, Trained]], tmp_path: Path
) -> None:
    runs(2, tmp_path, 4, random_state=False)
    resumed = runs(2, tmp_path, 8, anew=True)
    undisturbed = whole(2)[1]
    assert_same(resumed, undisturbed, "model", "state")
    assert not torch.equal(resumed[0]["seen"]["rand"], undisturbed[0]["seen"]["rand"])


def test_starting_from_another_run(
    runs: Runs, whole: Callable[..., tuple[Path, Trained]], tmp_path: Path
) -> None:
    folder, undisturbed = whole(2)
    source = ("--checkpoint.initial_load_path", str(folder / "checkpoint/step-8"))
    model_only = runs(2, tmp_path / "model", 0, *source)
    assert_same(model_only, undisturbed, "model")
    # Only with its weights: training starts from step 0.
    runs(2, tmp_path / "model", 2, *source)
    assert (tmp_path / "model/checkpoint/step-2/.metadata").is_file()

    source = ("--checkpoint.initial_load_path", str(folder / "checkpoint/step-4"))
    everything = runs(2, tmp_path / "all", 8, *source, "--checkpoint.no-initial_load_model_only")
    assert_same(everything, undisturbed, "model", "state")


@pytest.mark.parametrize("left_out", ["optimizer", slow("train_state"), "dataloader", slow("lr_scheduler")])
def test_leaving_a_part_out_of_loading(
    runs: Runs, whole: Callable[..., tuple[Path, Trained]], tmp_path: Path, left_out: str
) -> None:
    folder, undisturbed = whole(2)
    flags = ("--checkpoint.exclude_from_loading", left_out)
    resumed = runs(2, half(folder, tmp_path), 8, *flags)
    assert 0 < difference(resumed, undisturbed) < 1


@pytest.mark.slow
def test_a_last_save_of_the_model_alone(
    runs: Runs, whole: Callable[..., tuple[Path, Trained]], tmp_path: Path
) -> None:
    trained = runs(2, tmp_path / "first", 4, "--checkpoint.last_save_model_only")
    source = ("--checkpoint.initial_load_path", str(tmp_path / "first/checkpoint/step-4"))
    loaded = runs(2, tmp_path / "second", 0, *source)
    assert_same(loaded, trained, "model")
