"""Utilization of a rank's stages in the last steps, from its records as they come, and simulated bubbles.

A measured bubble includes more than that of the schedule, such as messages and other work of the machine. So
the bubble of 1F1B, simulated from what the stages of a run take, is shown beside that of a simulation of the
schedule of the run itself.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from titan_async.monitor.events import RECORD
from titan_async.monitor.run_folder import RunShape
from titan_async.monitor.spans import split_pairs
from titan_async.pipelining.programs import ONE_STAGE, schedule_programs
from titan_async.pipelining.recording import (
    BACKWARD_KINDS,
    COMPUTE_KINDS,
    FORWARD_KINDS,
    GRADIENT_KINDS,
    RELEASING_KINDS,
    Kind,
)
from titan_async.pipelining.simulation import Timing, simulate

__all__ = [
    "RankFigures",
    "StageFigures",
    "StageSeconds",
    "StepFigures",
    "mean_of_known",
    "own_seconds",
    "simulated_bubble",
    "stage_seconds",
]

_AVERAGED_STEPS = 20
_MOST_PENDING = 1 << 14  # records that are kept where no step ever ends

_SIMULATED_BATCHES = 4  # of which the last two are steady
_MOST_TASKS = 100_000  # about a second of simulation
_OF_FORWARD = 1 / 3  # of an overlapped pair, whose two cannot be timed apart


@dataclass(frozen=True, eq=False)
class StepFigures:
    """One step on one stage."""

    step: int
    start: int
    """In nanoseconds since the epoch."""
    end: int
    records: npt.NDArray[np.void]
    """What the stage did in it, `RECORD`s in order."""
    by_kind: npt.NDArray[np.float64]
    """Seconds of the stage's spans of each kind, without those of spans within."""
    most_in_flight: int
    """Microbatches."""

    @property
    def seconds(self) -> float:
        """From its start to its end."""
        return (self.end - self.start) / 1e9

    @cached_property
    def busy(self) -> float:
        """Seconds that the stage computed."""
        return float(self.by_kind[list(COMPUTE_KINDS)].sum())

    def count(self, kinds: Sequence[Kind]) -> int:
        """The number of spans of these kinds."""
        return int(np.isin(self.records["kind"], kinds).sum())


class StageFigures:
    """The figures of one stage on one rank."""

    def __init__(self) -> None:
        self.steps: deque[StepFigures] = deque(maxlen=_AVERAGED_STEPS)
        self.version = -1
        """Updates that the weights which computed last had seen; -1 if unknown."""
        self._open = np.empty(0, np.int64)  # microbatches in flight
        self._most = 0

    @property
    def utilization(self) -> float | None:
        """The share of the last step in which it computed; None before the first."""
        return self.steps[-1].busy / self.steps[-1].seconds if self.steps else None

    @property
    def average_utilization(self) -> float | None:
        """The same over the last 20 steps."""
        return sum(s.busy for s in self.steps) / sum(s.seconds for s in self.steps) if self.steps else None

    @property
    def busy_seconds(self) -> float:
        """Seconds of a step that it computes, on average; 0 before the first."""
        return mean_of_known(step.busy for step in self.steps) or 0.0

    @property
    def in_flight(self) -> int:
        """Microbatches that have gone forward and not yet backward."""
        return len(self._open)

    def holds(self, batch: int, microbatch: int) -> bool:
        """Whether a microbatch is in flight here."""
        return bool((self._open == _key(batch, microbatch)).any())

    def follow(self, records: npt.NDArray[np.void]) -> None:
        """Take note of spans of this stage, in order; overlapped pairs are split."""
        kinds = records["kind"]
        computed = records[np.isin(kinds, COMPUTE_KINDS) & (records["version"] >= 0)]
        if len(computed):
            self.version = int(computed["version"][-1])
        # A validation's microbatches are of no batch.
        of_batch = records["batch"] >= 0
        forward = (kinds == Kind.FORWARD) & of_batch
        keys = _key(records["batch"], records["microbatch"])
        # A backward whose forward was not seen takes nothing away.
        known = np.concatenate([self._open, keys[forward]])
        released = np.isin(kinds, RELEASING_KINDS) & of_batch & np.isin(keys, known)
        level = len(self._open) + np.cumsum(forward.astype(np.int64) - released)
        self._most = max(self._most, int(level.max(initial=0)))
        self._open = np.setdiff1d(known, keys[released])

    def end_step(
        self, step: np.void, records: npt.NDArray[np.void], own: npt.NDArray[np.float64], whole: bool
    ) -> None:
        """Take note of a step whose spans have all been followed.

        Args:
            step: its own span.
            records: those of this stage in it.
            own: seconds of these, without those of spans within.
            whole: whether no span is missing.
        """
        number, start, end = int(step["batch"]), int(step["start"]), int(step["end"])
        by_kind = np.bincount(records["kind"], weights=own, minlength=len(Kind)).astype(float)
        if whole and end > start:
            self.steps.append(StepFigures(number, start, end, records.copy(), by_kind, self._most))
        self._most = len(self._open)
        # What is in flight belongs to this step or the one before.
        self._open = self._open[self._open >= _key(number - 1, 0)]


class RankFigures:
    """The figures of all stages of one rank.

    Args:
        stages: their indices.
        shape: of the run, where there are overlapped pairs.
    """

    def __init__(self, stages: tuple[int, ...], shape: RunShape | None = None) -> None:
        self._shape = shape
        self.stages = {stage: StageFigures() for stage in stages}
        self.step = 0
        """The last that has ended; 0 before the first."""
        self._pending = np.empty(0, RECORD)  # since the last step ended
        self._whole = True

    @property
    def step_seconds(self) -> float | None:
        """Seconds a step, on average; None before the first."""
        return mean_of_known(step.seconds for step in next(iter(self.stages.values())).steps)

    def add(self, records: npt.NDArray[np.void], lost: bool = False) -> None:
        """Take note of records.

        Args:
            records: `RECORD`s in order.
            lost: whether there were others before these, since the last call.
        """
        if lost:
            self._pending, self._whole = np.empty(0, RECORD), False
        ends = np.flatnonzero(records["kind"] == Kind.STEP)
        begin = 0
        # Older steps would be forgotten at once.
        for end in map(int, ends[-_AVERAGED_STEPS - 1 :]):
            self._follow(records[begin:end])
            self._end_step(records[end])
            begin = end + 1
        self._follow(records[begin:])

    def _follow(self, records: npt.NDArray[np.void]) -> None:
        split = records if self._shape is None else split_pairs(records, self._shape)[0]
        for stage, figures in self.stages.items():
            figures.follow(split[split["stage"] == stage])
        self._pending = np.concatenate([self._pending, records])[-_MOST_PENDING:]

    def _end_step(self, step: np.void) -> None:
        inside = self._pending[self._pending["start"] >= step["start"]]
        own = own_seconds(inside)
        for stage, figures in self.stages.items():
            of_stage = inside["stage"] == stage
            figures.end_step(step, inside[of_stage], own[of_stage], self._whole)
        self._pending, self._whole = np.empty(0, RECORD), True
        self.step = int(step["batch"])


def own_seconds(records: npt.NDArray[np.void]) -> npt.NDArray[np.float64]:
    """How long spans lasted, without the spans within them.

    Args:
        records: `RECORD`s of one rank in order, all of those within any of them included.
    """
    seconds: npt.NDArray[np.float64] = (records["end"] - records["start"]) / 1e9
    own, depths = seconds.copy(), records["depth"]
    for depth in range(int(depths.max(initial=0))):
        # What lies within a span came just before it, after the last that is not deeper.
        here = np.flatnonzero(depths <= depth)
        within = np.where(depths == depth + 1, seconds, 0.0).cumsum()[here]
        own[here] -= np.where(depths[here] == depth, np.diff(within, prepend=0.0), 0.0)
    return own


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """The mean of those that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _key(batch: npt.ArrayLike, microbatch: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """One number for a microbatch; those of later batches are larger."""
    return (np.asarray(batch, np.int64) << 32) + np.asarray(microbatch, np.int64)


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


def stage_seconds(stages: Iterable[StageFigures]) -> StageSeconds | None:
    """What the stages of one rank took together on average; None before they have all computed."""
    forward = backward = 0.0
    by_kind = np.zeros(len(Kind))
    for stage in stages:
        forwards = sum(step.count(FORWARD_KINDS) for step in stage.steps)
        backwards = sum(step.count(GRADIENT_KINDS) for step in stage.steps)
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
    tasks = 2 * len(ranks) * microbatches * _SIMULATED_BATCHES
    if schedule not in ONE_STAGE or tasks > _MOST_TASKS:
        return None
    timing = Timing(
        forward=[each.forward for each in ranks],
        backward=[each.backward for each in ranks],
        # Only a schedule with two versions of the weights swaps them.
        gather=[each.gather + (each.swap if schedule == "Async2BW" else 0.0) for each in ranks],
        reduction=[each.reduction for each in ranks],
        update=[each.update for each in ranks],
    )
    shape = len(ranks), microbatches, _SIMULATED_BATCHES, lookahead
    try:
        programs = schedule_programs(schedule, *shape, overlap=overlap, drains=drains)
    except ValueError:
        return None
    return 1 - simulate(programs, timing).utilization
