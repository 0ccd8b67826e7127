"""Waiting for events, instead of fixed times."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["MOST_SECONDS", "has_ended", "times_waited", "until"]

MOST_SECONDS = 100
"""Timeout of tests, many times the duration of any event on a busy machine."""

_T = TypeVar("_T")


def until(condition: Callable[[], _T], what: str) -> _T:
    """Waits until `condition` returns a true value, and returns it; `what` is the error message."""
    deadline = time.monotonic() + MOST_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
    return found


def has_ended(pid: int) -> bool:
    """Whether all threads of a process have ended, even if its parent has not waited for it yet."""

    def has_stopped(thread: str) -> bool:
        try:
            stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        return stat.rpartition(")")[2].split()[0] in "ZX"

    try:
        return all(map(has_stopped, os.listdir(f"/proc/{pid}/task")))
    except (FileNotFoundError, ProcessLookupError):
        return True


def times_waited(pid: int) -> int:
    """The number of times that a process has waited, such as between two polls."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("voluntary_ctxt_switches:"):
            return int(line.split()[1])
    raise AssertionError("this is not Linux")
