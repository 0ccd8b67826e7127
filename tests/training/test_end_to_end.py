"""Complete runs of `titan-async train` with the shipped recipe file.

The first one, and one under torchrun, start interpreters as a user's command does; the processes of the
others are forks.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support import forks
from tests.support.selection import slow
from tests.support.training import RECIPE, Run, command, environment, processes_of, start, train
from tests.support.waiting import has_ended

STEPS = 20
LINE = re.compile(
    r"step +\d+/\d+  loss +[\d.]+  grad_norm +([\d.]+|-)  tok/s [\d,]+  lr \d\.\d\de-\d\d  "
    r"elapsed \d+:\d\d  remaining \d+:\d\d"
)
SHORT = ("--training.steps", 30, "--lr_scheduler.warmup_steps", 3, "--validator.no-enable")
"""A run that is long enough to learn, without a validation; its checkpoint is the last step's."""

FIRST = ("--training.seq_len", 64, "--lr_scheduler.warmup_steps", 4, "--lr_scheduler.total_steps", STEPS,
         "--checkpoint.interval", 10)  # fmt: skip


def assert_learns(run: Run, *, silent: bool = True) -> None:
    assert run.status == 0, run.err
    assert not silent or run.err == ""
    assert run.steps == [1, 10, 20, 30]
    # Before the first update the loss is about that of 2048 equally probable tokens; first the model learns
    # their frequencies.
    assert 7.6 < run.losses[0] < 8.5
    assert run.losses[-1] < run.losses[0] - 0.5
    assert all(later < earlier for earlier, later in zip(run.losses, run.losses[1:], strict=False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def first(folder: Path) -> Run:
    """The recipe file, for fewer and shorter steps."""
    return train(
        folder,
        "--training.steps", STEPS, *FIRST,
        "--validator.steps", 4, "--validator.freq", 10, "--metrics.log_freq", 10,
        recipe=RECIPE, anew=True,
    )  # fmt: skip


SUMMARY = re.compile(
    r"^validation loss (\S+) nats per token; a model without context reaches (\S+) ", re.MULTILINE
)


def test_the_recipe_learns_and_the_summary_has_the_unigram_entropy(first: Run) -> None:
    assert (first.status, first.err) == (0, "")
    assert first.losses[-1] < first.losses[0] - 1
    assert first.validation_losses[1] < first.validation_losses[0]
    summary = SUMMARY.search(first.out)
    assert summary is not None
    validation, entropy = map(float, summary.groups())
    assert first.validation_losses[-1] == pytest.approx(validation, abs=1e-3)
    assert len(first.validation_losses) == 2
    assert 5.2 < entropy < 6.0


@pytest.mark.slow
def test_the_recipe_learns_more_than_the_unigram_entropy(tmp_path: Path) -> None:
    run = train(
        tmp_path,
        "--training.steps", 40, "--training.seq_len", 256, "--lr_scheduler.warmup_steps", 4,
        "--lr_scheduler.total_steps", 40, "--validator.steps", 8, recipe=RECIPE,
    )  # fmt: skip
    assert (run.status, run.err) == (0, "")
    validation, entropy = map(float, SUMMARY.search(run.out).groups())
    assert validation < entropy - 0.15
    assert run.losses[-1] < run.losses[0] - 2


def test_only_rank_0_prints(first: Run) -> None:
    lines = first.out.splitlines()
    assert first.steps == [1, 10, 20]
    steps = [line for line in lines if line.startswith("step ")]
    assert all(LINE.fullmatch(line) for line in steps), steps
    assert "grad_norm      -" in steps[0] and "grad_norm      -" not in "".join(steps[1:])
    assert lines[0] == f"training llama3 debug-3.4M on 2 stages under Async2BW for {STEPS} steps"
    validations = [f"validation at step {step}: loss {loss:.4f}" for step, loss in
                   zip((10, STEPS), first.validation_losses, strict=True)]  # fmt: skip
    assert [line for line in lines if line.startswith("validation at")] == validations
    # Nothing else: one first line, the steps, the validations and four lines of summary.
    assert len(lines) == 1 + len(steps) + len(validations) + 4
    assert re.fullmatch(rf"trained {STEPS} steps in \d+:\d\d: [\d,]+ tokens/s, [\d.]+ s/step", lines[-4])


def test_the_summary_names_the_folders_of_the_run(first: Run, folder: Path) -> None:
    assert first.out.splitlines()[-2:] == ["files of the run: run", "checkpoints: run/checkpoint"]
    steps = sorted(path.name for path in (folder / "run/checkpoint").iterdir())
    assert steps == ["step-10", "step-20"]
    for step in steps:
        assert (folder / "run/checkpoint" / step / ".metadata").is_file()


def test_the_same_command_with_more_steps_resumes(first: Run, folder: Path) -> None:
    flags = ("--training.steps", STEPS + 5, *FIRST, "--metrics.log_freq", 1, "--validator.no-enable")
    more = train(folder, *flags, recipe=RECIPE)
    assert (more.status, more.err) == (0, "")
    assert f" for {STEPS + 5} steps, resumed at step {STEPS}\n" in more.out
    assert more.steps == list(range(STEPS + 1, STEPS + 6))
    assert max(more.losses) < first.losses[0] - 0.5, "it started from scratch"
    assert "\ntrained 5 steps in " in more.out

    again = train(folder, *flags, recipe=RECIPE)
    assert (again.status, again.err) == (0, "")
    assert again.out.splitlines() == [
        f"nothing to do: the checkpoint is at step {STEPS + 5} of {STEPS + 5}; raise training.steps to "
        "continue",
        "files of the run: run",
        "checkpoints: run/checkpoint",
    ]


STAGES, BATCH = "--parallelism.pipeline_parallel_degree", "--training.local_batch_size"


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        slow((STAGES, 4, BATCH, 8), "4 stages under Async2BW"),
        slow(("--parallelism.data_parallel_shard_degree", 2, BATCH, 4), "2 stages under Async2BW"),
        slow((STAGES, 1), "one stage"),
        (("--parallelism.pipeline_parallel_schedule", "1F1B"), "2 stages under 1F1B"),
        slow(("--compile.enable",), "2 stages under Async2BW"),
    ],
    ids=str,
)
def test_layouts_learn_and_tensorboard_has_their_losses(
    tmp_path: Path, flags: tuple[object, ...], layout: str
) -> None:
    # torchtitan writes from one rank; where that holds no loss, it writes -1.
    run = train(tmp_path, *SHORT, *flags, "--metrics.enable_tensorboard")
    assert_learns(run, silent="--compile.enable" not in flags)  # the compiler prints warnings
    assert f"on {layout} for 30 steps" in run.out
    # Without a delay the first step has a norm.
    assert ("grad_norm      -" in run.out) == ("Async2BW" in layout)
    losses = dict(zip(run.steps, run.losses, strict=True))
    assert tensorboard_losses(tmp_path) == pytest.approx(losses, abs=1e-4)


def tensorboard_losses(folder: Path) -> dict[int, float]:
    (file,) = (folder / "run/tb").rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    (tag,) = [tag for tag in events.Tags()["scalars"] if "loss" in tag and "avg" in tag]
    return {event.step: event.value for event in events.Scalars(tag)}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_stage_ends_the_run_and_is_reported(tmp_path: Path) -> None:
    launcher = start(tmp_path, "--training.steps", 100_000, "--metrics.log_freq", 1)
    try:
        for line in launcher.stdout:
            if line.startswith("step ") and " 3/" in line:
                break
        ranks = processes_of(launcher.pid)
        assert sorted(ranks) == [0, 1]
        os.kill(ranks[1], signal.SIGKILL)
        _, err = launcher.communicate(timeout=100)
    finally:
        launcher.kill()
    assert launcher.returncode == 1
    assert err == "rank 1 was killed by SIGKILL; the other ranks were stopped\n"
    assert all(map(has_ended, ranks.values()))


OWN_RECIPE = """
import json
import os

from titan_async.recipes.debug import debug
from titan_async.training.trainer import AsyncTrainer

plain_step = AsyncTrainer.train_step


def failing_step(self, batches):
    if self.step == 3 and os.environ["RANK"] == "1":
        raise FileNotFoundError("a file that was there")
    plain_step(self, batches)


AsyncTrainer.train_step = failing_step


def failing() -> AsyncTrainer.Config:
    return debug()
"""


def test_only_the_rank_that_raises_is_reported(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_RECIPE)
    (tmp_path / "own.toml").write_text('recipe = "failing"\n')
    run = train(tmp_path, "--module", "own", "--metrics.log_freq", 1, recipe="own.toml")
    assert (run.status, run.steps) == (1, [1]), "step 2 would be reported once step 3 is launched"
    lines = run.err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2:] == [
        "FileNotFoundError: a file that was there",
        "rank 1 failed (exit status 1): FileNotFoundError: a file that was there",
    ]
    assert run.err.count("Traceback") == 1


def test_non_finite_gradients_stop_the_run(tmp_path: Path) -> None:
    rates = ("--optimizer.muon.lr", 1e20, "--optimizer.adamw.lr", 1e20, "--max_skipped_updates", 4)
    run = train(tmp_path, "--training.steps", 30, "--metrics.log_freq", 1, "--validator.no-enable", *rates)
    assert run.status == 2
    last = run.steps[-1]
    assert 4 < last < 29
    # The step that reaches the limit is not reported.
    assert re.fullmatch(
        rf"the gradient was not finite 4 times in a row up to step {last + 1}, first in the \w+ of .* "
        r"\(rank [01]\): lower the learning rate or training\.max_norm, or look at the data "
        r"\(max_skipped_updates sets the limit\)\n",
        run.err,
    )
    skipped = (
        rf"^step {last}: the gradient is not finite(, first .*)?, so its update is skipped \(3 so far\)$"
    )
    assert re.search(skipped, run.out, re.MULTILINE)


def torchrun(*flags: object) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "localhost:0", "-m", "titan_async.training.worker", *command(*flags)[4:],
    ]  # fmt: skip


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    done = subprocess.run(
        torchrun("--dump_folder", "run", *SHORT),
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert_learns(Run(done.returncode, done.stdout, ""))
    assert done.stdout.splitlines()[-1] == "checkpoints: run/checkpoint"


@pytest.mark.parametrize(
    ("flag", "value", "line"),
    [
        slow("--training.stesp", "3", "unknown flag --training.stesp; did you mean --training.steps?"),
        # Found only after torchtitan has been loaded, since no launcher has checked it.
        ("--parallelism.pipeline_parallel_schedule", "Async2WB", "did you mean Async2BW?"),
        slow(
            "--parallelism.pipeline_parallel_degree",
            "4",
            "2 processes were started, but the degrees of parallelism multiply to 4: start that many",
        ),
    ],
)
def test_a_users_mistake_under_torchrun_is_one_line(tmp_path: Path, flag: str, value: str, line: str) -> None:
    done = forks.run(torchrun(flag, value), cwd=tmp_path, env=environment())
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count(line) == 1
    # torchrun prints which process failed. No process of ours prints a traceback.
    assert not re.search(r'File ".*titan_async/training/', done.stderr)


def test_the_end_of_the_data_saves_and_is_reported(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Shall I compare thee to a summer's day? " * 1500)
    run = train(
        tmp_path, "--dataloader.dataset_path", "short.txt", "--dataloader.no-infinite",
        "--validator.no-enable", "--training.seq_len", 128,
    )  # fmt: skip
    assert run.status == 0
    (step,) = re.findall(r"the data ended after step (\d+) of 300", run.out)
    assert (tmp_path / "run" / "checkpoint" / f"step-{step}").is_dir()
    assert f"trained {step} steps" in run.out


def test_a_run_writes_the_times_of_its_stages(first: Run, folder: Path) -> None:
    record = json.loads((folder / "run/measured.json").read_text(encoding="utf-8"))
    numbers = [record[key] for key in ("pp", "microbatches", "microbatch_size", "seq_len")]
    assert numbers == [2, 4, 2, 64]
    parts = [part for stage in record["stages"] for part in stage["parts"]]
    assert parts == ["tok_embeddings", *(f"layers.{index}" for index in range(6)), "head"]
    # On a busy machine either may take longer.
    assert all(stage["forward"] > 0 and stage["backward"] > 0 for stage in record["stages"])
