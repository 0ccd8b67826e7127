"""Step times of stages that sleep: measured, and predicted from the sleeps and a few overheads.

The overheads are measured with one rank, which never waits, and with two ranks: for a message, and for
backwards that are split in two halves. The first stage has no first half, so that one rank would not be
enough. The same constants are used for every schedule and shape.
"""

import time
from dataclasses import dataclass, field

import sleeping
import torch
import torch.distributed as dist
from _harness import median
from _pipelines import SCHEDULES, forget
from _pool import Pool

from titan_async.pipelining.programs import schedule_programs
from titan_async.pipelining.simulation import Timing, simulate

__all__ = ["SHAPES", "Overheads", "Step", "compare", "measure_overheads"]

SHAPES = sleeping.SHAPES
_FEW, _MANY = 2, 8
"""Numbers of microbatches; the difference gives the time of one."""
_MESSAGES = 200


@dataclass(frozen=True)
class Overheads:
    """Seconds in addition to the requested sleeps."""

    forward_and_backward: float
    """Per microbatch and stage."""
    forward_and_halves: float
    """Per microbatch and stage, if backwards are split in two halves."""
    step: float
    """Per batch: clipping, the update, and torch's overhead per step."""
    message: float
    """From a sending rank to one that waits."""


@dataclass
class Step:
    """One schedule at one shape."""

    schedule: str
    ranks: int
    microbatches: int
    predicted: float
    """Seconds."""
    repetitions: list[float] = field(default_factory=list)
    """Measured seconds; empty if the schedule cannot run."""

    @property
    def measured(self) -> float | None:
        return median(self.repetitions)

    @property
    def error(self) -> float | None:
        """Relative error of the prediction."""
        return None if self.measured is None else self.predicted / self.measured - 1


def _send_and_return(rank: int, group: dist.ProcessGroup) -> float:
    """Minimum seconds of a message, one way."""
    tensor, seconds = torch.zeros(8), []
    for _ in range(_MESSAGES):
        start = time.perf_counter()
        if rank == 0:
            dist.send(tensor, group=group, group_dst=1)
            dist.recv(tensor, group=group, group_src=1)
        else:
            dist.recv(tensor, group=group, group_src=0)
            time.sleep(0.002)  # so that the sender waits, as a stage does
            dist.send(tensor, group=group, group_dst=0)
        seconds.append(time.perf_counter() - start)
    return (min(seconds) - 0.002) / 2


def _growth(pool: Pool, schedule: str, ranks: int, repeats: int) -> tuple[float, float]:
    """Seconds per additional microbatch, and of a step without microbatches."""
    seconds = {}
    for microbatches in (_FEW, _MANY):
        case = sleeping.Utilization(schedule, ranks, microbatches)
        pool.run(ranks, sleeping.prepare, case)
        runs = [
            max(seconds for _, seconds in pool.run(ranks, sleeping.repeat, case, 2, None)) / 2
            for _ in range(repeats)
        ]
        pool.run(ranks, forget)
        seconds[microbatches] = min(runs)  # other programs can only add to it
    each = (seconds[_MANY] - seconds[_FEW]) / (_MANY - _FEW)
    return each, seconds[_FEW] - _FEW * each


def measure_overheads(pool: Pool, repeats: int) -> Overheads:
    """Measures the overheads that the predictions need."""
    slept = sleeping.FORWARD_SECONDS + sleeping.BACKWARD_SECONDS
    whole, step = _growth(pool, "GPipe", 1, repeats)
    halves, _ = _growth(pool, "InterleavedZeroBubble", 2, repeats)
    return Overheads(
        forward_and_backward=whole - slept,
        forward_and_halves=(halves - slept) / SCHEDULES["InterleavedZeroBubble"].stages_per_rank,
        step=step,
        message=max(pool.run(2, _send_and_return)),
    )


def predict(schedule: str, ranks: int, microbatches: int, overheads: Overheads) -> float:
    """Seconds of a step, by simulation.

    A forward has a third of a microbatch's overhead, as of its time; both halves of a backward have equal
    parts of the rest.
    """
    each = SCHEDULES[schedule].stages_per_rank
    stages = ranks * each
    forward = overheads.forward_and_backward / 3
    splits = schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    backward = (overheads.forward_and_halves if splits else overheads.forward_and_backward) - forward
    timing = Timing(
        forward=[sleeping.FORWARD_SECONDS / each + forward] * stages,
        backward=[sleeping.BACKWARD_SECONDS / each + backward] * stages,
        latency=overheads.message,
        update=[overheads.step if stage < ranks else 0.0 for stage in range(stages)],
        norm=overheads.message,
    )
    return simulate(schedule_programs(schedule, ranks, microbatches, 8), timing).step_seconds


def compare(pool: Pool, shapes: list[tuple[int, int]], overheads: Overheads, repeats: int) -> list[Step]:
    """Measures and predicts every schedule at every shape; those that cannot run have no times."""
    steps = []
    schedules = [name for name, kind in SCHEDULES.items() if not kind.tied]
    for result in sleeping.measure_sleeping(pool, shapes, repeats, schedules=schedules):
        slept = result.microbatches * (sleeping.FORWARD_SECONDS + sleeping.BACKWARD_SECONDS)
        try:
            predicted = predict(result.schedule, result.ranks, result.microbatches, overheads)
        except ValueError:
            assert not result.repetitions
            predicted = float("nan")
        measured = [slept / utilization for utilization in result.repetitions]
        steps.append(Step(result.schedule, result.ranks, result.microbatches, predicted, measured))
    return steps
