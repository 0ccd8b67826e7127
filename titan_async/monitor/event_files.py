"""Writes the event files of one rank; `titan_async.monitor.events` has their format."""

import os
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from titan_async.monitor.events import (
    BURST,
    CAPACITY,
    HEADER_BYTES,
    RECORD,
    STATE,
    ring_path,
    summary_path,
)

__all__ = ["EventWriter"]


class EventWriter:
    """The ring and the summary of one rank.

    Args:
        folder: the run's, `RUN_DIR/events/RUN_ID`, which is there.
        rank: whose files.

    Raises:
        OSError: if the files cannot be made; so do the methods if they cannot be written.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._summary = os.open(summary_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._ring = os.open(ring_path(folder, rank), os.O_WRONLY | os.O_CREAT, 0o666)
        self._state = np.zeros(1, STATE)

    def write(self, records: npt.NDArray[np.void]) -> None:
        """Add `RECORD`s, at most `BURST`; `write_state` must follow."""
        assert len(records) <= BURST
        slot = int(self._state["count"][0]) % CAPACITY
        here = records[: CAPACITY - slot]
        _write(self._ring, here.tobytes(), HEADER_BYTES + slot * RECORD.itemsize)
        if len(here) < len(records):
            _write(self._ring, records[len(here) :].tobytes(), HEADER_BYTES)
        self._state["count"] += len(records)

    def write_state(
        self, current: npt.NDArray[np.void], memory: tuple[int, int, int], closed: bool = False
    ) -> None:
        """Write the header.

        Args:
            current: a `RECORD` of the span under way.
            memory: bytes in use, at most so far, and in all.
            closed: whether nothing will follow.
        """
        state = self._state
        state["serial"] += 1
        state["serial_again"] = state["serial"]
        state["beat"] = time.time_ns()
        state["closed"] = state["beat"] if closed else 0
        state["memory"], state["memory_peak"], state["memory_limit"] = memory
        state["current"] = current
        _write(self._ring, state.tobytes(), 0)

    def write_summary(self, rows: npt.NDArray[np.void]) -> None:
        """Add `SUMMARY`s."""
        data = rows.tobytes()
        while data:
            data = data[os.write(self._summary, data) :]

    def close(self) -> None:
        """Close the files."""
        os.close(self._ring)
        os.close(self._summary)


def _write(file: int, data: bytes, position: int) -> None:
    while data:
        written = os.pwrite(file, data, position)
        data, position = data[written:], position + written
