"""Whether a process on this machine still runs, that of a run above all."""

import os
import socket
from pathlib import Path

from titan_async.monitor.run_folder import RunInfo

__all__ = ["has_gone", "is_alive", "is_here"]


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
