"""Whether a process on this machine still runs."""

import os
from pathlib import Path

__all__ = ["is_alive"]


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
