"""Utilization of a rank's stages in the last steps, updated as records arrive, and simulated bubbles.

A measured bubble includes other costs than the schedule's, such as messages and other load on the machine.
Therefore the live view also shows the bubbles of the run's schedule and of 1F1B in simulations with the
stages' measured times.
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
    "RankStats",
    "StageSeconds",
    "StageStats",
    "StepStats",
    "exclusive_seconds",
    "mean_of_known",
    "simulated_bubble",
    "stage_seconds",
]

_AVERAGED_STEPS = 20
_MAX_PENDING = 1 << 14  # records kept if no step ends

_SIMULATED_BATCHES = 4  # the last two are in steady state
_MAX_TASKS = 100_000  # about a second of simulation
_FORWARD_FRACTION = 1 / 3  # of an overlapped pair, in which the two cannot be timed separately


@dataclass(frozen=True, eq=False)
class StepStats:
    """One step on one stage."""

    step: int
    start: int
    """In nanoseconds since the epoch."""
    end: int
    records: npt.NDArray[np.void]
    """The stage's `RECORD`s in it, in order."""
    by_kind: npt.NDArray[np.float64]
    """Seconds of the stage's spans by kind, without nested spans."""
    most_in_flight: int
    """Peak number of microbatches."""

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return (self.end - self.start) / 1e9

    @cached_property
    def busy(self) -> float:
        """Seconds in which the stage computed."""
        return float(self.by_kind[list(COMPUTE_KINDS)].sum())

    def count(self, kinds: Sequence[Kind]) -> int:
        """Number of spans of these kinds."""
        return int(np.isin(self.records["kind"], kinds).sum())


class StageStats:
    """Statistics of one stage on one rank."""

    def __init__(self) -> None:
        self.steps: deque[StepStats] = deque(maxlen=_AVERAGED_STEPS)
        self.version = -1
        """Updates applied to the weights of the last computation; -1 if unknown."""
        self._open = np.empty(0, np.int64)  # microbatches in flight
        self._peak = 0

    @property
    def utilization(self) -> float | None:
        """Fraction of the last step in which it computed; None before the first."""
        return self.steps[-1].busy / self.steps[-1].seconds if self.steps else None

    @property
    def average_utilization(self) -> float | None:
        """The same over the last 20 steps."""
        return sum(s.busy for s in self.steps) / sum(s.seconds for s in self.steps) if self.steps else None

    @property
    def busy_seconds(self) -> float:
        """Seconds of computing per step, on average; 0 before the first."""
        return mean_of_known(step.busy for step in self.steps) or 0.0

    @property
    def in_flight(self) -> int:
        """Number of microbatches between their forward and their backward."""
        return len(self._open)

    def holds(self, batch: int, microbatch: int) -> bool:
        """Whether a microbatch is in flight on this stage."""
        return bool((self._open == _key(batch, microbatch)).any())

    def follow(self, records: npt.NDArray[np.void]) -> None:
        """Adds spans of this stage, in order, with overlapped pairs split."""
        kinds = records["kind"]
        computed = records[np.isin(kinds, COMPUTE_KINDS) & (records["version"] >= 0)]
        if len(computed):
            self.version = int(computed["version"][-1])
        # Microbatches of a validation have no batch.
        of_batch = records["batch"] >= 0
        forward = (kinds == Kind.FORWARD) & of_batch
        keys = _key(records["batch"], records["microbatch"])
        # A backward whose forward was not recorded is ignored.
        known = np.concatenate([self._open, keys[forward]])
        released = np.isin(kinds, RELEASING_KINDS) & of_batch & np.isin(keys, known)
        level = len(self._open) + np.cumsum(forward.astype(np.int64) - released)
        self._peak = max(self._peak, int(level.max(initial=0)))
        self._open = np.setdiff1d(known, keys[released])

    def end_step(
        self, step: np.void, records: npt.NDArray[np.void], exclusive: npt.NDArray[np.float64], complete: bool
    ) -> None:
        """Ends a step after all its spans have been added.

        Args:
            step: the span of the step.
            records: those of this stage in it.
            exclusive: seconds of these, without nested spans.
            complete: whether no span is missing.
        """
        number, start, end = int(step["batch"]), int(step["start"]), int(step["end"])
        by_kind = np.bincount(records["kind"], weights=exclusive, minlength=len(Kind)).astype(float)
        if complete and end > start:
            self.steps.append(StepStats(number, start, end, records.copy(), by_kind, self._peak))
        self._peak = len(self._open)
        # Microbatches in flight belong to this step or the one before.
        self._open = self._open[self._open >= _key(number - 1, 0)]


class RankStats:
    """Statistics of all stages of one rank.

    Args:
        stages: their indices.
        shape: of the run; required if there are overlapped pairs.
    """

    def __init__(self, stages: tuple[int, ...], shape: RunShape | None = None) -> None:
        self._shape = shape
        self.stages = {stage: StageStats() for stage in stages}
        self.step = 0
        """The last finished step; 0 before the first."""
        self._pending = np.empty(0, RECORD)  # since the last step ended
        self._complete = True

    @property
    def step_seconds(self) -> float | None:
        """Seconds per step, on average; None before the first."""
        return mean_of_known(step.seconds for step in next(iter(self.stages.values())).steps)

    def add(self, records: npt.NDArray[np.void], lost: bool = False) -> None:
        """Adds records.

        Args:
            records: `RECORD`s in order.
            lost: whether records since the last call are missing before these.
        """
        if lost:
            self._pending, self._complete = np.empty(0, RECORD), False
        ends = np.flatnonzero(records["kind"] == Kind.STEP)
        begin = 0
        # Older steps would be dropped immediately.
        for end in map(int, ends[-_AVERAGED_STEPS - 1 :]):
            self._follow(records[begin:end])
            self._end_step(records[end])
            begin = end + 1
        self._follow(records[begin:])

    def _follow(self, records: npt.NDArray[np.void]) -> None:
        split = records if self._shape is None else split_pairs(records, self._shape)[0]
        for stage, stats in self.stages.items():
            stats.follow(split[split["stage"] == stage])
        self._pending = np.concatenate([self._pending, records])[-_MAX_PENDING:]

    def _end_step(self, step: np.void) -> None:
        inside = self._pending[self._pending["start"] >= step["start"]]
        exclusive = exclusive_seconds(inside)
        for stage, stats in self.stages.items():
            of_stage = inside["stage"] == stage
            stats.end_step(step, inside[of_stage], exclusive[of_stage], self._complete)
        self._pending, self._complete = np.empty(0, RECORD), True
        self.step = int(step["batch"])


def exclusive_seconds(records: npt.NDArray[np.void]) -> npt.NDArray[np.float64]:
    """Durations of spans without their nested spans.

    Args:
        records: `RECORD`s of one rank in order, including all nested ones.
    """
    seconds: npt.NDArray[np.float64] = (records["end"] - records["start"]) / 1e9
    exclusive, depths = seconds.copy(), records["depth"]
    for depth in range(int(depths.max(initial=0))):
        # Nested spans directly precede a span, after the last span that is not deeper.
        at_depth = np.flatnonzero(depths <= depth)
        nested = np.where(depths == depth + 1, seconds, 0.0).cumsum()[at_depth]
        exclusive[at_depth] -= np.where(depths[at_depth] == depth, np.diff(nested, prepend=0.0), 0.0)
    return exclusive


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are not None; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _key(batch: npt.ArrayLike, microbatch: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """A number that identifies a microbatch; those of later batches are larger."""
    return (np.asarray(batch, np.int64) << 32) + np.asarray(microbatch, np.int64)


@dataclass(frozen=True)
class StageSeconds:
    """Measured times of one rank's stages, in seconds."""

    forward: float
    """Per microbatch, as `backward`."""
    backward: float
    gather: float
    """Per batch, as the following."""
    reduction: float
    update: float
    swap: float


def stage_seconds(stages: Iterable[StageStats]) -> StageSeconds | None:
    """The average times of one rank, summed over its stages; None before all of them have computed."""
    forward = backward = 0.0
    by_kind = np.zeros(len(Kind))
    for stage in stages:
        forwards = sum(step.count(FORWARD_KINDS) for step in stage.steps)
        backwards = sum(step.count(GRADIENT_KINDS) for step in stage.steps)
        if not forwards or not backwards:
            return None
        seconds = np.sum([step.by_kind for step in stage.steps], axis=0)
        pairs = seconds[Kind.OVERLAP]
        forward += (seconds[Kind.FORWARD] + _FORWARD_FRACTION * pairs) / forwards
        backward += (seconds[list(BACKWARD_KINDS)].sum() + (1 - _FORWARD_FRACTION) * pairs) / backwards
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
    """The fraction of the time in which ranks do not compute in a simulation, the mean over ranks.

    Communication and data loading are assumed to take no time. None for schedules with several stages per
    rank, for too few microbatches, and for so many that the simulation would take long.
    """
    tasks = 2 * len(ranks) * microbatches * _SIMULATED_BATCHES
    if schedule not in ONE_STAGE or tasks > _MAX_TASKS:
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
