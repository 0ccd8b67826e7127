"""How a worker process reports a failure to the launcher, and how the launcher finds the root cause.

A failing worker writes `rank-N.json` to the folder named by `TITAN_ASYNC_ERROR_DIR`. When one stage dies, the
others fail a moment later as a consequence; the kinds of failures distinguish the two.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

__all__ = [
    "ERROR_DIR",
    "Failure",
    "HungRankError",
    "end_with_launcher",
    "read_failures",
    "report_failure",
    "root_cause",
]

ERROR_DIR = "TITAN_ASYNC_ERROR_DIR"

Kind = Literal["user", "error", "no_answer", "lost_peer"]


class HungRankError(Exception):
    """A wait for another rank has timed out; the message is a sentence for the user."""


@dataclass(frozen=True)
class Failure:
    """Why one rank failed."""

    rank: int
    kind: Kind
    """"user": a mistake that the user can fix; "error": any exception; "no_answer": a wait for another rank
    has timed out; "lost_peer": another rank has died."""
    message: str
    """One sentence for "user" and "no_answer"; the exception's type and text otherwise."""
    time: float
    """Seconds since the epoch."""


def report_failure(kind: Kind, message: str) -> bool:
    """Report this process's failure to the launcher; only the first report of a process counts.

    Returns:
        Whether a launcher will read it; if not, the caller prints the message itself.
    """
    folder = os.environ.get(ERROR_DIR)
    if not folder:
        return False
    rank = int(os.environ.get("RANK", "0"))
    path = Path(folder) / f"rank-{rank}.json"
    failure = Failure(rank=rank, kind=kind, message=message, time=time.time())
    try:
        if not path.exists():
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(asdict(failure)), encoding="utf-8")
            partial.replace(path)  # never a half-written report
    except OSError:
        return False
    return True


def read_failures(folder: str | Path) -> list[Failure]:
    """The reports in a folder, earliest first."""
    found = []
    for path in Path(folder).glob("rank-*.json"):
        try:
            found.append(Failure(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue  # of a worker killed while it wrote
    return sorted(found, key=lambda failure: failure.time)


def root_cause(failures: list[Failure]) -> Failure | None:
    """The earliest failure that is not the consequence of another, else the earliest of all."""
    causes = [failure for failure in failures if failure.kind != "lost_peer"]
    return next(iter(causes or failures), None)


def end_with_launcher() -> None:
    """Let the kernel kill this process when the launcher dies, even by SIGKILL (Linux only).

    Does nothing in a process that our launcher has not started.
    """
    launcher = os.environ.get("TITAN_ASYNC_LAUNCHER_PID")
    if sys.platform != "linux" or not launcher:
        return
    import ctypes
    import signal

    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != int(launcher):  # the launcher died before the line above
        os.kill(os.getpid(), signal.SIGKILL)
