"""Event files of ranks: format, writer and reader.

Each run writes its own folder, `RUN_DIR/events/RUN_ID/`. A run that resumes another, or starts again in the
same folder, does not change the other's files. RUN_IDs sort by time. The folder contains:

    run.json            the run's description (`titan_async.monitor.run_folder.RunInfo`), written by rank 0
    journal.jsonl       events of the whole run, one JSON object per line, by rank 0 (see `journal`)
    rank-00000.ring     the latest spans of a rank: a ring buffer
    rank-00000.summary  a rank's time by kind of span, for each interval between two logged steps

A ring file is a header followed by `CAPACITY` records of 32 bytes (`RECORD`). Record number n, from 0, is at
`HEADER_BYTES + 32 * (n % CAPACITY)`. The header is one `STATE`. It is rewritten several times a second, after
the records that it counts. At most `BURST` records are written between two headers, so that the
`CAPACITY - BURST` records before the header's count are valid. A summary file is a sequence of `SUMMARY`
records, which have fewer kinds in formats 1 and 2. All numbers are little-endian. Times are nanoseconds
since the epoch by the clock of the rank's host. That clock is read once at the start, and a monotonic clock
is added to it, so that times within a file never decrease.
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
"""Records in a ring: 2 MiB."""

_KINDS_OF_FORMAT = {1: 16, 2: 17, 3: len(Kind)}
"""Number of kinds of spans, by the format in `run.json`."""

BURST = 4096
"""Maximum number of records written between two headers."""

HEADER_BYTES = 4096
"""Offset of the first record."""

RECORD = np.dtype(
    [
        ("start", "<i8"),
        ("end", "<i8"),  # 0 in the current span
        ("batch", "<i4"),  # training step of the batch, from 1; -1 for none
        ("microbatch", "<i4"),  # of that batch, from 0; -1 for the whole batch
        ("version", "<i4"),  # updates applied to the weights in use; -1 for none
        ("stage", "<u2"),
        ("kind", "u1"),  # a `titan_async.pipelining.recording.Kind`
        ("depth", "u1"),  # number of enclosing spans
    ]
)
"""One span. Records are in the order in which spans end: nested spans precede the enclosing one."""

STATE = np.dtype(
    [
        ("serial", "<u8"),  # incremented with every write, and repeated at the end
        ("count", "<u8"),  # records written so far
        ("beat", "<i8"),  # heartbeat: the time of this write; 0 before the first
        ("closed", "<i8"),  # when the rank closed the file; 0 before
        ("memory", "<i8"),  # bytes in use: of the accelerator, or resident without one
        ("memory_peak", "<i8"),
        ("memory_limit", "<i8"),  # total bytes; 0 if unknown
        ("current", RECORD),  # the innermost open span; its start is 0 if there is none
        ("serial_again", "<u8"),  # differs from `serial` in an incomplete header
    ]
)
"""The current state of a rank."""


def _summary_of(kinds: int) -> np.dtype[np.void]:
    return np.dtype(
        [
            ("first_step", "<i4"),
            ("last_step", "<i4"),
            ("start", "<i8"),
            ("end", "<i8"),
            ("stage", "<u2"),
            # By kind, without nested spans; IDLE is the rest of the steps.
            ("seconds", "<f4", (kinds,)),
        ]
    )


SUMMARY = _summary_of(len(Kind))
"""An interval of steps on one stage. Time that belongs to no stage, such as the optimizer's, is added to the
rank's first stage."""


def utilization_of(rows: npt.NDArray[np.void]) -> dict[int, float]:
    """The fraction of the steps' time in which each stage of a rank computed.

    Args:
        rows: `SUMMARY` records of one rank, for all its stages and one interval or more.
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
    """A rank's header; the fields are those of `STATE`."""

    count: int
    beat: int
    closed: int
    memory: int
    memory_peak: int
    memory_limit: int
    current: np.void
    """One `RECORD`."""


class EventWriter:
    """Writes the ring and the summary of one rank.

    Args:
        folder: of the run, `RUN_DIR/events/RUN_ID`; it exists.
        rank: the rank whose files are written.

    Raises:
        OSError: if the files cannot be created; the methods raise it if they cannot be written.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._summary = os.open(summary_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._ring = os.open(ring_path(folder, rank), os.O_WRONLY | os.O_CREAT, 0o666)
        self._state = np.zeros(1, STATE)

    def write(self, records: npt.NDArray[np.void]) -> None:
        """Appends at most `BURST` records; `write_state` must follow."""
        assert len(records) <= BURST
        slot = int(self._state["count"][0]) % CAPACITY
        until_end = records[: CAPACITY - slot]
        _write(self._ring, until_end.tobytes(), HEADER_BYTES + slot * RECORD.itemsize)
        if len(until_end) < len(records):
            _write(self._ring, records[len(until_end) :].tobytes(), HEADER_BYTES)
        self._state["count"] += len(records)

    def write_state(
        self, current: npt.NDArray[np.void], memory: tuple[int, int, int], closed: bool = False
    ) -> None:
        """Writes the header.

        Args:
            current: a `RECORD` of the innermost open span.
            memory: bytes in use, peak and total.
            closed: whether this is the last write.
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
        """Appends `SUMMARY` records."""
        data = rows.tobytes()
        while data:
            data = data[os.write(self._summary, data) :]

    def close(self) -> None:
        """Closes the files."""
        os.close(self._ring)
        os.close(self._summary)


def _write(file: int, data: bytes, position: int) -> None:
    while data:
        written = os.pwrite(file, data, position)
        data, position = data[written:], position + written


class RankReader:
    """Reads the files of one rank while the rank may be writing them.

    Args:
        folder: of the run, `RUN_DIR/events/RUN_ID`.
        rank: the rank whose files are read.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self._ring, self._summary = ring_path(folder, rank), summary_path(folder, rank)
        self._read = 0  # records that `new_records` has returned or skipped

    def state(self) -> RankState | None:
        """The header; None if there is no complete header."""
        try:
            with open(self._ring, "rb") as file:
                return _state(file.read(STATE.itemsize))
        except OSError:
            return None

    def new_records(self) -> npt.NDArray[np.void]:
        """The records since the last call, in order; in the first call, all in the ring.

        Records that were overwritten before they were read are missing.
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
        # The writer may have overwritten some of them during the read.
        return records[max(after.count - (CAPACITY - BURST) - first, 0) :]

    def summaries(self) -> npt.NDArray[np.void]:
        """The `SUMMARY` records of all intervals so far, in order."""
        try:
            data = self._summary.read_bytes()
        except OSError:
            return np.empty(0, SUMMARY)
        kinds = _KINDS_OF_FORMAT[read_format(self._summary.parent)]
        dtype = _summary_of(kinds)
        written = np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype)
        rows = np.zeros(len(written), SUMMARY)
        for name in ("first_step", "last_step", "start", "end", "stage"):
            rows[name] = written[name]
        rows["seconds"][:, :kinds] = written["seconds"]
        return rows


def _read_ring(file: BinaryIO, first: int, end: int) -> npt.NDArray[np.void]:
    """The records numbered `first` to `end` - 1."""
    chunks = [np.empty(0, RECORD)]
    while first < end:
        slot = first % CAPACITY
        count = min(end - first, CAPACITY - slot)
        file.seek(HEADER_BYTES + slot * RECORD.itemsize)
        chunks.append(np.frombuffer(file.read(count * RECORD.itemsize), RECORD))
        first += count
    return np.concatenate(chunks)


def _state(data: bytes) -> RankState | None:
    if len(data) < STATE.itemsize:
        return None
    fields = np.frombuffer(data, STATE)[0]
    if fields["serial"] != fields["serial_again"]:
        return None
    names = ("count", "beat", "closed", "memory", "memory_peak", "memory_limit")
    return RankState(**{name: int(fields[name]) for name in names}, current=fields["current"])
