"""A launcher in a separate process: preparation in a test's script, and waiting in the test."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from tests.support.waiting import until

__all__ = ["begin_launcher", "wait_for_looks"]


def begin_launcher(folder: str | Path) -> None:
    """Makes the launcher of this process record each poll of its workers in `folder`."""
    from torch.distributed.elastic.multiprocessing import PContext
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    tempfile.tempdir = None  # TMPDIR may have changed
    subprocess_handler.Popen = subprocess.Popen  # type: ignore[misc] # workers that are not forks
    notes = os.open(Path(folder, "looks"), os.O_WRONLY | os.O_CREAT)
    wait = PContext.wait

    def noted(self: PContext, timeout: float = -1, period: float = 1) -> object:
        os.write(notes, b".")
        return wait(self, timeout, period)

    PContext.wait = noted  # type: ignore[method-assign, assignment]


def wait_for_looks(folder: Path, more: int = 1) -> None:
    """Waits until a launcher has polled its workers `more` times.

    It forwards signals before its first poll.
    """
    looks = folder / "looks"
    before = looks.stat().st_size if looks.exists() else 0
    until(
        lambda: looks.exists() and looks.stat().st_size >= before + more,
        "the launcher does not poll its workers",
    )
