"""What recording events costs: CPU time of a span, against torchtitan's trace spans, and of a training step.

A span is begun and ended a hundred thousand times; what the writing thread does for it counts apart. In a
pipeline of two ranks that really compute, steps with and without a recorder take turns.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _pipelines import Pipeline, build_pipeline
from _pool import Pool
from _transformer import random_batch, transformer_stage
from rich.console import Console
from rich.table import Table

from titan_async.monitor.events import EventWriter, RankReader
from titan_async.monitor.recorder import EventRecorder, HostClock
from titan_async.pipelining.recording import Kind, NoRecorder

RANKS = 2
_BLOCKS, _WIDTH, _LENGTH = 2, 256, 320


@dataclass
class Span:
    """CPU microseconds of one span."""

    what: str
    caller: float
    """Of the thread that trains."""
    writer: float
    """Of the thread that writes."""


@dataclass
class Step:
    """A training step of one rank, medians over turns."""

    rank: int
    microbatches: int
    spans: float
    """A step."""
    seconds: float
    """Without a recorder."""
    seconds_recording: float
    difference: float
    """Of the two, as a share of the first: the median over pairs of turns."""
    caller: float
    """Share of the step that its spans take in the thread that trains, by the cost of a span."""
    everything: float
    """The same with the thread that writes."""


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
    """The cost of a span, of which 400 come between two writes, as in a busy step."""
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
    """The cost of torchtitan's trace span, which writes a line when it begins and when it ends."""
    from torchtitan.observability import structured_logger

    with tempfile.TemporaryDirectory() as folder:
        structured_logger.init_structured_logger(source="training", output_dir=folder, enable=True)
        start = time.thread_time()
        for _ in range(count):
            with structured_logger.log_trace_span("forward"):
                pass
        seconds = time.thread_time() - start
    return Span("torchtitan trace span", 1e6 * seconds / count, 0.0)


_kept: list[Pipeline] = []


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
    _kept[:] = [pipeline]


def _turn(rank: int, group: dist.ProcessGroup, folder: str | None, steps: int) -> tuple[float, float]:
    """Seconds a step and, with a folder to record in, spans a step."""
    (pipeline,) = _kept
    recorder = None if folder is None else _recorder(folder, rank)
    pipeline.schedule.recorder = recorder or NoRecorder()
    dist.barrier(group)
    pipeline.train_step()
    start = time.perf_counter()
    for _ in range(steps):
        pipeline.train_step()
    seconds = (time.perf_counter() - start) / steps
    pipeline.finish()
    if recorder is None:
        return seconds, 0.0
    recorder.close()
    return seconds, len(RankReader(Path(folder), rank).new_records()) / (steps + 1)


def measure_steps(microbatches: int, repeats: int, steps: int, span: Span) -> list[Step]:
    """Steps with and without a recorder, by turns."""
    without: list[list[float]] = [[] for _ in range(RANKS)]
    recording: list[list[float]] = [[] for _ in range(RANKS)]
    spans = [0.0] * RANKS
    with Pool([RANKS]) as pool:
        pool.run(RANKS, _prepare, microbatches)
        for repeat in range(repeats):
            with tempfile.TemporaryDirectory() as folder:
                # Whoever comes first has an advantage or not: by turns.
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


def _table(title: str, headings: list[str], rows: list[list[str]]) -> Table:
    table = Table(*headings, title=title)
    for row in rows:
        table.add_row(*row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15, help="turns of each kind (default: 15)")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--quick", action="store_true", help="the smallest form, once")
    arguments = parser.parse_args()
    quick = arguments.quick
    load = os.getloadavg()
    spans = [measure_span(2_000 if quick else 100_000), measure_titan(50 if quick else 2_000)]
    steps = []
    for microbatches in (2,) if quick else (4, 16):
        count = 2 if quick else 64 // microbatches
        steps += measure_steps(microbatches, 1 if quick else arguments.repeats, count, spans[0])
    show: Callable[[Any], None] = Console(width=120).print
    show(
        _table(
            "CPU microseconds of a span",
            ["", "in the thread that trains", "in the thread that writes"],
            [[span.what, f"{span.caller:.2f}", f"{span.writer:.2f}"] for span in spans],
        )
    )
    show(
        _table(
            "Share of a training step",
            ["rank", "m", "spans", "ms a step", "recording", "difference", "by CPU time", "with the writer"],
            [
                [
                    str(step.rank),
                    str(step.microbatches),
                    f"{step.spans:.0f}",
                    f"{1e3 * step.seconds:.1f}",
                    f"{1e3 * step.seconds_recording:.1f}",
                    f"{100 * step.difference:+.2f} %",
                    f"{100 * step.caller:.3f} %",
                    f"{100 * step.everything:.3f} %",
                ]
                for step in steps
            ],
        )
    )
    show(f"load average before {load[0]:.1f}")
    if arguments.json:
        record = {"load_before": load, "torch": torch.__version__, "spans": [asdict(span) for span in spans]}
        record["steps"] = [asdict(step) for step in steps]
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
