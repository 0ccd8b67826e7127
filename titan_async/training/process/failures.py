"""How a worker process tells the launcher why it failed, and how the launcher picks the root cause.

A failing worker leaves `rank-N.json` in the folder named by `TITAN_ASYNC_ERROR_DIR`. When one stage
dies, the others fail a moment later for want of it; the kinds keep cause and consequence apart.
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
    "NoAnswerError",
    "end_with_launcher",
    "read_failures",
    "report_failure",
    "root_cause",
]

ERROR_DIR = "TITAN_ASYNC_ERROR_DIR"

Kind = Literal["user", "error", "no_answer", "lost_peer"]


class NoAnswerError(Exception):
    """Another rank has not answered in time; the message is a sentence for the user."""


@dataclass(frozen=True)
class Failure:
    """Why one rank failed."""

    rank: int
    kind: Kind
    """"user": a mistake the user can mend; "error": any exception; "no_answer": another rank lets this one
    wait too long; "lost_peer": another rank is gone."""
    message: str
    """One sentence for "user" and "no_answer"; the exception's type and text otherwise."""
    time: float
    """Seconds since the epoch."""


def report_failure(kind: Kind, message: str) -> bool:
    """Leaves this process's failure for the launcher; the first report of a process stands.

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
    """Returns the reports in a folder, earliest first."""
    found = []
    for path in Path(folder).glob("rank-*.json"):
        try:
            found.append(Failure(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue  # a worker killed while writing says nothing
    return sorted(found, key=lambda failure: failure.time)


def root_cause(failures: list[Failure]) -> Failure | None:
    """Returns the earliest failure that is not the consequence of another, else the earliest of all."""
    causes = [failure for failure in failures if failure.kind != "lost_peer"]
    return next(iter(causes or failures), None)


def end_with_launcher() -> None:
    """Makes the kernel kill this process when the launcher dies, however it dies (Linux only).

    Without it a launcher that is itself killed by SIGKILL leaves its workers running. Does nothing in
    a process that our launcher has not started.
    """
    launcher = os.environ.get("TITAN_ASYNC_LAUNCHER_PID")
    if sys.platform != "linux" or not launcher:
        return
    import ctypes
    import signal

    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)
