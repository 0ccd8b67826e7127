"""Saves and loads in one process: full disks, damaged files, which checkpoints are kept, changed options."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.processes import Pools
from titan_async.config.device import ensure_device
from titan_async.errors import UserError

ensure_device()

from torchtitan.components.optimizer import LRSchedulersContainer  # noqa: E402
from torchtitan.components.tokenizer import HuggingFaceTokenizer  # noqa: E402

from titan_async.checkpoint._dcp_internals import ChecksumWriter  # noqa: E402
from titan_async.data import shakespeare_tokenizer_folder  # noqa: E402
from titan_async.training.checkpoint.checkpointer import (  # noqa: E402
    AsyncCheckpointer,
    _of_all_ranks,
    save_for_resuming,
)
from titan_async.training.checkpoint.folders import complete_steps  # noqa: E402
from titan_async.training.dataloader import TextDataLoader  # noqa: E402
from titan_async.training.optimizer.config import ErrorFeedbackConfig, SGDConfig  # noqa: E402
from titan_async.training.optimizer.container import AsyncOptimizers  # noqa: E402

pytestmark = pytest.mark.usefixtures("group_of_one")


class Counter:
    """Any other state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Position(TextDataLoader):
    """The position in the data of one data-parallel rank."""

    def __init__(self, rank: int, degree: int) -> None:
        self.dp_world_size, self._rank_id = degree, f"dp_rank_{rank}"

    def state_dict(self) -> dict[str, Any]:
        return {self._rank_id: "{}", "world_size": self.dp_world_size, "num_workers": 0}


def checkpointer(
    folder: Path, mode: str = "disabled", keep: int = 0, **options: Any
) -> tuple[AsyncCheckpointer, nn.Linear]:
    model = nn.Linear(300, 300)
    config = AsyncCheckpointer.Config(
        enable=True, interval=1, async_mode=mode, keep_latest_k=keep, last_save_model_only=False, **options
    )
    made = config.build(
        dataloader=Counter(), model_parts=[model], optimizers=Counter(), lr_schedulers=Counter(),
        states={"others": Counter()}, sd_adapter=None, base_folder=str(folder),
    )  # fmt: skip
    return made, model


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_save_to_a_full_disk(tmp_path: Path, mode: str) -> None:
    made, _ = checkpointer(tmp_path, mode)
    made.save(1)
    made.maybe_wait_for_saving()
    folder = tmp_path / "checkpoint"
    message = rf"cannot save {folder}/step-2: File too large; free some space there, and the same command"
    with files_limited_to(100_000):
        if mode == "disabled":
            with pytest.raises(UserError, match=f"{message} resumes from step 1$"):
                made.save(2)
        else:
            made.save(2)
            made.save_future.exception(30)
            with pytest.raises(UserError, match=f"{message} resumes from step 1$"):
                made.maybe_wait_for_staging()
    assert [path.name for path in folder.iterdir()] == ["step-1"]
    assert complete_steps(folder) == [1]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    made, _ = checkpointer(tmp_path)
    (tmp_path / "checkpoint").touch()
    with pytest.raises(UserError, match="step-2: .*; make that folder writable, and the same command starts"):
        made.save(2)


def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    made, model = checkpointer(tmp_path)
    made.save(1)
    made.states["others"].count = 5
    made.save(2)
    weight = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    made.states["others"].count = 0
    assert made.load()
    assert torch.equal(model.weight, weight) and made.states["others"].count == 5

    folder = tmp_path / "checkpoint/step-2"
    file = folder / "__0_0.distcp"
    content = file.read_bytes()
    place = content.index(weight.numpy().tobytes()) + 100
    file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    damaged = f"the checkpoint {folder} is damaged: {{}}; remove that folder to resume from step 1$"
    with pytest.raises(UserError, match=damaged.format("__0_0.distcp is not what was saved")):
        made.load()
    file.unlink()
    with pytest.raises(UserError, match=damaged.format("__0_0.distcp is missing")):
        made.load()
    (folder / ".metadata").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=damaged.format(r"\.metadata is not the index of a checkpoint .*")):
        made.load()
    assert made.load(1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_of_fewer_data_parallel_ranks(tmp_path: Path, rank: int) -> None:
    made, _ = checkpointer(tmp_path)
    made.states["dataloader"] = Position(0, 1)
    made.save(1)
    # No position of rank 1 was saved.
    made.states["dataloader"] = Position(rank, 2)
    with pytest.raises(UserError, match="data position is one of data-parallel degree 1, not 2: resume with"):
        made.load()


def kept(made: AsyncCheckpointer) -> list[int]:
    """The steps of complete checkpoints, after checking that all other folders have been removed."""
    steps = complete_steps(Path(made.folder))
    made.close()
    assert {path.name for path in Path(made.folder).iterdir()} == {f"step-{step}" for step in steps}
    return steps


def save_last(made: AsyncCheckpointer, step: int) -> bool:
    return made.save(step, last_step=True)


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("end", [save_last, save_for_resuming])
def test_the_latest_checkpoints_are_kept_over_short_runs(
    tmp_path: Path, mode: str, end: Callable[[AsyncCheckpointer, int], bool]
) -> None:
    for step in (2, 4, 6):
        made, _ = checkpointer(tmp_path, mode, keep=2)
        made.load()
        made.save(step - 1)
        assert end(made, step)
        assert kept(made) == [step - 1, step]
    for step in (7, 8):  # too short for a save in between
        made, _ = checkpointer(tmp_path, mode, keep=3)
        assert end(made, step)
    assert kept(made) == [6, 7, 8]


def test_no_checkpoint_is_removed_before_the_next_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = checkpointer(tmp_path, "async", keep=2)
    for step in (1, 2):
        made.save(step)
        made.maybe_wait_for_saving()
    write, held = ChecksumWriter.write_data, threading.Event()
    monkeypatch.setattr(ChecksumWriter, "write_data", lambda *args: held.wait(60) and write(*args))
    made.save(3)
    made.maybe_wait_for_staging()
    assert complete_steps(Path(made.folder)) == [1, 2]
    held.set()
    made.save_future.result(60)
    made.maybe_wait_for_staging()
    assert kept(made) == [2, 3]

    made, _ = checkpointer(tmp_path, keep=2)
    with files_limited_to(100_000), pytest.raises(UserError, match="step-4: File too large"):
        made.save(4)
    assert kept(made) == [2, 3]


def test_incomplete_checkpoints_do_not_count_and_are_removed(tmp_path: Path) -> None:
    made, _ = checkpointer(tmp_path, keep=2)
    for step in (10, 20):
        made.save(step)
    for step in (30, 40):
        half = Path(made.folder, f"step-{step}")
        half.mkdir()
        (half / "__0_0.distcp").touch()
    other = Path(made.folder, "step-20-of-mine")
    other.mkdir()
    made.save(25, last_step=True)
    made.close()
    assert {path.name for path in Path(made.folder).iterdir()} == {"step-20", "step-25", other.name}


def test_a_save_that_another_rank_has_started_is_not_removed(tmp_path: Path) -> None:
    # Two ranks, async: rank 1 had created the folder of step 5 while rank 0 still waited for step 4. Rank 0
    # took it for the remains of a killed save.
    made, _ = checkpointer(tmp_path, "async", keep=2)
    folder = Path(made.folder)
    for step in (3, 5):
        Path(folder, f"step-{step}").mkdir(parents=True)
    made.save(4)
    made.maybe_wait_for_saving()
    made.close()  # which waits for what is removed
    assert {path.name for path in folder.iterdir()} == {"step-4", "step-5"}
    made, _ = checkpointer(tmp_path, "async", keep=2)
    made.save(6)
    made.maybe_wait_for_saving()
    assert kept(made) == [4, 6]


def test_the_checkpoint_just_saved_is_kept_whatever_its_step(tmp_path: Path) -> None:
    made, _ = checkpointer(tmp_path, keep=2)
    for step in (30, 40):
        made.save(step)
    # As after checkpoint.load_step 10.
    made.save(20)
    assert kept(made) == [20, 40]
    made, _ = checkpointer(tmp_path, keep=2)
    made.save(30)
    assert kept(made) == [30, 40]


def test_a_symlinked_checkpoint_is_not_removed(tmp_path: Path) -> None:
    made, _ = checkpointer(tmp_path / "other")
    made.save(1)
    mine, _ = checkpointer(tmp_path / "mine", keep=2)
    Path(mine.folder).mkdir(parents=True)
    Path(mine.folder, "step-1").symlink_to(Path(made.folder, "step-1"))
    for step in (2, 3, 4):
        mine.save(step)
    mine.close()
    assert complete_steps(Path(made.folder)) == [1]


def test_keep_latest_k_of_0_keeps_all_checkpoints(tmp_path: Path) -> None:
    made, _ = checkpointer(tmp_path)
    for step in (1, 2, 3):
        made.save(step, last_step=step == 3)
    assert kept(made) == [1, 2, 3]


class Lines(list[str]):
    """A reporter that keeps its lines."""

    log = list.append


def training(
    folder: Path, sgd: SGDConfig, **options: Any
) -> tuple[AsyncCheckpointer, nn.Linear, AsyncOptimizers, LRSchedulersContainer]:
    """A model, its optimizer, and a warm-up to the learning rate over eight updates."""
    made, model = checkpointer(folder, **options)
    config = AsyncOptimizers.Config(name="sgd", sgd=sgd, error_feedback=ErrorFeedbackConfig(enable=False))
    optimizers = config.build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=8)
    schedulers = schedule.build(optimizers=optimizers, training_steps=8)
    made.states |= {"optimizer": optimizers, "lr_scheduler": schedulers}
    made.reporter = Lines()
    return made, model, optimizers, schedulers


def update(
    model: nn.Linear, optimizers: AsyncOptimizers, schedulers: LRSchedulersContainer
) -> dict[str, torch.Tensor]:
    """Make an update from random gradients, which are returned."""
    grads = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = grads[name].clone()
    optimizers.step()
    schedulers.step()
    return grads


@pytest.mark.parametrize("left_out", [None, "optimizer", "lr_scheduler"])
def test_a_changed_recipe_applies_from_the_first_update(tmp_path: Path, left_out: str | None) -> None:
    then = SGDConfig(lr=0.5, momentum=0.5, weight_decay=0.25)
    now = SGDConfig(lr=2.0, momentum=0.75, weight_decay=0.125)
    made, model, optimizers, schedulers = training(tmp_path, then)
    momentum = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for _ in range(3):
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for name, grad in update(model, optimizers, schedulers).items():
            momentum[name] = 0.5 * momentum[name] + grad + 0.25 * before[name]
    made.save(3)

    excluded = [left_out] if left_out else []
    made, model, optimizers, schedulers = training(tmp_path, now, exclude_from_loading=excluded)
    assert made.load()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    rate = 2.0 * (1 if left_out == "lr_scheduler" else 4) / 8
    for name, grad in update(model, optimizers, schedulers).items():
        old = torch.zeros_like(grad) if left_out == "optimizer" else momentum[name]
        wanted = before[name] - rate * (0.75 * old + grad + 0.125 * before[name])
        torch.testing.assert_close(model.get_parameter(name).detach(), wanted)
    if left_out == "optimizer":
        assert made.reporter == []
    else:
        (line,) = made.reporter
        prefix, _, options = line.partition(": ")
        assert prefix == "the recipe changes options of the checkpoint"
        assert set(options.split(", ")) == {
            "optimizer.sgd.lr 0.5 -> 2.0",
            "optimizer.sgd.momentum 0.5 -> 0.75",
            "optimizer.sgd.weight_decay 0.25 -> 0.125",
        }


def test_an_unchanged_recipe_is_not_reported(tmp_path: Path) -> None:
    training(tmp_path, SGDConfig())[0].save(1)
    made, *_ = training(tmp_path, SGDConfig())
    assert made.load() and made.reporter == []


def gathered(rank: int, group: object) -> list[str]:
    return _of_all_ranks(["both", f"of {rank}"])


def test_changed_options_of_all_stages_are_reported_once(trainer_pools: Pools) -> None:
    assert trainer_pools(2).run(2, gathered) == [["both", "of 0", "of 1"]] * 2


def test_an_ignored_initial_load_path_is_reported(tmp_path: Path) -> None:
    other, _ = checkpointer(tmp_path / "other")
    other.save(5)
    path = f"{other.folder}/step-5"
    made, _ = checkpointer(tmp_path / "mine", initial_load_path=path)
    made.reporter = Lines()
    assert made.load() and made.reporter == []
    made.save(3)
    assert made.load()
    assert made.reporter == [
        f"checkpoint.initial_load_path is not read: {made.folder} has checkpoints, and the run resumes from "
        "step 3"
    ]


def test_changed_data_are_refused_unless_the_checkpoint_has_no_fingerprints(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(shakespeare_tokenizer_folder()))
    text = tmp_path / "a.jsonl"
    text.write_text("".join(json.dumps({"text": f"{number} " * 99}) + "\n" for number in range(9)))

    def loading() -> AsyncCheckpointer:
        made, _ = checkpointer(tmp_path)
        made.states["dataloader"] = TextDataLoader.Config(dataset_path=str(text)).build(
            dp_world_size=1, dp_rank=0, tokenizer=tokenizer, seq_len=16, local_batch_size=1
        )
        return made

    made = loading()
    made.save(1)
    loader = made.states["dataloader"]
    state = loader.state_dict
    loader.state_dict = lambda: {name: value for name, value in state().items() if name != "files"}
    made.save(2)
    with text.open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(UserError, match=r"^The data have changed .* \(a.jsonl\), so some"):
        loading().load(1)
    assert loading().load(2)
    made = loading()
    made.load(2)
    made.save(3)
    assert "files" in made.states["dataloader"].state_dict()
    assert loading().load(3)
