"""Utilization of stages with a known computation time: they sleep, exactly or with jitter.

Utilization is the fraction of a step in which a rank sleeps, m (tF + tB) / step time. Every rank sleeps 20 ms
for each forward and 40 ms for each backward, whatever its number of stages; if a schedule separates them, the
input gradient and the weight gradient take half of a backward each.

`BARE` is an upper bound for this machine: the same forwards, backwards and messages in Async2BW's order, with
autograd and gloo only.
"""

import ctypes
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from _harness import median
from _pipelines import KEPT, SCHEDULES, build_pipeline, forget, time_steps
from _pool import Pool
from torch import Tensor, nn

from titan_async.pipelining import ScheduleAsync2BW
from titan_async.pipelining.actions import Instruction, drain_program, step_program

__all__ = [
    "BACKWARD_SECONDS",
    "BARE",
    "FORWARD_SECONDS",
    "JITTER_SHAPES",
    "SHAPES",
    "Clock",
    "SleepingStage",
    "Utilization",
    "measure_jitter",
    "measure_sleeping",
    "prepare",
    "repeat",
    "warm_up_steps",
]

BARE = "no schedule"

FORWARD_SECONDS = 0.020
BACKWARD_SECONDS = 0.040
JITTER = 0.3
"""Half the width of the uniform distribution of a sleep, relative to its mean."""

SHAPES = [(2, 2), (4, 4), (4, 8), (8, 8), (8, 16)]
"""Ranks and microbatches."""
JITTER_SHAPES = [(4, 4), (4, 8)]

_WIDTH = 8
_VOCABULARY = 32_768
"""Rows of the tied parameter: its all-reduce has 1 MiB per batch."""


def warm_up_steps(microbatches: int) -> int:
    """Steps until a pipeline of Async2BW is full: eight microbatches, at least one step."""
    return -(-8 // microbatches)


@dataclass
class Utilization:
    """One schedule at one shape."""

    schedule: str
    ranks: int
    microbatches: int
    lookahead: int | None = None
    """Of Async2BW; None for its default and for other schedules."""
    repetitions: list[float] = field(default_factory=list)
    """Fractions from 0 to 1; empty if the schedule cannot run."""

    @property
    def median(self) -> float | None:
        return median(self.repetitions)

    def is_async(self) -> bool:
        return self.schedule == BARE or SCHEDULES[self.schedule].build is ScheduleAsync2BW

    def key(self) -> tuple:
        """The key of its pipeline."""
        return self.schedule, self.ranks, self.microbatches, self.lookahead


class Clock:
    """Sleeps, and accumulates the requested seconds."""

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
    """Computes x + weight, slowly. The two paths join in one node, where torch can split a backward.

    Args:
        clock: sleeps.
        tied: whether a row of a larger parameter is added, for the first or last stage.
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


class _Bare:
    """Runs Async2BW's order as a `Pipeline` does, without checks, weight versions, clip or update."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, microbatches: int) -> None:
        self.module = module
        self.group = group
        self.shape = dist.get_rank(group), group.size(), microbatches
        self.batch = 0
        self.received: dict[Any, tuple[Tensor, Any]] = {}
        self.computed: dict[Any, tuple[Tensor, Tensor]] = {}
        self.sending: deque[tuple[Tensor, Any]] = deque()

    def train_step(self) -> None:
        self._run(step_program(*self.shape, self.batch))
        self.batch += 1

    def warm_up(self) -> None:
        self.train_step()
        self.finish()

    def finish(self) -> None:
        self._run(drain_program(*self.shape, self.batch - 1))
        self._wait_for_sends(0)
        self.batch = 0

    def _run(self, program: Iterable[Instruction]) -> None:
        rank, outgoing = self.shape[0], torch.empty(0)
        for instruction in program:
            kind, action = instruction.kind, instruction.action
            forward = action.kind == "F"
            to = rank + (1 if forward else -1)
            if kind == "receive":
                message = torch.empty(1, _WIDTH)
                work = dist.irecv(message, group=self.group, group_src=2 * rank - to, tag=int(forward))
                self.received[action] = message, work
            elif kind == "wait":
                self.received[action][1].wait()
            elif kind == "compute":
                # Otherwise the input of the first stage, or the gradient on the last one, which has no loss.
                x = self.received.pop(action)[0] if action in self.received else torch.ones(1, _WIDTH)
                microbatch = action.batch, action.microbatch
                if forward:
                    x.requires_grad_()
                    self.computed[microbatch] = x, self.module(x)
                    outgoing = self.computed[microbatch][1].detach()
                else:
                    x_of_forward, output = self.computed.pop(microbatch)
                    output.backward(x)
                    outgoing = x_of_forward.grad
            elif kind == "send":
                work = dist.isend(outgoing, group=self.group, group_dst=to, tag=int(forward))
                self.sending.append((outgoing, work))
                self._wait_for_sends(2 * self.shape[1])

    def _wait_for_sends(self, most: int) -> None:
        while len(self.sending) > most:
            self.sending.popleft()[1].wait()


def prepare(rank: int, group: dist.ProcessGroup, case: Utilization) -> bool:
    """Builds a pipeline and warms it up; returns whether it can run."""
    if sys.platform == "linux":  # otherwise each sleep is 50 us too long (PR_SET_TIMERSLACK)
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)
    if case.schedule == BARE:
        clock = Clock(1)
        pipeline: Any = _Bare(SleepingStage(clock), group, case.microbatches)
    else:
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
    KEPT[case.key()] = pipeline, clock
    return True


def repeat(
    rank: int, group: dist.ProcessGroup, case: Utilization, steps: int, seed: int | None
) -> tuple[float, float]:
    """Seconds of sleep and of wall-clock time of this rank in `steps` steps after the warm-up."""
    pipeline, clock = KEPT[case.key()]
    clock.jitter = None if seed is None else random.Random(100 * seed + rank)
    dist.barrier(group)
    warm_up = warm_up_steps(case.microbatches) if case.is_async() else 0
    slept: list[float] = []
    seconds = time_steps(pipeline, steps, warm_up, lambda: slept.append(clock.slept))
    return slept[1] - slept[0], steps * seconds


def _measure(pool: Pool, cases: list[Utilization], repeats: int, steps: int | None, jitter: bool) -> None:
    """Measures `cases`, which have the same ranks, alternately."""
    ranks = cases[0].ranks
    runnable = [case for case in cases if all(pool.run(ranks, prepare, case))]
    for repetition in range(repeats):
        for case in runnable:
            # Synchronous steps are independent of each other; Async2BW needs several for a steady state.
            least = 16 if case.is_async() or jitter else 8
            count = steps or max(least // case.microbatches, 1)
            results = pool.run(ranks, repeat, case, count, repetition if jitter else None)
            slept = statistics.mean(slept for slept, _ in results)
            case.repetitions.append(slept / max(seconds for _, seconds in results))
    pool.run(ranks, forget)


def measure_sleeping(
    pool: Pool,
    shapes: list[tuple[int, int]],
    repeats: int,
    steps: int | None = None,
    schedules: Iterable[str] = (*SCHEDULES, BARE),
) -> list[Utilization]:
    """Utilization of every schedule and of `BARE`, with stages of equal cost."""
    results = []
    for ranks, microbatches in shapes:
        cases = [Utilization(schedule, ranks, microbatches) for schedule in schedules]
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
