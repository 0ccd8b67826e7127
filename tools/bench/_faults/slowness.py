"""A slow rank, jitter, delayed messages: the weights are the same, and the utilization is as predicted.

Stages are padded by sleeping to 20 ms forward and 40 ms backward, so that the processes can share cores. Two
checks of the recurrence: the checkpoint is bitwise equal to that of the run without faults, and according to
the events every computation used the weights of one update before. The planner's simulation predicts the
utilization from the padded times, and from the time per step in which ranks of the run without faults neither
computed nor waited.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from _faults.result import Attempt, Result, summarize
from _faults.runs import is_same, saved_state, train
from titan_async.monitor.spans import RankSpans, find_run, load_spans
from titan_async.pipelining.programs import async_programs
from titan_async.pipelining.recording import COMPUTE_KINDS, Kind
from titan_async.pipelining.simulation import Timing, simulate

FORWARD, BACKWARD = 0.020, 0.040
"""Seconds per microbatch on every stage."""

TOLERANCE = 0.05
"""Maximum difference between utilization and its prediction, on an idle machine."""

_SKIPPED = 4
"""Steps that are not counted: shapes are inferred, groups are created, the pipeline fills."""


@dataclass(frozen=True)
class Shape:
    """A pipeline."""

    stages: int
    microbatches: int
    steps: int


@dataclass(frozen=True)
class Slowness:
    """Arguments of `inject_slowness.install`."""

    name: str
    factors: tuple[float, ...] = ()
    jitter: float = 0.0
    latency: float = 0.0


UNDISTURBED = Slowness("nothing (padded to 20 and 40 ms)")


def cases(stages: int) -> list[Slowness]:
    """The cases for a pipeline with this number of stages."""
    slow = [tuple(3.0 if rank == slow else 1.0 for rank in range(stages)) for slow in (0, stages - 1)]
    return [
        Slowness("first rank 3 x slower", factors=slow[0]),
        Slowness("last rank 3 x slower", factors=slow[1]),
        Slowness("jitter of 50 %", jitter=0.5),
        Slowness("additional 5 ms per message", latency=0.005),
        Slowness("all three", factors=slow[1], jitter=0.5, latency=0.005),
    ]


def measure(scratch: Path, *, quick: bool) -> Iterator[Result]:
    """Trains each case on two and on four stages."""
    shapes = [Shape(2, 4, 10)] if quick else [Shape(2, 4, 30), Shape(4, 8, 24)]
    for shape in shapes:
        family = f"slowness, {shape.stages} stages, {shape.microbatches} microbatches"
        plain = _run(scratch, shape, UNDISTURBED)
        overhead = [_overhead(rank) for rank in plain.ranks]
        for slowness in (UNDISTURBED, *cases(shape.stages)):
            run = plain if slowness is UNDISTURBED else _run(scratch, shape, slowness)
            same = is_same(run.state, plain.state)
            delays = all(_delays_are_one(rank) for rank in run.ranks)
            measured = statistics.mean(map(_utilization, run.ranks))
            predicted = predict(shape, slowness, overhead)
            said = f"busy {measured:.3f}, predicted {predicted:.3f}"
            if not same:
                said += "; the weights differ"
            if not delays:
                said += "; a wrong weight version was used"
            good = same and delays and abs(measured - predicted) < TOLERANCE
            yield summarize(family, slowness.name, [Attempt(good, said=said)])


@dataclass(frozen=True)
class _Run:
    state: dict[str, Any]
    ranks: list[RankSpans]


def _run(scratch: Path, shape: Shape, slowness: Slowness) -> _Run:
    folder = scratch / f"{shape.stages}-{slowness.name}".replace(" ", "-").replace("%", "")
    folder.mkdir()
    fault = {
        "kind": "slowness",
        "forward": FORWARD,
        "backward": BACKWARD,
        "factors": slowness.factors,
        "jitter": slowness.jitter,
        "latency": slowness.latency,
    }
    done = train(
        folder,
        *("--training.steps", shape.steps, "--parallelism.pipeline_parallel_degree", shape.stages),
        *("--training.local_batch_size", 2 * shape.microbatches),
        fault=fault,
        timeout=600,
    )
    if done.status:
        raise RuntimeError(f"the run with {slowness.name} failed: {done.err}")
    return _Run(saved_state(folder, shape.steps), load_spans(find_run(folder / "run")).ranks)


def _delays_are_one(rank: RankSpans) -> bool:
    """Whether each computation of batch b, from 1, used the weights after max(b - 2, 0) updates.

    The b-th update uses batch b, and batch b + 2 is the first with its weights.
    """
    computed = rank.of_kind(*COMPUTE_KINDS)
    return len(computed) > 0 and bool(np.all(computed["version"] == np.maximum(computed["batch"] - 2, 0)))


def _window(rank: RankSpans) -> tuple[int, int, int]:
    """From the first forward of one batch to that of a later one, and the number of batches between."""
    forwards = rank.of_kind(Kind.FORWARD)
    first = {int(span["batch"]): int(span["start"]) for span in forwards[::-1]}
    begin, end = _SKIPPED + 1, max(first)
    return first[begin], first[end], end - begin


def _within(rank: RankSpans, *kinds: Kind) -> float:
    """Seconds of spans of these kinds that start in the window."""
    begin, end, _ = _window(rank)
    spans = rank.of_kind(*kinds)
    spans = spans[(spans["start"] >= begin) & (spans["start"] < end)]
    return float((spans["end"] - spans["start"]).sum()) / 1e9


def _utilization(rank: RankSpans) -> float:
    begin, end, _ = _window(rank)
    return _within(rank, *COMPUTE_KINDS) / ((end - begin) / 1e9)


def _overhead(rank: RankSpans) -> float:
    """Seconds per batch in which a rank neither computes nor waits: update, data, logging."""
    begin, end, batches = _window(rank)
    waiting = _within(rank, Kind.RECEIVE, Kind.SEND, Kind.CLIP)
    return ((end - begin) / 1e9 - waiting - _within(rank, *COMPUTE_KINDS)) / batches


def predict(shape: Shape, slowness: Slowness, overhead: list[float]) -> float:
    """Utilization by the planner's simulation.

    Args:
        shape: of the pipeline.
        slowness: the case.
        overhead: other seconds per batch, by rank.
    """
    factors = slowness.factors or (1.0,) * shape.stages
    programs = async_programs(shape.stages, shape.microbatches, shape.steps)
    # Without jitter all seeds are equal.
    seeds = range(20 if slowness.jitter else 1)
    runs = [
        simulate(
            programs,
            Timing(
                forward=[FORWARD * factor for factor in factors],
                backward=[BACKWARD * factor for factor in factors],
                latency=slowness.latency,
                update=overhead,
                jitter=slowness.jitter,
                seed=seed,
            ),
        )
        for seed in seeds
    ]
    return statistics.mean(run.utilization for run in runs)
