"""Processes of runs on this machine: whether they are alive, and the runs that a launcher has started."""

import fcntl
import os
import socket
import time
from pathlib import Path

from titan_async.monitor.run_folder import RunInfo, read_info, runs_in

__all__ = ["Launched", "has_exited", "is_alive", "is_local", "is_starting"]

_RESTART_SECONDS = 5.0  # in which the launcher may restart a failed run


def is_alive(pid: int) -> bool:
    """Whether a process exists and has not ended; a zombie has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:
        # The state follows the name, which is in parentheses and may contain any character.
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state not in ("Z", "X")


def is_local(info: RunInfo) -> bool:
    """Whether a run's rank 0 is on this machine."""
    return info.host == socket.gethostname()


def has_exited(info: RunInfo) -> bool:
    """Whether a run's rank 0 was on this machine and has ended."""
    return is_local(info) and not is_alive(info.pid)


class Launched:
    """The runs that a launcher starts in a `dump_folder` from now on: one, and another after each failure.

    Args:
        run_dir: the `dump_folder`; it need not exist yet.
        pid: of the launcher.
    """

    def __init__(self, run_dir: str, pid: int) -> None:
        self._run_dir, self._pid = run_dir, pid
        self._earlier = set(runs_in(run_dir))
        self._failed_at: float | None = None

    def latest(self) -> Path | None:
        """The folder of events of the latest run; None before the first."""
        runs = [folder for folder in runs_in(self._run_dir) if folder not in self._earlier]
        return runs[-1] if runs else None

    def is_over(self, end: str | None) -> bool:
        """Whether the launcher will not start another run.

        Args:
            end: the reason for which the latest run has ended; None if it has not.
        """
        if end != "failed":
            self._failed_at = None
        elif self._failed_at is None:
            self._failed_at = time.monotonic()
        waited = self._failed_at is not None and time.monotonic() - self._failed_at > _RESTART_SECONDS
        return waited or end in ("finished", "stopped") or not is_alive(self._pid)


def is_starting(run_dir: str | Path) -> bool:
    """Whether a run on this machine is starting in a `dump_folder` and has written no events yet."""
    try:
        descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # launcher and rank 0 share a lock
        runs = runs_in(run_dir)
        return not runs or has_exited(read_info(runs[-1]))
    except OSError:  # the file system has no locks
        return False
    finally:
        os.close(descriptor)
    return False
