"""How much of the time a pipeline stands still, and would under 1F1B with what its stages measured."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titan_async.monitor.view.stages import StageFigures
from titan_async.pipelining.programs import schedule_programs
from titan_async.pipelining.recording import BACKWARD_KINDS, Kind
from titan_async.pipelining.simulation import Timing, simulate

__all__ = ["StageSeconds", "bubble_of_1f1b", "stage_seconds"]

_BATCHES = 3  # of which the last two are steady
_MOST_TASKS = 100_000  # about a second of simulation


@dataclass(frozen=True)
class StageSeconds:
    """What one rank's stages take, in seconds."""

    forward: float
    """Of one microbatch."""
    backward: float
    gather: float
    """Of one batch, as the following."""
    reduction: float
    update: float


def stage_seconds(stages: Sequence[StageFigures]) -> StageSeconds | None:
    """What the stages of one rank took together on average; None before they have all computed."""
    forward = backward = 0.0
    by_kind = np.zeros(len(Kind))
    for stage in stages:
        forwards = sum(step.forwards for step in stage.steps)
        backwards = sum(step.backwards for step in stage.steps)
        if not forwards or not backwards:
            return None
        seconds = np.sum([step.by_kind for step in stage.steps], axis=0)
        forward += seconds[Kind.FORWARD] / forwards
        backward += seconds[list(BACKWARD_KINDS)].sum() / backwards
        by_kind += seconds / len(stage.steps)
    gather, reduction, update = by_kind[[Kind.GATHER, Kind.REDUCE, Kind.OPTIMIZER]]
    return StageSeconds(float(forward), float(backward), float(gather), float(reduction), float(update))


def bubble_of_1f1b(ranks: Sequence[StageSeconds], microbatches: int) -> float | None:
    """The share of a rank's time in which it would not compute, the mean over ranks.

    Messages are taken to need no time. None where 1F1B needs more microbatches, or for so many that the
    simulation would take long.
    """
    if microbatches < len(ranks) or 2 * len(ranks) * microbatches * _BATCHES > _MOST_TASKS:
        return None
    timing = Timing(
        forward=[each.forward for each in ranks],
        backward=[each.backward for each in ranks],
        gather=[each.gather for each in ranks],
        reduction=[each.reduction for each in ranks],
        update=[each.update for each in ranks],
    )
    return 1 - simulate(schedule_programs("1F1B", len(ranks), microbatches, _BATCHES), timing).utilization
