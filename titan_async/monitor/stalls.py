"""Stalled stages and stragglers: what waits too long, for what and since when, and who causes it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from titan_async.monitor.events import RankState
from titan_async.monitor.formatting import approximate_duration, name_stages
from titan_async.monitor.kinds import KINDS
from titan_async.monitor.stages import RankFigures
from titan_async.pipelining.recording import FORWARD_KINDS, Kind

__all__ = ["SILENCE", "RankNow", "Stall", "describe", "find_stalls", "find_stragglers"]

SILENCE = 10.0
"""Seconds after which a rank, which writes several times a second, is taken to be stopped or dead."""

_LEAST_WAIT = 5.0
_STEPS_OF_WAIT = 5
_FIRST_STEP = 300.0  # before any step has ended, when models compile

_HELD_UP = (Kind.RECEIVE, Kind.SEND, Kind.CLIP, Kind.GATHER, Kind.REDUCE)
"""Kinds that take long where others do not come."""


@dataclass(frozen=True)
class RankNow:
    """The state of a rank."""

    rank: int
    state: RankState
    figures: RankFigures
    silent: float
    """Seconds since it was last heard of."""

    @property
    def kind(self) -> Kind | None:
        """What it does; None between steps."""
        current = self.state.current
        return Kind(int(current["kind"])) if current["start"] else None

    @property
    def stage(self) -> int:
        """Which of its stages that is about; between steps its first."""
        return int(self.state.current["stage"]) if self.kind is not None else min(self.figures.stages)

    @property
    def microbatch(self) -> int:
        """Which microbatch; -1 if it is about a whole batch."""
        return int(self.state.current["microbatch"])

    @property
    def holds(self) -> bool:
        """Whether the microbatch that it is about has gone forward there and not yet backward."""
        return self.figures.stages[self.stage].holds(int(self.state.current["batch"]), self.microbatch)

    @property
    def neighbour(self) -> int:
        """The stage whose message it waits for, or to which it sends."""
        stage = self.stage
        # What it holds waits for the gradient, or is an output to send.
        return stage + 1 if self.holds else stage - 1

    def in_flight(self, stage: int) -> int:
        """Microbatches in flight on a stage, with the one whose forward is under way."""
        goes_forward = self.kind in FORWARD_KINDS and self.stage == stage
        return self.figures.stages[stage].in_flight + int(goes_forward)

    @property
    def seconds(self) -> float:
        """How long that has lasted, by the rank's own clock, until it was last heard of."""
        return float(self.state.beat - self.state.current["start"]) / 1e9

    @property
    def is_late(self) -> bool:
        """Whether it has been at one thing for much longer than a whole step takes."""
        if self.kind in (None, Kind.SAVE, Kind.VALIDATE):
            return False
        step = self.figures.step_seconds
        return self.seconds > (_FIRST_STEP if step is None else max(_LEAST_WAIT, _STEPS_OF_WAIT * step))


@dataclass(frozen=True)
class Stall:
    """Something that has lasted too long."""

    stages: tuple[int, ...]
    """Whose rows it concerns."""
    text: str
    """A sentence without a full stop."""


def find_stalls(ranks: Sequence[RankNow], total_stages: int) -> list[Stall]:
    """What holds a run up, causes first.

    A rank is late if it has waited, or computed one thing, for more than 5 seconds and 5 average steps; in
    its first step, in which models compile, for 5 minutes. None is while some rank validates or saves. A rank
    that has not been heard of for 10 seconds is stopped, or dead.

    Args:
        ranks: those that go on.
        total_stages: of the pipeline.
    """
    stalls = [Stall(tuple(now.figures.stages), _silence(now)) for now in ranks if now.silent > SILENCE]
    heard = [now for now in ranks if now.silent <= SILENCE]
    late = [now for now in heard if now.is_late]
    if not late or any(now.kind in (Kind.SAVE, Kind.VALIDATE) for now in heard):
        return stalls
    causes = _on_their_own(heard, _LEAST_WAIT)
    stalls += [_stall(now, total_stages) for now in causes]
    if len(late) == len(ranks) > 1 and not causes:
        stalls.append(Stall(tuple(range(total_stages)), "all stages wait for each other"))
    return stalls + [_stall(now, total_stages) for now in late if now not in causes]


def find_stragglers(ranks: Sequence[RankNow], total_stages: int, seconds: float) -> list[str]:
    """Who has let the others wait for so long, where all that is known is that some have waited in vain.

    A sentence without a full stop for each rank that has not been heard of for that time; if there is none,
    for each that has done something of its own for that time, which no wait for others explains; if there is
    none either, for those between two steps, where a rank may also wait.

    Args:
        ranks: those that may have.
        total_stages: of the pipeline.
        seconds: at least.
    """
    silent = [_silence(now) for now in ranks if now.silent > seconds]
    if silent:
        return silent
    found = _on_their_own(ranks, seconds)
    found = [now for now in found if now.kind is not None] or found
    return [f"{_name(now)} {describe(now, total_stages)}{_since(now)}" for now in found]


def describe(now: RankNow, total_stages: int) -> str:
    """What a rank does: the rest of a sentence that begins with its stage."""
    kind, which = now.kind, f"step {now.state.current['batch']}"
    if kind is None:
        return "is between two steps"
    if now.microbatch >= 0:
        which = f"microbatch {now.microbatch} of {which}"
    if kind not in (Kind.RECEIVE, Kind.SEND):
        return KINDS[kind].sentence.format(which=which)
    other = now.neighbour
    if kind is Kind.SEND:
        return f"waits to send {which} to stage {other}"
    source = f" from stage {other}" if 0 <= other < total_stages else ""
    return f"waits for the {'gradient' if now.holds else 'input'} of {which}{source}"


def _on_their_own(ranks: Sequence[RankNow], seconds: float) -> list[RankNow]:
    """Those who do something of their own: they have let the others wait for about as long."""
    return [now for now in ranks if now.kind not in _HELD_UP and (now.kind is None or now.seconds > seconds)]


def _name(now: RankNow) -> str:
    return f"rank {now.rank} ({name_stages(sorted(now.figures.stages))})"


def _silence(now: RankNow) -> str:
    return f"{_name(now)} has not been heard of for {approximate_duration(now.silent)}"


def _since(now: RankNow) -> str:
    if now.kind is None:
        return ""
    clock = time.strftime("%H:%M:%S", time.localtime(int(now.state.current["start"]) / 1e9))
    return f", since {clock} ({approximate_duration(now.seconds)})"


def _stall(now: RankNow, total_stages: int) -> Stall:
    stage = now.stage
    rank = "" if now.rank == stage else f" on rank {now.rank}"
    return Stall((stage,), f"stage {stage}{rank} {describe(now, total_stages)}{_since(now)}")
