"""The spans of a run in the Chrome trace event format, for https://ui.perfetto.dev and chrome://tracing.

Each pipeline is a process: its first stage's spans are a track, then the versions of the weights with which
it computes, then the same of the next stage. Overlapped pairs have a track more, for their backwards. Arrows
lead from each forward (backward) to the same microbatch's on the next (previous) stage, and counters tell how
many microbatches each stage holds for their backwards. The format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titan_async.monitor.output_files import writing_output
from titan_async.monitor.spans import RankSpans, RunSpans, split_pairs
from titan_async.pipelining.recording import COMPUTE_KINDS, GRADIENT_KINDS, RELEASING_KINDS, Kind

__all__ = ["trace_of", "write_trace"]

Event = dict[str, Any]


def write_trace(path: Path, run: RunSpans) -> int:
    """Write a trace, compressed if the name ends in .gz, and return how many arrows it lacks.

    Raises:
        UserError: if the file cannot be written.
    """
    trace, lost = trace_of(run)
    data = json.dumps(trace, separators=(",", ":")).encode()
    with writing_output(path, "--out") as partial:
        partial.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return lost


def trace_of(run: RunSpans) -> tuple[dict[str, Any], int]:
    """The trace as a JSON object, and the number of arrows left out.

    Those would lead back in time, because the clocks of two hosts differ by more than a message takes.
    """
    origin = min(int(spans.records["start"].min()) for spans in run.ranks)
    events: list[Event] = []
    info = run.info
    split = [(spans, *split_pairs(spans.records, info)) for spans in run.ranks]
    for spans, of_rank, halves in split:
        for stage in spans.stages:
            of_stage = of_rank["stage"] == stage
            records = of_rank[of_stage]
            # Whole microseconds: rounded down alike, spans within others stay there.
            starts, ends = (records["start"] - origin) // 1000, (records["end"] - origin) // 1000
            events += _names(spans, stage, info.overlap)
            events += _slices(spans.copy, stage, records, halves[of_stage], starts, ends)
            events += _version_lane(spans.copy, stage, records, starts, ends)
            events += _held(spans.copy, stage, records, starts, ends)
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


def _track(copy: int, stage: int, half: int = 0) -> Event:
    """Of computations, for the second half of overlapped pairs another one."""
    return {"pid": copy, "tid": 3 * stage + int(half == 2)}


def _version_track(copy: int, stage: int) -> Event:
    return {"pid": copy, "tid": 3 * stage + 2}


def _names(spans: RankSpans, stage: int, overlap: bool) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": spans.copy, "args": {"name": f"pipeline {spans.copy}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": spans.copy, "args": {"sort_index": spans.copy}}
    for track, name in (
        (_track(spans.copy, stage), f"stage {stage} (rank {spans.rank})"),
        *([(_track(spans.copy, stage, 2), f"stage {stage} backwards of pairs")] if overlap else []),
        (_version_track(spans.copy, stage), f"stage {stage} weights"),
    ):
        yield {"ph": "M", "name": "thread_name", **track, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", **track, "args": {"sort_index": track["tid"]}}


_Array = npt.NDArray[Any]


def _slices(
    copy: int, stage: int, records: _Array, halves: _Array, starts: _Array, ends: _Array
) -> Iterator[Event]:
    forwards = records[records["kind"] == Kind.FORWARD]
    began = {(int(r["batch"]), int(r["microbatch"])): int(r["start"]) for r in forwards}
    # Outer spans first, as viewers want slices that begin together.
    for i in np.lexsort((records["depth"], records["start"])):
        record = records[i]
        kind, batch, microbatch = Kind(record["kind"]), int(record["batch"]), int(record["microbatch"])
        name, args = kind.name.lower().replace("_", " "), {"step": batch} if batch >= 0 else {}
        if kind == Kind.STEP:
            name += f" {batch}"
        elif kind == Kind.RECEIVE:
            # Before the forward it is its input, and after it the gradient, also of one that was cut off.
            is_input = record["start"] < began.get((batch, microbatch), 0)
            name = f"wait for {'activations' if is_input else 'gradient'}" if microbatch >= 0 else "wait"
        if microbatch >= 0:
            name += f" {microbatch}"
            args["microbatch"] = microbatch
        if record["version"] >= 0:
            args["version"] = int(record["version"])
        place = _track(copy, stage, halves[i]) | {"ts": int(starts[i]), "dur": int(ends[i] - starts[i])}
        yield {"ph": "X", "name": name, "cat": kind.name, **place, "args": args}


def _version_lane(copy: int, stage: int, records: _Array, starts: _Array, ends: _Array) -> Iterator[Event]:
    """A slice for every stretch of computations with the same weights.

    Viewers colour slices by their name without numbers, so that the two versions need names of their own.
    """
    computing = np.flatnonzero(np.isin(records["kind"], COMPUTE_KINDS) & (records["version"] >= 0))
    versions = records["version"][computing]
    borders = np.flatnonzero(np.diff(versions)) + 1
    for stretch in np.split(computing, borders):
        if len(stretch):
            version, start, end = int(records["version"][stretch[0]]), starts[stretch[0]], ends[stretch[-1]]
            yield {
                "ph": "X",
                "name": f"{'odd' if version % 2 else 'even'} version {version}",
                "cat": "version",
                **_version_track(copy, stage),
                "ts": int(start),
                "dur": int(end - start),
                "args": {"updates": version},
            }


def _held(copy: int, stage: int, records: _Array, starts: _Array, ends: _Array) -> Iterator[Event]:
    """Counter events: a microbatch is held from the begin of its forward to the end of its backward."""
    forward, lets_go = records["kind"] == Kind.FORWARD, np.isin(records["kind"], RELEASING_KINDS)
    begun = {(int(r["batch"]), int(r["microbatch"])) for r in records[forward]}
    held = sum((int(r["batch"]), int(r["microbatch"])) not in begun for r in records[lets_go])
    changes = [(int(ts), 1) for ts in starts[forward]] + [(int(ts), -1) for ts in ends[lets_go]]
    name = f"stage {stage} microbatches held"
    for ts, change in sorted(changes):
        held += change
        yield {"ph": "C", "name": name, "pid": copy, "ts": ts, "args": {"microbatches": held}}


def _arrows(split: list[tuple[RankSpans, _Array, _Array]], origin: int) -> tuple[list[Event], int]:
    events: list[Event] = []
    lost = 0
    for kinds, name, step in (((Kind.FORWARD,), "activations", 1), (GRADIENT_KINDS, "gradients", -1)):
        computed = {}
        for spans, records, halves in split:
            for i in np.flatnonzero(np.isin(records["kind"], kinds)):
                start, end, batch, microbatch, _, stage, *_ = records[i].tolist()
                track = _track(spans.copy, stage, halves[i])
                computed[spans.copy, stage, batch, microbatch] = start, end, track
        for (copy, stage, batch, microbatch), (start, end, track) in computed.items():
            receiver = computed.get((copy, stage + step, batch, microbatch))
            if receiver is None:
                continue
            if receiver[0] < end:
                lost += 1
                continue
            arrow = {"cat": "message", "name": name, "id": len(events) // 2 + 1}
            # Within the slice, at its last microsecond: at its end it is over.
            leaves = max((end - origin) // 1000 - 1, (start - origin) // 1000)
            arrives = (receiver[0] - origin) // 1000
            events.append({"ph": "s", **arrow, **track, "ts": leaves})
            events.append({"ph": "f", "bp": "e", **arrow, **receiver[2], "ts": arrives})
    return events, lost
