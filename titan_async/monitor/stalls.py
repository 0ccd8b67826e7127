"""Detection of stalled stages and stragglers: which ranks wait, for what, since when, and for which ranks."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from titan_async.monitor.events import RankState
from titan_async.monitor.formatting import approximate_duration, name_stages
from titan_async.monitor.kinds import KINDS
from titan_async.monitor.stage_stats import RankStats
from titan_async.pipelining.recording import FORWARD_KINDS, Kind

__all__ = ["HEARTBEAT_TIMEOUT", "RankStatus", "Stall", "describe", "find_stalls", "find_stragglers"]

HEARTBEAT_TIMEOUT = 10.0
"""Seconds after which a rank is considered stopped or dead. It writes several times a second."""

_MIN_WAIT = 5.0
_STEPS_OF_WAIT = 5
_FIRST_STEP = 300.0  # before any step has ended, because models may compile

_WAITING_KINDS = (Kind.RECEIVE, Kind.SEND, Kind.CLIP, Kind.GATHER, Kind.REDUCE)
"""Kinds that wait for other ranks."""


@dataclass(frozen=True)
class RankStatus:
    """The state of a rank."""

    rank: int
    state: RankState
    stats: RankStats
    heartbeat_age: float
    """Seconds since its last heartbeat."""

    @property
    def kind(self) -> Kind | None:
        """The kind of its current span; None between steps."""
        current = self.state.current
        return Kind(int(current["kind"])) if current["start"] else None

    @property
    def stage(self) -> int:
        """The stage of its current span; between steps its first stage."""
        return int(self.state.current["stage"]) if self.kind is not None else min(self.stats.stages)

    @property
    def microbatch(self) -> int:
        """The microbatch of its current span; -1 for a whole batch."""
        return int(self.state.current["microbatch"])

    @property
    def holds(self) -> bool:
        """Whether the microbatch of its current span is in flight on that stage."""
        return self.stats.stages[self.stage].holds(int(self.state.current["batch"]), self.microbatch)

    @property
    def neighbour(self) -> int:
        """The stage that it receives from or sends to."""
        stage = self.stage
        # A microbatch in flight waits for its gradient, or its output is sent.
        return stage + 1 if self.holds else stage - 1

    def in_flight(self, stage: int) -> int:
        """Microbatches in flight on a stage, including one in its forward."""
        in_forward = self.kind in FORWARD_KINDS and self.stage == stage
        return self.stats.stages[stage].in_flight + int(in_forward)

    @property
    def seconds(self) -> float:
        """Duration of the current span until the last heartbeat, by the rank's clock."""
        return float(self.state.beat - self.state.current["start"]) / 1e9

    @property
    def is_late(self) -> bool:
        """Whether its current span is much longer than a step."""
        if self.kind in (None, Kind.SAVE, Kind.VALIDATE):
            return False
        step = self.stats.step_seconds
        return self.seconds > (_FIRST_STEP if step is None else max(_MIN_WAIT, _STEPS_OF_WAIT * step))


@dataclass(frozen=True)
class Stall:
    """A wait or a computation that takes too long."""

    stages: tuple[int, ...]
    text: str
    """A sentence without a full stop."""


def find_stalls(ranks: Sequence[RankStatus], total_stages: int) -> list[Stall]:
    """Finds the stalls of a run, causes first.

    A rank is late if its current span exceeds 5 seconds and 5 average steps; in its first step, in which
    models compile, 5 minutes. While a rank validates or saves, none is late. A rank without a heartbeat for
    10 seconds is stopped or dead.

    Args:
        ranks: the active ones.
        total_stages: of the pipeline.
    """
    dead = [now for now in ranks if now.heartbeat_age > HEARTBEAT_TIMEOUT]
    alive = [now for now in ranks if now.heartbeat_age <= HEARTBEAT_TIMEOUT]
    stalls = [Stall(tuple(now.stats.stages), _describe_heartbeat(now)) for now in dead]
    late = [now for now in alive if now.is_late]
    if not late or any(now.kind in (Kind.SAVE, Kind.VALIDATE) for now in alive):
        return stalls
    causes = _not_waiting(alive, _MIN_WAIT)
    stalls += [_stall(now, total_stages) for now in causes]
    if len(late) == len(ranks) > 1 and not causes:
        stalls.append(Stall(tuple(range(total_stages)), "all stages wait for each other"))
    return stalls + [_stall(now, total_stages) for now in late if now not in causes]


def find_stragglers(ranks: Sequence[RankStatus], total_stages: int, seconds: float) -> list[str]:
    """Describes the ranks for which others have waited until a timeout, without a full stop.

    These are the ranks without a heartbeat for that time; otherwise the ranks whose current span took that
    time without waiting for others; otherwise the ranks between two steps, which may be waiting as well.

    Args:
        ranks: the active ones.
        total_stages: of the pipeline.
        seconds: minimum duration.
    """
    dead = [_describe_heartbeat(now) for now in ranks if now.heartbeat_age > seconds]
    if dead:
        return dead
    found = _not_waiting(ranks, seconds)
    found = [now for now in found if now.kind is not None] or found
    return [f"{_name(now)} {describe(now, total_stages)}{_since(now)}" for now in found]


def describe(now: RankStatus, total_stages: int) -> str:
    """Describes a rank's current span; continues a sentence that begins with its stage."""
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


def _not_waiting(ranks: Sequence[RankStatus], seconds: float) -> list[RankStatus]:
    """The ranks that have not waited for others in this time."""
    return [
        now for now in ranks if now.kind not in _WAITING_KINDS and (now.kind is None or now.seconds > seconds)
    ]


def _name(now: RankStatus) -> str:
    return f"rank {now.rank} ({name_stages(sorted(now.stats.stages))})"


def _describe_heartbeat(now: RankStatus) -> str:
    return f"{_name(now)} has sent no heartbeat for {approximate_duration(now.heartbeat_age)}"


def _since(now: RankStatus) -> str:
    if now.kind is None:
        return ""
    clock = time.strftime("%H:%M:%S", time.localtime(int(now.state.current["start"]) / 1e9))
    return f", since {clock} ({approximate_duration(now.seconds)})"


def _stall(now: RankStatus, total_stages: int) -> Stall:
    stage = now.stage
    rank = "" if now.rank == stage else f" on rank {now.rank}"
    return Stall((stage,), f"stage {stage}{rank} {describe(now, total_stages)}{_since(now)}")
