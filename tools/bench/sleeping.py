"""How busy the stages are when computing takes a known time: stages that sleep, exactly or with jitter.

Utilization is the share of a step in which a rank sleeps, m (tF + tB) / time of a step. Every rank sleeps
20 ms for each forward and 40 ms for each backward, whatever number of stages it holds; where a schedule
separates them, the gradient of the input and that of the weights take half of a backward each.
"""

import math
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from _pipelines import SCHEDULES, build_pipeline
from _pool import Pool
from torch import Tensor, nn

from titan_async.pipelining import ScheduleAsync2BW

__all__ = [
    "BACKWARD_SECONDS",
    "FORWARD_SECONDS",
    "JITTER_SHAPES",
    "SHAPES",
    "Clock",
    "SleepingStage",
    "Utilization",
    "measure_jitter",
    "measure_sleeping",
]

FORWARD_SECONDS = 0.020
BACKWARD_SECONDS = 0.040
JITTER = 0.3
"""Half the width of the uniform distribution of a sleep, as a part of its mean."""

SHAPES = [(2, 2), (4, 4), (4, 8), (8, 8), (8, 16)]
"""Ranks and microbatches."""
JITTER_SHAPES = [(4, 4), (4, 8)]

_WIDTH = 8
_VOCABULARY = 32_768
"""Rows of the parameter that the two ends of a pipeline share: 1 MiB, as much as travels for each batch."""
_WARMUP_MICROBATCHES = 8
"""Of Async2BW, at least one batch: the pipeline is full then."""


@dataclass
class Utilization:
    """One schedule at one shape."""

    schedule: str
    ranks: int
    microbatches: int
    lookahead: int | None = None
    """Of Async2BW; None for its default and for other schedules."""
    repetitions: list[float] = field(default_factory=list)
    """Shares between 0 and 1; empty where the schedule cannot run."""

    @property
    def median(self) -> float | None:
        return statistics.median(self.repetitions) if self.repetitions else None


class Clock:
    """Sleeps, and adds up for how long it was asked to."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.jitter: random.Random | None = None
        self.slept = 0.0

    def sleep(self, seconds: float) -> None:
        seconds *= self.scale
        if self.jitter is not None:
            seconds *= self.jitter.uniform(1 - JITTER, 1 + JITTER)
        self.slept += seconds
        time.sleep(seconds)


class _InputPath(torch.autograd.Function):
    """Takes the time of a forward and of an input gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        clock.sleep(FORWARD_SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.clock.sleep(BACKWARD_SECONDS / 2)
        return gradient.clone(), None


class _WeightPath(torch.autograd.Function):
    """Takes the time of a weight gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.clock.sleep(BACKWARD_SECONDS / 2)
        return gradient.clone(), None


class SleepingStage(nn.Module):
    """x + weight, slowly. The two paths meet in one node, where torch can cut a backward in two.

    Args:
        clock: sleeps.
        tied: with a row of a larger parameter added, for a stage at an end of the pipeline.
    """

    def __init__(self, clock: Clock, tied: bool = False) -> None:
        super().__init__()
        self.clock = clock
        self.weight = nn.Parameter(torch.zeros(1, _WIDTH))
        self.tied = nn.Parameter(torch.zeros(_VOCABULARY, _WIDTH)) if tied else None

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:
            # The first stage takes as long as the others.
            x = x.detach().requires_grad_()
        weight = self.weight if self.tied is None else self.weight + self.tied[:1]
        return _InputPath.apply(x, self.clock) + _WeightPath.apply(weight, self.clock)


_kept: dict[tuple, tuple[Any, Clock]] = {}
"""In a worker: the pipelines that have been built and warmed up."""


def _prepare(rank: int, group: dist.ProcessGroup, case: Utilization) -> bool:
    """Build a pipeline and warm it up; whether it can run."""
    kind = SCHEDULES[case.schedule]
    clock = Clock(1 / kind.stages_per_rank)
    batch = (torch.zeros(case.microbatches, _WIDTH), torch.ones(case.microbatches, _WIDTH))
    pipeline = build_pipeline(
        case.schedule,
        group,
        case.microbatches,
        lambda indices, count: [
            SleepingStage(clock, kind.tied and index in (0, count - 1)) for index in indices
        ],
        batch,
        lookahead=case.lookahead,
    )
    if pipeline is None:
        return False
    pipeline.warm_up()
    _kept[_key(case)] = pipeline, clock
    return True


def _is_async(case: Utilization) -> bool:
    return SCHEDULES[case.schedule].build is ScheduleAsync2BW


def _key(case: Utilization) -> tuple:
    return case.schedule, case.ranks, case.microbatches, case.lookahead


def _repeat(
    rank: int, group: dist.ProcessGroup, case: Utilization, steps: int, seed: int | None
) -> tuple[float, float]:
    """Seconds that this rank slept and that passed for it in `steps` steps after the warm-up.

    A barrier comes before the warm-up only: in a steady state Async2BW's stages are at different points
    of the batch, and one in the middle would empty the pipeline.
    """
    pipeline, clock = _kept[_key(case)]
    clock.jitter = None if seed is None else random.Random(100 * seed + rank)
    dist.barrier(group)
    warmup = math.ceil(_WARMUP_MICROBATCHES / case.microbatches) if _is_async(case) else 0
    for _ in range(warmup):
        pipeline.train_step()
    slept, start = clock.slept, time.perf_counter()
    for _ in range(steps):
        pipeline.train_step()
    slept, seconds = clock.slept - slept, time.perf_counter() - start
    pipeline.finish()
    return slept, seconds


def _forget(rank: int, group: dist.ProcessGroup) -> None:
    _kept.clear()


def _measure(pool: Pool, cases: list[Utilization], repeats: int, steps: int | None, jitter: bool) -> None:
    """Fill in the repetitions of `cases`, which share ranks, by turns."""
    ranks = cases[0].ranks
    runnable = [case for case in cases if all(pool.run(ranks, _prepare, case))]
    for repetition in range(repeats):
        for case in runnable:
            # A synchronous step is the same each time; Async2BW is to show that it keeps its pace.
            least = 16 if _is_async(case) or jitter else 8
            count = steps or max(least // case.microbatches, 1)
            results = pool.run(ranks, _repeat, case, count, repetition if jitter else None)
            slept = statistics.mean(slept for slept, _ in results)
            case.repetitions.append(slept / max(seconds for _, seconds in results))
    pool.run(ranks, _forget)


def measure_sleeping(
    pool: Pool, shapes: list[tuple[int, int]], repeats: int, steps: int | None = None
) -> list[Utilization]:
    """Utilization of every schedule with stages of exactly equal cost."""
    results = []
    for ranks, microbatches in shapes:
        cases = [Utilization(schedule, ranks, microbatches) for schedule in SCHEDULES]
        _measure(pool, cases, repeats, steps, jitter=False)
        results += cases
    return results


def measure_jitter(
    pool: Pool, shapes: list[tuple[int, int]], repeats: int, steps: int | None = None
) -> list[Utilization]:
    """Utilization of 1F1B and of Async2BW at every lookahead, with stages of varying cost."""
    results = []
    for ranks, microbatches in shapes:
        cases = [Utilization("1F1B", ranks, microbatches)]
        for lookahead in range(microbatches - ranks + 1):
            cases.append(Utilization("Async2BW", ranks, microbatches, lookahead))
        _measure(pool, cases, repeats, steps, jitter=True)
        results += cases
    return results
