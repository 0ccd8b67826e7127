"""The state of a run, from files that are read as they grow."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_async.monitor.events import RankReader, RankState
from titan_async.monitor.formatting import approximate_duration
from titan_async.monitor.journal import History, JournalReader
from titan_async.monitor.processes import has_gone, is_here
from titan_async.monitor.run_folder import RunInfo, read_info
from titan_async.monitor.stages import (
    RankFigures,
    StepFigures,
    mean_of_known,
    simulated_bubble,
    stage_seconds,
)
from titan_async.monitor.stalls import SILENCE, RankNow, Stall, find_stalls, find_stragglers
from titan_async.pipelining.recording import COMPUTE_KINDS, Kind

__all__ = ["RunWatch", "Snapshot", "StageRow"]

_SIMULATE_EVERY = 30.0  # seconds between two simulations of a schedule, which take a second at most
_STEPS_SHOWN = 4  # span by span


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """One stage, over all ranks that hold a copy of it."""

    stage: int
    utilization: float | None = None
    """The share of the last step that it computed, the mean over its ranks; None before the first."""
    average_utilization: float | None = None
    busy_seconds: float = 0.0
    """Seconds of a step that it computes, on the slowest of its ranks."""
    slowest_rank: int | None = None
    """Of its ranks, if there are several."""
    in_flight: int = 0
    """Microbatches now, the most of any of its ranks."""
    most_in_flight: int = 0
    """In the last step."""
    version: int = -1
    memory: int = 0
    """Bytes in use, the most of any of its ranks, as the following."""
    memory_limit: int = 0
    doing: Kind | None = None
    """On the first of its ranks."""
    microbatch: int = -1
    """The one that it is about; -1 for none."""
    neighbour: int = -1
    """The stage for whose message it waits, or that it sends to; -1 for none."""
    stalled: bool = False
    steps: tuple[StepFigures, ...] = ()
    """The last of its slowest rank."""


@dataclass(frozen=True)
class Snapshot:
    """Everything that a view shows, but for curves and log."""

    info: RunInfo
    status: str
    """Of the run as a whole, such as "running" or "saving"."""
    over: bool
    """Whether nothing more is to come."""
    step: int
    """Steps done, those before the run included."""
    elapsed: int | None
    """Seconds since it started."""
    remaining: int | None
    """Seconds that the rest will take; None if not known."""
    bubble: float | None
    """The share of the ranks' time in which they do not compute, lately: measured."""
    simulated_bubble: float | None
    """The same by simulation of the run's schedule, with what its stages take; None if that cannot be had."""
    simulated_bubble_of_1f1b: float | None
    """And of 1F1B; None too where that is the run's schedule."""
    rows: tuple[StageRow, ...]
    stalls: tuple[Stall, ...]
    entries: int
    """Of the journal so far: what curves and log change with."""

    @property
    def is_synchronous(self) -> bool:
        """Whether the next step is one of a synchronous start."""
        return self.step < self.info.synchronous_steps


class RunWatch:
    """Reads a run's files.

    Args:
        folder: the run's, `RUN_DIR/events/RUN_ID`.

    Raises:
        UserError: if the folder holds no run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.info = folder, read_info(folder)
        self.history = History()
        self._entries = 0
        self._journal = JournalReader(folder)
        self._readers = [RankReader(folder, rank) for rank in range(len(self.info.ranks))]
        self._figures = [RankFigures(stages, self.info) for stages in self.info.ranks]
        self._states: list[RankState | None] = [None] * len(self._readers)
        self._read = [0] * len(self._readers)  # records, those that were lost included
        self._heard: list[float | None] = [None] * len(self._readers)  # by the clock of this process
        self._since = time.monotonic()
        self._is_here = is_here(self.info)
        self._simulated: tuple[float | None, float | None] = (None, None)  # of the schedule, and of 1F1B
        self._simulated_at = -math.inf

    def poll(self) -> None:
        """Read what is new."""
        for entry in self._journal.new_entries():
            self.history.add(entry)
            self._entries += 1
        for rank, reader in enumerate(self._readers):
            state, known = reader.state(), self._states[rank]
            if state is None:
                continue
            if known is not None and state.beat != known.beat:
                self._heard[rank] = time.monotonic()
            self._states[rank] = state
            if state.count > self._read[rank]:
                records = reader.new_records()
                lost = max(state.count - self._read[rank] - len(records), 0)
                self._figures[rank].add(records, lost=lost > 0)
                self._read[rank] += len(records) + lost

    def snapshot(self) -> Snapshot:
        """The state of the run, from what has been read."""
        ranks = self._ranks()
        going = [now for now in ranks if not now.state.closed]
        over = self.history.end is not None or (bool(ranks) and not going)
        silent = bool(going) and min(now.silent for now in going) > SILENCE
        # A process of that number may also be unknown because it runs in another container.
        dead = not over and silent and has_gone(self.info)
        stalls = [] if over or dead else find_stalls(going, self.info.stages)
        by_all = min((now.figures.step for now in ranks), default=0)
        step = max(self.history.step, self.info.first_step, by_all)
        simulated, simulated_of_1f1b = self._simulate(drains=step < self.info.synchronous_steps)
        return Snapshot(
            info=self.info,
            status=self._status(going, over, dead, bool(stalls)),
            over=over or dead,
            step=step,
            elapsed=self._elapsed(),
            remaining=None if over or dead else self._remaining(step),
            bubble=self._bubble(),
            simulated_bubble=simulated,
            simulated_bubble_of_1f1b=simulated_of_1f1b,
            rows=tuple(self._row(stage, ranks, stalls) for stage in range(self.info.stages)),
            stalls=tuple(stalls),
            entries=self._entries,
        )

    def culprits(self, seconds: float) -> list[str]:
        """Who has let others wait for so long, of those that go on; see `find_stragglers`."""
        going = [now for now in self._ranks() if not now.state.closed]
        return find_stragglers(going, self.info.stages, seconds)

    def _ranks(self) -> list[RankNow]:
        return [
            RankNow(rank, state, self._figures[rank], self._silence(rank, state.beat))
            for rank, state in enumerate(self._states)
            if state is not None
        ]

    def _silence(self, rank: int, beat: int) -> float:
        """Seconds since a rank was heard of."""
        heard = self._heard[rank]
        if heard is not None:
            return time.monotonic() - heard
        # What it has written before it was watched is compared with clocks that may be others'.
        latest = max(state.beat for state in self._states if state is not None)
        old = (latest - beat) / 1e9 + (max(time.time() - latest / 1e9, 0.0) if self._is_here else 0.0)
        return max(old, time.monotonic() - self._since)

    def _status(self, going: Sequence[RankNow], over: bool, dead: bool, stalled: bool) -> str:
        if over:
            return self.history.end or "over"
        if dead:
            return f"ended without a word (process {self.info.pid} is gone)"
        if not going:
            return "starting"
        silence = min(now.silent for now in going)
        if silence > SILENCE:
            return f"not heard of for {approximate_duration(silence)}"
        kinds = {now.kind for now in going}
        if Kind.SAVE in kinds:
            return "saving"
        if Kind.VALIDATE in kinds:
            return "validating"
        if stalled:
            return "stalled"
        return "running" if any(now.figures.step for now in going) else "in its first step"

    def _elapsed(self) -> int | None:
        # By one clock alone, that of rank 0.
        state = self._states[0]
        latest = max(self.history.last_time, state.beat / 1e9 if state is not None else 0.0)
        return max(int(latest - self.info.started), 0) if latest else None

    def _remaining(self, step: int) -> int | None:
        seconds = self.history.step_seconds or self._figures[0].step_seconds
        return None if seconds is None else round(seconds * max(self.info.steps - step, 0))

    def _bubble(self) -> float | None:
        busy = []
        for rank in self._figures:
            shares = [s for stage in rank.stages.values() if (s := stage.average_utilization) is not None]
            busy += [sum(shares)] if len(shares) == len(rank.stages) else []
        return 1 - sum(busy) / len(busy) if busy else None

    def _simulate(self, drains: bool) -> tuple[float | None, float | None]:
        now, info = time.monotonic(), self.info
        if now - self._simulated_at < _SIMULATE_EVERY:
            return self._simulated
        # One rank for each of the pipeline.
        of_pipeline = dict(zip(info.ranks, self._figures, strict=True))
        measured = [stage_seconds(rank.stages.values()) for _, rank in sorted(of_pipeline.items())]
        seconds = [each for each in measured if each is not None]
        if 2 <= len(seconds) == len(measured):
            shape = info.microbatches, info.lookahead, info.overlap
            own = simulated_bubble(info.schedule, seconds, *shape, drains)
            others = None if info.schedule == "1F1B" else simulated_bubble("1F1B", seconds, info.microbatches)
            self._simulated, self._simulated_at = (own, others), now
        return self._simulated

    def _row(self, stage: int, ranks: Sequence[RankNow], stalls: Sequence[Stall]) -> StageRow:
        holding = [now for now in ranks if stage in now.figures.stages]
        stalled = any(stage in stall.stages for stall in stalls)
        if not holding:
            return StageRow(stage=stage, stalled=stalled)
        figures = [now.figures.stages[stage] for now in holding]
        first, slowest = holding[0], max(range(len(figures)), key=lambda i: figures[i].busy_seconds)
        average = mean_of_known(each.average_utilization for each in figures)
        doing = first.kind if first.stage == stage else None
        return StageRow(
            stage=stage,
            utilization=mean_of_known(each.utilization for each in figures),
            average_utilization=average,
            busy_seconds=figures[slowest].busy_seconds,
            slowest_rank=None if len(holding) == 1 or average is None else holding[slowest].rank,
            in_flight=max(now.in_flight(stage) for now in holding),
            most_in_flight=max((each.steps[-1].most_in_flight for each in figures if each.steps), default=0),
            version=max(each.version for each in figures),
            memory=max(now.state.memory for now in holding),
            memory_limit=max(now.state.memory_limit for now in holding),
            doing=doing,
            microbatch=first.microbatch if doing in COMPUTE_KINDS else -1,
            neighbour=self._neighbour(first) if doing in (Kind.RECEIVE, Kind.SEND) else -1,
            stalled=stalled,
            steps=tuple(figures[slowest].steps)[-_STEPS_SHOWN:],
        )

    def _neighbour(self, now: RankNow) -> int:
        """With whom a rank exchanges a message; -1 where its span is about several."""
        other = now.neighbour
        return other if now.microbatch >= 0 and 0 <= other < self.info.stages else -1
