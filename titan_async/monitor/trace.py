"""Export of spans in the Chrome trace event format, for https://ui.perfetto.dev and chrome://tracing.

Each pipeline is a process. Each stage has a track of spans and a track of the weight versions in use, and one
more for the backwards of overlapped pairs. Arrows connect each forward (backward) with that of the same
microbatch on the next (previous) stage. Counters show the microbatches in flight on each stage. The format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titan_async.file_io import write_output
from titan_async.monitor.spans import RankSpans, RunSpans, split_pairs
from titan_async.pipelining.recording import COMPUTE_KINDS, GRADIENT_KINDS, RELEASING_KINDS, Kind

__all__ = ["trace_of", "write_trace"]

Event = dict[str, Any]


def write_trace(path: Path, run: RunSpans) -> int:
    """Writes a trace, compressed if the name ends in .gz, and returns the number of omitted arrows.

    Raises:
        UserError: if the file cannot be written.
    """
    trace, lost = trace_of(run)
    data = json.dumps(trace, separators=(",", ":")).encode()
    with write_output(path, "--out") as partial:
        partial.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return lost


def trace_of(run: RunSpans) -> tuple[dict[str, Any], int]:
    """The trace as a JSON object, and the number of omitted arrows.

    An arrow that would lead back in time is omitted: the clocks of two hosts differ by more than the latency.
    """
    origin = min(int(spans.records["start"].min()) for spans in run.ranks)
    events: list[Event] = []
    info = run.info
    split = [(spans, *split_pairs(spans.records, info)) for spans in run.ranks]
    for spans, of_rank, halves in split:
        for stage in spans.stages:
            of_stage = of_rank["stage"] == stage
            records = of_rank[of_stage]
            # Integer microseconds: since all are rounded down, nested spans stay nested.
            starts, ends = (records["start"] - origin) // 1000, (records["end"] - origin) // 1000
            events += _names(spans, stage, info.overlap)
            events += _slices(spans.replica, stage, records, halves[of_stage], starts, ends)
            events += _version_lane(spans.replica, stage, records, starts, ends)
            events += _in_flight_counter(spans.replica, stage, records, starts, ends)
    arrows, lost = _arrows(split, origin)
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "run": info.run_id,
            "model": info.model,
            "schedule": info.schedule,
            "microbatches": info.microbatches,
            "synchronous_steps": info.synchronous_steps,
            "steps": [run.steps[0], run.steps[-1]],
            "begins_at_ns": origin,
        },
        "traceEvents": events + arrows,
    }, lost


def _track(replica: int, stage: int, half: int = 0) -> Event:
    """The track of spans, or that of the backwards of overlapped pairs."""
    return {"pid": replica, "tid": 3 * stage + int(half == 2)}


def _version_track(replica: int, stage: int) -> Event:
    return {"pid": replica, "tid": 3 * stage + 2}


def _names(spans: RankSpans, stage: int, overlap: bool) -> Iterator[Event]:
    pid = spans.replica
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"pipeline {pid}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for track, name in (
        (_track(spans.replica, stage), f"stage {stage} (rank {spans.rank})"),
        *([(_track(spans.replica, stage, 2), f"stage {stage} backwards of pairs")] if overlap else []),
        (_version_track(spans.replica, stage), f"stage {stage} weights"),
    ):
        yield {"ph": "M", "name": "thread_name", **track, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", **track, "args": {"sort_index": track["tid"]}}


_Array = npt.NDArray[Any]


def _slices(
    replica: int, stage: int, records: _Array, halves: _Array, starts: _Array, ends: _Array
) -> Iterator[Event]:
    forwards = records[records["kind"] == Kind.FORWARD]
    began = {(int(r["batch"]), int(r["microbatch"])): int(r["start"]) for r in forwards}
    # Outer spans first: viewers require this for slices with the same start.
    for i in np.lexsort((records["depth"], records["start"])):
        record = records[i]
        kind, batch, microbatch = Kind(record["kind"]), int(record["batch"]), int(record["microbatch"])
        name, args = kind.name.lower().replace("_", " "), {"step": batch} if batch >= 0 else {}
        if kind == Kind.STEP:
            name += f" {batch}"
        elif kind == Kind.RECEIVE:
            # A wait before the forward is for its input, a later one for the gradient.
            is_input = record["start"] < began.get((batch, microbatch), 0)
            name = f"wait for {'activations' if is_input else 'gradient'}" if microbatch >= 0 else "wait"
        if microbatch >= 0:
            name += f" {microbatch}"
            args["microbatch"] = microbatch
        if record["version"] >= 0:
            args["version"] = int(record["version"])
        place = _track(replica, stage, halves[i]) | {"ts": int(starts[i]), "dur": int(ends[i] - starts[i])}
        yield {"ph": "X", "name": name, "cat": kind.name, **place, "args": args}


def _version_lane(replica: int, stage: int, records: _Array, starts: _Array, ends: _Array) -> Iterator[Event]:
    """A slice for each sequence of computations with the same weight version.

    Viewers choose a slice's colour by its name without numbers: even and odd versions have different names.
    """
    computing = np.flatnonzero(np.isin(records["kind"], COMPUTE_KINDS) & (records["version"] >= 0))
    versions = records["version"][computing]
    borders = np.flatnonzero(np.diff(versions)) + 1
    for run in np.split(computing, borders):
        if len(run):
            version, start, end = int(records["version"][run[0]]), starts[run[0]], ends[run[-1]]
            yield {
                "ph": "X",
                "name": f"{'odd' if version % 2 else 'even'} version {version}",
                "cat": "version",
                **_version_track(replica, stage),
                "ts": int(start),
                "dur": int(end - start),
                "args": {"updates": version},
            }


def _in_flight_counter(
    replica: int, stage: int, records: _Array, starts: _Array, ends: _Array
) -> Iterator[Event]:
    """Counter events: a microbatch is in flight from the start of its forward to the end of its backward."""
    forward, releasing = records["kind"] == Kind.FORWARD, np.isin(records["kind"], RELEASING_KINDS)
    started = {(int(r["batch"]), int(r["microbatch"])) for r in records[forward]}
    count = sum((int(r["batch"]), int(r["microbatch"])) not in started for r in records[releasing])
    changes = [(int(ts), 1) for ts in starts[forward]] + [(int(ts), -1) for ts in ends[releasing]]
    name = f"stage {stage} microbatches held"
    for ts, change in sorted(changes):
        count += change
        yield {"ph": "C", "name": name, "pid": replica, "ts": ts, "args": {"microbatches": count}}


def _arrows(split: list[tuple[RankSpans, _Array, _Array]], origin: int) -> tuple[list[Event], int]:
    events: list[Event] = []
    lost = 0
    for kinds, name, step in (((Kind.FORWARD,), "activations", 1), (GRADIENT_KINDS, "gradients", -1)):
        computed = {}
        for spans, records, halves in split:
            for i in np.flatnonzero(np.isin(records["kind"], kinds)):
                start, end, batch, microbatch, _, stage, *_ = records[i].tolist()
                track = _track(spans.replica, stage, halves[i])
                computed[spans.replica, stage, batch, microbatch] = start, end, track
        for (replica, stage, batch, microbatch), (start, end, track) in computed.items():
            receiver = computed.get((replica, stage + step, batch, microbatch))
            if receiver is None:
                continue
            if receiver[0] < end:
                lost += 1
                continue
            arrow = {"cat": "message", "name": name, "id": len(events) // 2 + 1}
            # At the slice's last microsecond: its end is outside of it.
            leaves = max((end - origin) // 1000 - 1, (start - origin) // 1000)
            arrives = (receiver[0] - origin) // 1000
            events.append({"ph": "s", **arrow, **track, "ts": leaves})
            events.append({"ph": "f", "bp": "e", **arrow, **receiver[2], "ts": arrives})
    return events, lost
