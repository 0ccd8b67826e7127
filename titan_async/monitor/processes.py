"""The processes of a run on this machine: whether they are alive, and the runs that a launcher starts."""

import fcntl
import os
import socket
import time
from pathlib import Path

from titan_async.monitor.run_folder import RunInfo, read_info, runs_in

__all__ = ["Launched", "has_gone", "is_alive", "is_here", "is_starting"]

_AFTER_FAILURE = 5.0  # seconds in which a failed run may be started again


def is_alive(pid: int) -> bool:
    """Whether a process is there and has not ended; one that its parent has not yet looked after has."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:
        # After the name, which may hold anything, in parentheses.
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state not in ("Z", "X")


def is_here(info: RunInfo) -> bool:
    """Whether a run's rank 0 is on this machine."""
    return info.host == socket.gethostname()


def has_gone(info: RunInfo) -> bool:
    """Whether a run's rank 0 was on this machine and is no more."""
    return is_here(info) and not is_alive(info.pid)


class Launched:
    """The runs that a launcher starts in a `dump_folder` from now on: one, or another when it fails.

    Args:
        run_dir: the `dump_folder`; it need not exist yet.
        pid: of the launcher.
    """

    def __init__(self, run_dir: str, pid: int) -> None:
        self._run_dir, self._pid = run_dir, pid
        self._earlier = set(runs_in(run_dir))
        self._failed_at: float | None = None

    def latest(self) -> Path | None:
        """The folder of events of the latest of them; None as long as there is none."""
        runs = [folder for folder in runs_in(self._run_dir) if folder not in self._earlier]
        return runs[-1] if runs else None

    def is_over(self, end: str | None) -> bool:
        """Whether nothing more is to come.

        Args:
            end: why the latest run has ended; None if it goes on.
        """
        if end != "failed":
            self._failed_at = None
        elif self._failed_at is None:
            self._failed_at = time.monotonic()
        waited = self._failed_at is not None and time.monotonic() - self._failed_at > _AFTER_FAILURE
        return waited or end in ("finished", "stopped") or not is_alive(self._pid)


def is_starting(run_dir: str | Path) -> bool:
    """Whether a run on this machine is under way in a `dump_folder`, and has no events there yet."""
    try:
        descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # launcher and rank 0 share a lock
        runs = runs_in(run_dir)
        return not runs or has_gone(read_info(runs[-1]))
    except OSError:  # no locks here
        return False
    finally:
        os.close(descriptor)
    return False
