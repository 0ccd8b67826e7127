"""The run that the runs of the family `storage` are to become, and what they all do."""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from _faults.runs import Run, is_same, saved_state, start
from titan_async.training.checkpoint.folders import complete_steps

__all__ = ["FLAGS", "INTERVAL", "STEPS", "Undisturbed", "go_on", "made", "sentence_of", "words_of"]

STEPS, INTERVAL = 12, 4

FLAGS = (
    *("--training.steps", STEPS, "--checkpoint.interval", INTERVAL, "--checkpoint.keep_latest_k", 0),
    *("--lr_scheduler.warmup_steps", 3, "--lr_scheduler.total_steps", STEPS),
)


@dataclass(frozen=True)
class Undisturbed:
    """The run that others are to become."""

    folder: Path
    state: dict[str, torch.Tensor]

    def copy_to(self, folder: Path) -> Path:
        """A run that has saved twice, the second time just now; returns the second checkpoint."""
        for step in (INTERVAL, 2 * INTERVAL):
            name = Path("run", "checkpoint", f"step-{step}")
            shutil.copytree(self.folder / name, folder / name)
        return folder / name

    def is_reached_in(self, folder: Path) -> bool:
        return STEPS in complete_steps(folder / "run/checkpoint") and is_same(
            saved_state(folder, STEPS), self.state
        )


def sentence_of(run: Run, pattern: str) -> str | None:
    """What a run has said that was to end with one sentence; None if it has not ended so."""
    [*others, last] = run.err.strip().splitlines() or [""]
    good = run.status == 2 and not others and re.search(pattern, last)
    return last if good else None


def made(scratch: Path, name: str) -> Path:
    folder = scratch / name.replace(" ", "-").replace("/", "-")
    folder.mkdir()
    return folder


def words_of(run: Run, sentence: str | None) -> str:
    """What the table says of a run."""
    return sentence or f"status {run.status}: {run.err.strip()[-300:]}"


def go_on(folder: Path, undisturbed: Undisturbed, *flags: object) -> tuple[bool, float]:
    """Start again; whether the run ends as the undisturbed one, and seconds to the first step."""
    begin = time.perf_counter()
    process = start(folder, *FLAGS, *flags)
    first = None
    for line in process.stdout:
        if first is None and line.startswith("step "):
            first = time.perf_counter() - begin
    process.communicate()
    same = process.returncode == 0 and undisturbed.is_reached_in(folder)
    return same, first or float("nan")
