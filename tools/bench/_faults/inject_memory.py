"""Ranks that record how much memory they have allocated and not freed. No fault is injected.

The rest of a process's private memory is free memory of its allocator; its growth is not a leak.
"""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path

__all__ = ["install"]

_PERIOD = 5.0
_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
           "keepcost")  # fmt: skip


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of the C library."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def install(rank: int, folder: str) -> None:
    """Writes lines to the file "rank N" in a folder: seconds of the machine's monotonic clock, and megabytes.

    Nothing is written if the C library has no `mallinfo2`.
    """
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return
    mallinfo.restype = _MallInfo
    threading.Thread(target=_write, args=(mallinfo, Path(folder, f"rank {rank}")), daemon=True).start()


def _write(mallinfo: ctypes._CFuncPtr, path: Path) -> None:
    with open(path, "w") as file:
        while True:
            info = mallinfo()
            print(time.monotonic(), (info.uordblks + info.hblkhd) / 1e6, file=file, flush=True)
            time.sleep(_PERIOD)
