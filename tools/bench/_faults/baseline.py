"""The run without faults to which runs of the family `storage` are compared."""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from _faults.runs import Run, is_same, saved_state, start
from titan_async.training.checkpoint.folders import complete_steps

__all__ = [
    "FLAGS",
    "INTERVAL",
    "STEPS",
    "Baseline",
    "error_line",
    "line_or_status",
    "make_folder",
    "resume_run",
]

STEPS, INTERVAL = 12, 4

FLAGS = (
    *("--training.steps", STEPS, "--checkpoint.interval", INTERVAL, "--checkpoint.keep_latest_k", 0),
    *("--lr_scheduler.warmup_steps", 3, "--lr_scheduler.total_steps", STEPS),
)


@dataclass(frozen=True)
class Baseline:
    """A run without faults, and its final state."""

    folder: Path
    state: dict[str, torch.Tensor]

    def copy_to(self, folder: Path) -> Path:
        """Copies the run with its first two checkpoints; returns the second one."""
        for step in (INTERVAL, 2 * INTERVAL):
            name = Path("run", "checkpoint", f"step-{step}")
            shutil.copytree(self.folder / name, folder / name)
        return folder / name

    def is_reached_in(self, folder: Path) -> bool:
        return STEPS in complete_steps(folder / "run/checkpoint") and is_same(
            saved_state(folder, STEPS), self.state
        )


def error_line(run: Run, pattern: str) -> str | None:
    """The error line of a run that ended with status 2 and printed no other; None if it does not match."""
    [*others, last] = run.err.strip().splitlines() or [""]
    good = run.status == 2 and not others and re.search(pattern, last)
    return last if good else None


def make_folder(scratch: Path, name: str) -> Path:
    folder = scratch / name.replace(" ", "-").replace("/", "-")
    folder.mkdir()
    return folder


def line_or_status(run: Run, sentence: str | None) -> str:
    """The cell of the table for a run: its error line, or its status."""
    return sentence or f"status {run.status}: {run.err.strip()[-300:]}"


def resume_run(folder: Path, baseline: Baseline, *flags: object) -> tuple[bool, float]:
    """Resumes; returns whether the run reaches the baseline's state, and seconds to the first step."""
    begin = time.perf_counter()
    process = start(folder, *FLAGS, *flags)
    first = None
    for line in process.stdout:
        if first is None and line.startswith("step "):
            first = time.perf_counter() - begin
    process.communicate()
    same = process.returncode == 0 and baseline.is_reached_in(folder)
    return same, first or float("nan")
