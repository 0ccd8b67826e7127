"""Timeouts of process groups, with a simulated clock."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.trainer_loop import Trained, Trainers, arguments
from titan_async.training.process.timeouts import WaitLimits
from titan_async.training.trainer import AsyncTrainer

LATE = 2.5  # seconds, more than the limit of the run
COMM = SimpleNamespace(init_timeout_seconds=300, train_timeout_seconds=100)


class Run:
    """Steps of given durations, and the timeout with which each begins."""

    def __init__(self) -> None:
        self.now, self.applied = 0.0, []
        self.limits = WaitLimits(COMM, self.applied.append, clock=lambda: self.now)

    def step(self, seconds: float, *pauses: str) -> float:
        self.limits.begin(pauses)
        self.now += seconds
        return self.applied[-1].total_seconds()


def after_start(seconds: float = 5.0) -> Run:
    """A run after its first three steps, of which two have compiled for a long time."""
    run = Run()
    assert [run.step(70), run.step(60), run.step(seconds)] == [300, 300, 300]
    return run


def test_timeouts_are_long_until_after_the_first_update() -> None:
    run = Run()
    assert run.applied == [timedelta(seconds=300)]  # when the trainer is created
    # The first step, the first with an update, one in which another rank may still run that, and all others.
    assert [run.step(70), run.step(60), run.step(5), run.step(5), run.step(5)] == [300, 300, 300, 100, 100]


def test_timeouts_are_set_again_after_torchtitan_shortens_them() -> None:
    run = Run()
    for number in range(1, 4):
        run.step(1)
        assert len(run.applied) == 1 + number
    for _ in range(20):
        run.step(1)
    assert len(run.applied) == 5, "set although nothing changes"


def test_timeouts_are_long_for_the_first_validation_and_save() -> None:
    run = after_start()
    assert [run.step(5), run.step(20, "validation"), run.step(5), run.step(5)] == [100, 300, 300, 100]
    assert [run.step(5, "validation"), run.step(5)] == [100, 100]
    assert [run.step(20, "validation", "save"), run.step(5), run.step(5)] == [300, 300, 100]
    assert [run.step(5, "save"), run.step(5)] == [100, 100]


def test_timeouts_grow_with_long_steps() -> None:
    run = after_start(120)
    assert [run.step(120), run.step(130), run.step(120)] == [480, 480, 520]
    for _ in range(8):
        run.step(10)
    assert run.step(10) == 100, "the limit stays long although steps are short again"


def test_compilation_does_not_count_for_long() -> None:
    run = Run()
    assert [run.step(250), run.step(200), run.step(5), run.step(5)] == [300, 1000, 800, 100]


def test_a_validation_extends_the_timeout_of_its_step_and_the_next() -> None:
    run = after_start()
    run.step(90, "validation")  # compiles, too
    run.step(5)
    assert [run.step(40, "validation"), run.step(5), run.step(5)] == [360, 160, 100]
    assert run.step(40, "save", "validation") == 300  # a first save, beside what validations take


@pytest.mark.parametrize(
    "save",
    [
        lambda trainer: AsyncTrainer._save_after(trainer, signal.SIGTERM),
        AsyncTrainer._save_at_the_end_of_data,
    ],
)
def test_a_save_at_the_end_extends_the_timeout_too(
    save: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan_async.training.trainer.save_for_resuming", lambda *_: True)
    trainer = mock.Mock(step=7)
    trainer.config.dump_folder, trainer.config.checkpoint.folder = "outputs", "checkpoint"
    save(trainer)
    first, second, *_ = trainer.method_calls
    assert (first, second) == (mock.call.wait_limits.begin(["save"]), mock.call._drain_and_update())


def hold_up(trainer: Any, trained: Trained) -> None:
    """Let steps 3 and 4 of rank 1 take longer than the limit, and record the timeouts in each step."""
    timeouts = trained.extra["timeouts"] = []
    next_batch = trainer._next_batch

    def slow(*args: Any) -> Any:
        timeouts.append({name: timeout_of(group) for name, group in groups(trainer).items()})
        if dist.get_rank() == 1 and trainer.step in (3, 4):
            time.sleep(LATE)
        return next_batch(*args)

    trainer._next_batch = slow


def groups(trainer: Any) -> dict[str, Any]:
    from titan_async import _group_internals

    found = {f"joint {i}": group for i, group in enumerate(_group_internals._groups)}
    meshes = trainer.parallel_dims.get_all_one_dimensional_meshes()
    found |= {name: mesh.get_group() for name, mesh in meshes.items()}
    return found | {"default": dist.group.WORLD, "preemption": trainer.preemption.group}


def timeout_of(group: Any) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_a_run_survives_steps_longer_than_the_timeout(runs: Trainers, tmp_path: Path) -> None:
    flags = ("--comm.init_timeout_seconds", 200, "--comm.train_timeout_seconds", 2)
    flags += ("--validator.no-enable", "--checkpoint.interval", 100)
    for trained in runs(2, arguments(tmp_path, "tiny_llama", *flags), hold_up):
        timeouts = trained.extra["timeouts"]
        assert len(timeouts) == 6
        assert {"pp", "default", "preemption"} <= timeouts[0].keys()
        # The first step creates the groups of the pipeline's edges, the second that of the norm.
        assert sum(name.startswith("joint") for name in timeouts[2]) >= 2
        assert {seconds for each in timeouts[:3] for seconds in each.values()} == {200}
        for each in timeouts[3:5]:
            assert len(set(each.values())) == 1
            assert 4 * LATE <= each["default"] < 200
