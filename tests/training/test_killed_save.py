"""All ranks are killed during a save: the run resumes from the previous checkpoint."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support.selection import slow
from tests.support.training import RECIPE, processes_of, start, train
from tests.support.waiting import has_ended, until
from titan_async.training.checkpoint.folders import complete_steps

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

FLAGS = ("--checkpoint.interval", 1, "--validator.no-enable",
         "--lr_scheduler.warmup_steps", 3, "--lr_scheduler.total_steps", 500)  # fmt: skip


def half_written(checkpoints: Path) -> list[int]:
    steps = {int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*")}
    return sorted(steps - set(complete_steps(checkpoints)))


def kill_during_a_save(folder: Path, *flags: object) -> None:
    """Start the run, and kill all of it when a save has begun that is not the first."""
    with open(os.devnull, "w") as null:
        # The recipe's own model, whose saves take a while.
        run = start(folder, *FLAGS, "--training.steps", 500, *flags, recipe=RECIPE, stdout=null, stderr=null)
    checkpoints = folder / "run/checkpoint"
    pids: list[int] = []

    def is_saving() -> bool:
        # Newer than the saved ones: older ones without an index are just being removed.
        saved = complete_steps(checkpoints)
        return bool(saved) and any(step > saved[-1] for step in half_written(checkpoints))

    def signal_all(number: signal.Signals) -> None:
        for pid in pids:
            os.kill(pid, number)

    while run.poll() is None:
        pids = pids or (complete_steps(checkpoints) and [*processes_of(run.pid).values(), run.pid])
        if pids and is_saving():
            signal_all(signal.SIGSTOP)  # so that the save does not end between the look and the kill
            if is_saving():
                signal_all(signal.SIGKILL)
                break
            signal_all(signal.SIGCONT)
        time.sleep(0.001)
    assert run.wait(100) == -signal.SIGKILL
    # Forked ranks also hold the launcher's lock on the folder until they have ended.
    until(lambda: all(map(has_ended, pids)), "killed ranks are still there")


@pytest.mark.parametrize("mode", [slow("disabled"), "async"])
def test_a_killed_save(tmp_path: Path, mode: str) -> None:
    checkpoints = tmp_path / "run/checkpoint"
    kill_during_a_save(tmp_path, "--checkpoint.async_mode", mode)
    saved, broken = complete_steps(checkpoints), half_written(checkpoints)
    assert broken[-1] > saved[-1]
    end = broken[-1] + 2
    resumed = train(tmp_path, *FLAGS, "--training.steps", end, "--metrics.log_freq", 1, recipe=RECIPE)
    assert (resumed.status, resumed.err) == (0, "")
    assert resumed.steps == list(range(saved[-1] + 1, end + 1))
    assert complete_steps(checkpoints)[-1] == end
    assert half_written(checkpoints) == []
