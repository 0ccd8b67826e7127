"""Overhead of recording events: CPU time of a span, compared with torchtitan's trace spans, and of a step.

A span is recorded a hundred thousand times; the time of the writer thread is counted separately. In a
pipeline of two ranks that compute, steps with and without a recorder alternate.
"""

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from _harness import Bench, Measured, record_of, table
from _pipelines import KEPT, build_pipeline, time_steps
from _pool import Pool
from _transformer import random_batch, transformer_stage

from titan_async.monitor.events import EventWriter, RankReader
from titan_async.monitor.recorder import EventRecorder, HostClock
from titan_async.pipelining.recording import Kind, NoRecorder

BENCH = Bench(__doc__, repeats=15, quick="the smallest sizes, once", width=120)

RANKS = 2
_BLOCKS, _WIDTH, _LENGTH = 2, 256, 320


@dataclass
class Span:
    """CPU microseconds of one span."""

    what: str
    caller: float
    """In the training thread."""
    writer: float
    """In the writer thread."""


@dataclass
class Step:
    """A training step of one rank; medians over repetitions."""

    rank: int
    microbatches: int
    spans: float
    """Per step."""
    seconds: float
    """Without a recorder."""
    seconds_recording: float
    difference: float
    """Relative overhead of recording, median over pairs of repetitions."""
    caller: float
    """CPU time of the spans in the training thread, relative to the step, by the cost of a span."""
    everything: float
    """The same, including the writer thread."""


def _recorder(folder: str, rank: int) -> EventRecorder:
    return EventRecorder(
        EventWriter(Path(folder), rank),
        HostClock(),
        (rank,),
        first_step=0,
        memory=lambda: (0, 0, 0),
        failed=_raise,
    )


def _raise(error: OSError) -> None:
    raise error


def measure_span(count: int) -> Span:
    """The cost of a span, with 400 spans per write, as in a busy step."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = _recorder(folder, 0)
        caller = writer = 0.0
        for _ in range(count // 400):
            start = time.thread_time()
            for microbatch in range(400):
                recorder.begin(Kind.FORWARD, 0, 3, microbatch, 2)
                recorder.end()
            caller += time.thread_time() - start
            start = time.thread_time()
            recorder.flush()
            writer += time.thread_time() - start
        recorder.close()
    spans = count // 400 * 400
    return Span("titan_async", 1e6 * caller / spans, 1e6 * writer / spans)


def measure_titan(count: int) -> Span:
    """The cost of torchtitan's trace span, which writes a line at its start and at its end."""
    from torchtitan.observability import structured_logger

    with tempfile.TemporaryDirectory() as folder:
        structured_logger.init_structured_logger(source="training", output_dir=folder, enable=True)
        start = time.thread_time()
        for _ in range(count):
            with structured_logger.log_trace_span("forward"):
                pass
        seconds = time.thread_time() - start
    return Span("torchtitan trace span", 1e6 * seconds / count, 0.0)


def _prepare(rank: int, group: dist.ProcessGroup, microbatches: int) -> None:
    torch.manual_seed(rank)
    pipeline = build_pipeline(
        "Async2BW",
        group,
        microbatches,
        lambda indices, _: [transformer_stage(_BLOCKS, _WIDTH) for _ in indices],
        random_batch(microbatches, _LENGTH, _WIDTH),
    )
    assert pipeline is not None
    pipeline.warm_up()
    KEPT["Async2BW"] = pipeline


def _turn(rank: int, group: dist.ProcessGroup, folder: str | None, steps: int) -> tuple[float, float]:
    """Seconds per step and, if `folder` is given, recorded spans per step."""
    pipeline = KEPT["Async2BW"]
    recorder = None if folder is None else _recorder(folder, rank)
    pipeline.schedule.recorder = recorder or NoRecorder()
    dist.barrier(group)
    seconds = time_steps(pipeline, steps)
    if recorder is None:
        return seconds, 0.0
    recorder.close()
    return seconds, len(RankReader(Path(folder), rank).new_records()) / (steps + 1)


def measure_steps(pool: Pool, microbatches: int, repeats: int, steps: int, span: Span) -> list[Step]:
    """Measures steps with and without a recorder alternately."""
    without: list[list[float]] = [[] for _ in range(RANKS)]
    recording: list[list[float]] = [[] for _ in range(RANKS)]
    spans = [0.0] * RANKS
    pool.run(RANKS, _prepare, microbatches)
    for repeat in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            # The order may matter, so it alternates.
            for where in (None, folder) if repeat % 2 else (folder, None):
                for rank, (seconds, count) in enumerate(pool.run(RANKS, _turn, where, steps)):
                    (recording if where else without)[rank].append(seconds)
                    spans[rank] = count or spans[rank]
    results = []
    for rank in range(RANKS):
        seconds = statistics.median(without[rank])
        cost = spans[rank] / seconds / 1e6
        results.append(
            Step(
                rank,
                microbatches,
                spans[rank],
                seconds,
                statistics.median(recording[rank]),
                statistics.median(r / w - 1 for r, w in zip(recording[rank], without[rank], strict=True)),
                caller=cost * span.caller,
                everything=cost * (span.caller + span.writer),
            )
        )
    return results


def _ours(bench: Bench) -> Span:
    return measure_span(2_000 if bench.quick else 100_000)


@BENCH.part("spans")
def _spans(bench: Bench) -> Measured:
    spans = [_ours(bench), measure_titan(50 if bench.quick else 2_000)]
    columns = {
        "": lambda span: span.what,
        "training thread": lambda span: f"{span.caller:.2f}",
        "writer thread": lambda span: f"{span.writer:.2f}",
    }
    return Measured([record_of(span) for span in spans], [table("CPU microseconds per span", columns, spans)])


@BENCH.part("steps", lambda bench: [RANKS])
def _steps(bench: Bench) -> Measured:
    span, steps = _ours(bench), []
    for microbatches in (2,) if bench.quick else (4, 16):
        count = 2 if bench.quick else 64 // microbatches
        steps += measure_steps(bench.pool, microbatches, bench.repeats, count, span)
    columns = {
        "rank": lambda step: step.rank,
        "m": lambda step: step.microbatches,
        "spans": lambda step: f"{step.spans:.0f}",
        "ms per step": lambda step: f"{1e3 * step.seconds:.1f}",
        "recording": lambda step: f"{1e3 * step.seconds_recording:.1f}",
        "difference": lambda step: f"{100 * step.difference:+.2f} %",
        "by CPU time": lambda step: f"{100 * step.caller:.3f} %",
        "with writer thread": lambda step: f"{100 * step.everything:.3f} %",
    }
    return Measured(
        [record_of(step) for step in steps], [table("Overhead relative to a training step", columns, steps)]
    )


if __name__ == "__main__":
    BENCH.main()
