"""The launcher in a process of its own: what a test's script does first, and how the test follows it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path

from tests.support.waiting import until

__all__ = ["begin_launcher", "wait_for_looks"]


def begin_launcher(folder: str | Path) -> None:
    """In a process that will launch workers: let it note each of its looks at them in `folder`."""
    from torch.distributed.elastic.multiprocessing import PContext
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
    tempfile.tempdir = None  # it may have a TMPDIR of its own
    subprocess_handler.Popen = subprocess.Popen  # type: ignore[misc] # workers that are no forks
    notes = os.open(Path(folder, "looks"), os.O_WRONLY | os.O_CREAT)
    wait = PContext.wait

    def noted(self: PContext, timeout: float = -1, period: float = 1) -> object:
        os.write(notes, b".")
        return wait(self, timeout, period)

    PContext.wait = noted  # type: ignore[method-assign, assignment]


def wait_for_looks(folder: Path, more: int = 1) -> None:
    """Until a launcher has looked at its workers so many times more.

    Before it looks for the first time, it has begun to pass signals on.
    """
    looks = folder / "looks"
    before = looks.stat().st_size if looks.exists() else 0
    until(lambda: looks.exists() and looks.stat().st_size >= before + more, "the launcher does not look")
