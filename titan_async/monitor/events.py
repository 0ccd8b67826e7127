"""The files in which ranks leave what they do: their formats, their writer and their reader.

A run writes a folder of its own, `RUN_DIR/events/RUN_ID/`, so that a run that resumes another, or starts anew
in the same folder, leaves the other's files alone. RUN_IDs sort by time. In it:

    run.json            what the run is (`titan_async.monitor.run_folder.RunInfo`), written once by rank 0
    journal.jsonl       what happens, a line of JSON each, by rank 0 (`titan_async.monitor.journal`)
    rank-00000.ring     the latest spans of a rank: a ring buffer
    rank-00000.summary  where a rank's time went, for each interval between two logged steps

A ring file is a header, then room for `CAPACITY` records of 32 bytes (`RECORD`). Record number n, from 0, is
at `HEADER_BYTES + 32 * (n % CAPACITY)`. The header is one `STATE`, which is written anew several times a
second, after the records that it counts; between two headers there are at most `BURST` of them, so that a
reader can rely on the `CAPACITY - BURST` records before those that the header counts. A summary file holds
one `SUMMARY` after another, which has fewer kinds in runs of formats 1 and 2. All numbers are little-endian.
Times are nanoseconds since the epoch by the clock of the rank's host, which is read once when the run starts
and counted on from there, so that they never go back within a file.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from titan_async.monitor.run_folder import read_format
from titan_async.pipelining.recording import COMPUTE_KINDS, Kind

__all__ = [
    "BURST",
    "CAPACITY",
    "HEADER_BYTES",
    "RECORD",
    "STATE",
    "SUMMARY",
    "EventWriter",
    "RankReader",
    "RankState",
    "ring_path",
    "summary_path",
    "utilization_of",
]

CAPACITY = 1 << 16
"""Records that a ring holds: 2 MiB."""

_KINDS_OF_FORMAT = {1: 16, 2: 17, 3: len(Kind)}
"""How many kinds of spans files had, by the format in their run's `run.json`."""

BURST = 4096
"""Records that are written at most before the header counts them."""

HEADER_BYTES = 4096
"""Where the first record is."""

RECORD = np.dtype(
    [
        ("start", "<i8"),
        ("end", "<i8"),  # 0 in the span that is under way
        ("batch", "<i4"),  # training step whose batch it is, from 1; -1 for none
        ("microbatch", "<i4"),  # of that batch, from 0; -1 if it is about the whole batch
        ("version", "<i4"),  # updates that the weights in use have seen; -1 for none
        ("stage", "<u2"),
        ("kind", "u1"),  # a `titan_async.pipelining.recording.Kind`
        ("depth", "u1"),  # spans that this one lies within
    ]
)
"""One span. Records are in the order in which spans end: those within another come before it."""

STATE = np.dtype(
    [
        ("serial", "<u8"),  # goes up with every write, and is at the end once more
        ("count", "<u8"),  # records written so far
        ("beat", "<i8"),  # when this was written; 0 before the first
        ("closed", "<i8"),  # when the rank stopped recording in order; 0 as long as it goes on
        ("memory", "<i8"),  # bytes in use: of the accelerator, or resident without one
        ("memory_peak", "<i8"),  # the most so far
        ("memory_limit", "<i8"),  # bytes that there are; 0 if unknown
        ("current", RECORD),  # the innermost span under way; its start is 0 if there is none
        ("serial_again", "<u8"),  # differs from `serial` in a header that is half-written
    ]
)
"""What a rank is doing now."""


def _summary_of(kinds: int) -> np.dtype[np.void]:
    return np.dtype(
        [
            ("first_step", "<i4"),
            ("last_step", "<i4"),
            ("start", "<i8"),
            ("end", "<i8"),
            ("stage", "<u2"),
            # By kind, without those of spans within; IDLE is what is left of steps.
            ("seconds", "<f4", (kinds,)),
        ]
    )


SUMMARY = _summary_of(len(Kind))
"""An interval of steps on one stage. What is no stage's own, such as the optimizer, counts for the rank's
first."""


def utilization_of(rows: npt.NDArray[np.void]) -> dict[int, float]:
    """The share of the time of steps that each stage of a rank was busy in an interval, or in several.

    Args:
        rows: `SUMMARY`s of the same rank, one for each of its stages and each interval.
    """
    outside = [int(Kind.SAVE), int(Kind.VALIDATE), int(Kind.GARBAGE_COLLECTION)]
    seconds = rows["seconds"].astype(float)
    of_steps = seconds.sum() - seconds[:, outside].sum()
    busy = seconds[:, list(map(int, COMPUTE_KINDS))].sum(axis=1)
    return {
        int(stage): float(busy[rows["stage"] == stage].sum() / of_steps) if of_steps else 0.0
        for stage in np.unique(rows["stage"])
    }


def ring_path(folder: Path, rank: int) -> Path:
    """The ring file of a rank."""
    return folder / f"rank-{rank:05}.ring"


def summary_path(folder: Path, rank: int) -> Path:
    """The summary file of a rank."""
    return folder / f"rank-{rank:05}.summary"


@dataclass(frozen=True)
class RankState:
    """A rank's header as it was read: see `STATE`, whose times and bytes these are."""

    count: int
    beat: int
    closed: int
    memory: int
    memory_peak: int
    memory_limit: int
    current: np.void
    """One `RECORD`."""


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


class RankReader:
    """Reads the files of one rank while it may be writing them.

    Args:
        folder: the run's, `RUN_DIR/events/RUN_ID`.
        rank: whose files.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self._ring, self._summary = ring_path(folder, rank), summary_path(folder, rank)
        self._read = 0  # records that `new_records` has returned or passed over

    def state(self) -> RankState | None:
        """The header; None if there is no whole header yet."""
        try:
            with open(self._ring, "rb") as file:
                return _state(file.read(STATE.itemsize))
        except OSError:
            return None

    def new_records(self) -> npt.NDArray[np.void]:
        """The records since the last call, `RECORD`s in order; at first all that the ring holds.

        Those that were overwritten before they could be read are missing.
        """
        try:
            with open(self._ring, "rb") as file:
                before = _state(file.read(STATE.itemsize))
                if before is None:
                    return np.empty(0, RECORD)
                first = max(self._read, before.count - (CAPACITY - BURST))
                records = _read_ring(file, first, before.count)
                file.seek(0)
                after = _state(file.read(STATE.itemsize)) or before
        except OSError:
            return np.empty(0, RECORD)
        self._read = before.count
        # The writer may have gone round meanwhile.
        return records[max(after.count - (CAPACITY - BURST) - first, 0) :]

    def summaries(self) -> npt.NDArray[np.void]:
        """All intervals so far, `SUMMARY`s in order."""
        try:
            data = self._summary.read_bytes()
        except OSError:
            return np.empty(0, SUMMARY)
        kinds = _KINDS_OF_FORMAT[read_format(self._summary.parent)]
        form = _summary_of(kinds)
        written = np.frombuffer(data[: len(data) // form.itemsize * form.itemsize], form)
        rows = np.zeros(len(written), SUMMARY)
        for name in ("first_step", "last_step", "start", "end", "stage"):
            rows[name] = written[name]
        rows["seconds"][:, :kinds] = written["seconds"]
        return rows


def _read_ring(file: BinaryIO, first: int, end: int) -> npt.NDArray[np.void]:
    """The records of these numbers, `end` excluded."""
    parts = [np.empty(0, RECORD)]
    while first < end:
        slot = first % CAPACITY
        count = min(end - first, CAPACITY - slot)
        file.seek(HEADER_BYTES + slot * RECORD.itemsize)
        parts.append(np.frombuffer(file.read(count * RECORD.itemsize), RECORD))
        first += count
    return np.concatenate(parts)


def _state(data: bytes) -> RankState | None:
    if len(data) < STATE.itemsize:
        return None
    fields = np.frombuffer(data, STATE)[0]
    if fields["serial"] != fields["serial_again"]:
        return None
    names = ("count", "beat", "closed", "memory", "memory_peak", "memory_limit")
    return RankState(**{name: int(fields[name]) for name in names}, current=fields["current"])
