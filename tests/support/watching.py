"""Runs that go on, in states that are made by hand, for the tests of the live view."""

import json
import os
import shutil
import socket
import time
from pathlib import Path

import numpy as np

from tests.support.events import write_run
from titan_async.monitor.events import RECORD, EventWriter, RankReader, ring_path
from titan_async.pipelining.recording import Kind

__all__ = ["change_info", "going_on", "with_copies", "write_now"]


def change_info(folder: Path, **fields: object) -> None:
    """Overwrite fields of a run's `run.json`."""
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def going_on(run_dir: Path, run_id: str = "20260101-000000-aaaa", **options: object) -> Path:
    """A run by this process that has just been heard of and has not ended; `write_run`'s options."""
    folder = write_run(run_dir, run_id, closed=False, **options)  # type: ignore[arg-type]
    change_info(folder, host=socket.gethostname(), pid=os.getpid())
    return folder


def with_copies(folder: Path, slow: int) -> None:
    """Give each stage of a run with one rank a stage a second rank; `slow` is one that computes longer."""
    ranks = json.loads((folder / "run.json").read_text())["ranks"]
    for rank in range(len(ranks)):
        shutil.copy(ring_path(folder, rank), ring_path(folder, rank + len(ranks)))
    change_info(folder, ranks=ranks * 2)
    records = RankReader(folder, slow).new_records().copy()
    # It needs for forwards what it waited for before.
    waits = records["kind"] == Kind.RECEIVE
    records["kind"][waits] = Kind.FORWARD
    ring_path(folder, slow).unlink()
    writer = EventWriter(folder, slow)
    writer.write(records)
    writer.write_state(np.zeros(1, RECORD), (3 << 30, 4 << 30, 80 << 30))
    writer.close()


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
    """Let a rank of a run be at something for so long, and be heard of so long ago."""
    records = RankReader(folder, rank).new_records()
    ring_path(folder, rank).unlink()
    writer = EventWriter(folder, rank)
    writer.write(records)
    current = np.zeros(1, RECORD)
    current[0] = (time.time_ns() - int((seconds + ago) * 1e9), 0, batch, microbatch, 12, rank, kind, 1)
    writer.write_state(current, (200 << 20, 300 << 20, 0))
    writer.close()
    with open(ring_path(folder, rank), "r+b") as file:  # the beat is the state's third number
        file.seek(16)
        file.write((time.time_ns() - int(ago * 1e9)).to_bytes(8, "little"))
