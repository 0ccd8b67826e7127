"""How much of the time a pipeline would stand still under a schedule if nothing but its stages took time.

A measured bubble has more in it, such as messages and other work of the machine. So the bubble of 1F1B, which
is simulated from what the stages of a run take, stands beside that of a simulation of the run's own schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titan_async.monitor.view.stages import StageFigures
from titan_async.pipelining.programs import ONE_STAGE, schedule_programs
from titan_async.pipelining.recording import BACKWARD_KINDS, Kind
from titan_async.pipelining.simulation import Timing, simulate

__all__ = ["StageSeconds", "simulated_bubble", "stage_seconds"]

_BATCHES = 4  # of which the last two are steady
_MOST_TASKS = 100_000  # about a second of simulation
_OF_FORWARD = 1 / 3  # of an overlapped pair, whose two cannot be timed apart


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
    swap: float


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
        pairs = seconds[Kind.OVERLAP]
        forward += (seconds[Kind.FORWARD] + _OF_FORWARD * pairs) / forwards
        backward += (seconds[list(BACKWARD_KINDS)].sum() + (1 - _OF_FORWARD) * pairs) / backwards
        by_kind += seconds / len(stage.steps)
    of_batch = by_kind[[Kind.GATHER, Kind.REDUCE, Kind.OPTIMIZER, Kind.SWAP]]
    return StageSeconds(float(forward), float(backward), *map(float, of_batch))


def simulated_bubble(
    schedule: str,
    ranks: Sequence[StageSeconds],
    microbatches: int,
    lookahead: int = 0,
    overlap: bool = False,
    drains: bool = False,
) -> float | None:
    """The share of a rank's time in which it would not compute, the mean over ranks.

    Messages and texts are taken to need no time. None for schedules of several stages a rank, where there
    must be more microbatches, or for so many that the simulation would take long.
    """
    if schedule not in ONE_STAGE or 2 * len(ranks) * microbatches * _BATCHES > _MOST_TASKS:
        return None
    timing = Timing(
        forward=[each.forward for each in ranks],
        backward=[each.backward for each in ranks],
        # Only a schedule with two versions of the weights swaps them.
        gather=[each.gather + (each.swap if schedule == "Async2BW" else 0.0) for each in ranks],
        reduction=[each.reduction for each in ranks],
        update=[each.update for each in ranks],
    )
    try:
        programs = schedule_programs(
            schedule, len(ranks), microbatches, _BATCHES, lookahead, overlap=overlap, drains=drains
        )
    except ValueError:
        return None
    return 1 - simulate(programs, timing).utilization
