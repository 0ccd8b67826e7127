"""Running runs in artificial states, for the tests of the live view."""

import json
import os
import shutil
import socket
import time
from pathlib import Path

import numpy as np

from tests.support.events import write_run
from titan_async.monitor.events import BURST, RECORD, EventWriter, RankReader, ring_path
from titan_async.monitor.snapshot import RunMonitor
from titan_async.pipelining.recording import Kind

__all__ = ["change_info", "going_on", "polled", "rewrite_ring", "with_copies", "write_now"]


def change_info(folder: Path, **fields: object) -> None:
    """Overwrites fields of a run's `run.json`."""
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def going_on(run_dir: Path, run_id: str = "20260101-000000-aaaa", **options: object) -> Path:
    """Writes a run of this process that has not ended and has a recent heartbeat; options as `write_run`."""
    folder = write_run(run_dir, run_id, closed=False, **options)  # type: ignore[arg-type]
    change_info(folder, host=socket.gethostname(), pid=os.getpid())
    return folder


def polled(folder: Path) -> RunMonitor:
    """A monitor of a run after its first poll."""
    watch = RunMonitor(folder)
    watch.poll()
    return watch


def rewrite_ring(
    folder: Path,
    rank: int,
    records: np.ndarray,
    memory: tuple[int, int, int] = (0, 0, 0),
    current: tuple[int, ...] | None = None,
) -> None:
    """Replaces the records of a running rank whose current span is `current`."""
    ring_path(folder, rank).unlink(missing_ok=True)
    writer = EventWriter(folder, rank)
    state = np.zeros(1, RECORD)
    if current is not None:
        state[0] = current
    for i in range(0, max(len(records), 1), BURST):
        writer.write(records[i : i + BURST])
        writer.write_state(state, memory)
    writer.close()


def with_copies(folder: Path, slow: int) -> None:
    """Adds a second rank to each stage of a run; the rank `slow` computes longer than its copy."""
    ranks = json.loads((folder / "run.json").read_text())["ranks"]
    for rank in range(len(ranks)):
        shutil.copy(ring_path(folder, rank), ring_path(folder, rank + len(ranks)))
    change_info(folder, ranks=ranks * 2)
    records = RankReader(folder, slow).new_records().copy()
    # Forwards instead of waits.
    records["kind"][records["kind"] == Kind.RECEIVE] = Kind.FORWARD
    rewrite_ring(folder, slow, records, (3 << 30, 4 << 30, 80 << 30))


def write_now(
    folder: Path,
    rank: int,
    kind: Kind,
    seconds: float,
    *,
    batch: int = 13,
    microbatch: int = 3,
    ago: float = 0.0,
) -> None:
    """Sets the current span of a rank, with its duration, and the age of its heartbeat."""
    current = (time.time_ns() - int((seconds + ago) * 1e9), 0, batch, microbatch, 12, rank, kind, 1)
    records = RankReader(folder, rank).new_records()
    rewrite_ring(folder, rank, records, (200 << 20, 300 << 20, 0), current)
    with open(ring_path(folder, rank), "r+b") as file:  # the heartbeat is the state's third number
        file.seek(16)
        file.write((time.time_ns() - int(ago * 1e9)).to_bytes(8, "little"))
