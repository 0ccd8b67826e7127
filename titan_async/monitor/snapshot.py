"""The state of a run, read from its files while they are written."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_async.monitor.events import RankReader, RankState
from titan_async.monitor.formatting import approximate_duration
from titan_async.monitor.journal import History, JournalReader
from titan_async.monitor.processes import has_exited, is_local
from titan_async.monitor.run_folder import RunInfo, read_info
from titan_async.monitor.stage_stats import (
    RankStats,
    StepStats,
    mean_of_known,
    simulated_bubble,
    stage_seconds,
)
from titan_async.monitor.stalls import HEARTBEAT_TIMEOUT, RankStatus, Stall, find_stalls, find_stragglers
from titan_async.pipelining.recording import COMPUTE_KINDS, Kind

__all__ = ["RunMonitor", "Snapshot", "StageRow"]

_SIMULATION_INTERVAL = 30.0  # seconds; a simulation takes at most one
_STEPS_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """One stage, over all ranks that hold it."""

    stage: int
    utilization: float | None = None
    """Fraction of the last step in which it computed, the mean over its ranks; None before the first."""
    average_utilization: float | None = None
    busy_seconds: float = 0.0
    """Seconds of computing per step, on the slowest of its ranks."""
    slowest_rank: int | None = None
    """None if it has one rank."""
    in_flight: int = 0
    """Current number of microbatches, the maximum over its ranks."""
    most_in_flight: int = 0
    """In the last step."""
    version: int = -1
    memory: int = 0
    """Bytes in use, the maximum over its ranks."""
    memory_limit: int = 0
    """Bytes, the maximum over its ranks; 0 if unknown."""
    doing: Kind | None = None
    """The current span of the first of its ranks."""
    microbatch: int = -1
    """The microbatch of that span; -1 for none."""
    neighbour: int = -1
    """The stage that it receives from or sends to; -1 for none."""
    stalled: bool = False
    steps: tuple[StepStats, ...] = ()
    """The last steps of its slowest rank."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a run, without curves and log."""

    info: RunInfo
    status: str
    """The status of the whole run, such as "running" or "saving"."""
    over: bool
    """Whether the run has ended."""
    step: int
    """Steps done, including those before the run."""
    elapsed: int | None
    """Seconds since the start."""
    remaining: int | None
    """Estimated seconds to the end; None if unknown."""
    bubble: float | None
    """Measured: recent fraction of the ranks' time in which they do not compute."""
    simulated_bubble: float | None
    """The bubble in a simulation of the run's schedule with its stages' times; None if unknown."""
    simulated_bubble_of_1f1b: float | None
    """The bubble in a simulation of 1F1B; None if unknown, or if that is the run's schedule."""
    rows: tuple[StageRow, ...]
    stalls: tuple[Stall, ...]
    entries: int
    """Entries of the journal so far; curves and log change with it."""

    @property
    def is_synchronous(self) -> bool:
        """Whether the next step belongs to a synchronous start."""
        return self.step < self.info.synchronous_steps


class RunMonitor:
    """Follows a run by its files.

    Args:
        folder: of the run, `RUN_DIR/events/RUN_ID`.

    Raises:
        UserError: if there is no run in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.info = folder, read_info(folder)
        self.history = History()
        self._entries = 0
        self._journal = JournalReader(folder)
        self._readers = [RankReader(folder, rank) for rank in range(len(self.info.ranks))]
        self._stats = [RankStats(stages, self.info) for stages in self.info.ranks]
        self._states: list[RankState | None] = [None] * len(self._readers)
        self._read = [0] * len(self._readers)  # records, including overwritten ones
        self._last_beat: list[float | None] = [None] * len(self._readers)  # by the clock of this process
        self._since = time.monotonic()
        self._is_local = is_local(self.info)
        self._simulated: tuple[float | None, float | None] = (None, None)  # of the schedule, and of 1F1B
        self._simulated_at = -math.inf

    def poll(self) -> None:
        """Reads new events."""
        for entry in self._journal.new_entries():
            self.history.add(entry)
            self._entries += 1
        for rank, reader in enumerate(self._readers):
            state, known = reader.state(), self._states[rank]
            if state is None:
                continue
            if known is not None and state.beat != known.beat:
                self._last_beat[rank] = time.monotonic()
            self._states[rank] = state
            if state.count > self._read[rank]:
                records = reader.new_records()
                lost = max(state.count - self._read[rank] - len(records), 0)
                self._stats[rank].add(records, lost=lost > 0)
                self._read[rank] += len(records) + lost

    def snapshot(self) -> Snapshot:
        """The state of the run at the last `poll`."""
        ranks = self._ranks()
        active = [now for now in ranks if not now.state.closed]
        over = self.history.end is not None or (bool(ranks) and not active)
        no_heartbeat = bool(active) and min(now.heartbeat_age for now in active) > HEARTBEAT_TIMEOUT
        # A process in another container is not visible here: its heartbeat shows that it is alive.
        dead = not over and no_heartbeat and has_exited(self.info)
        stalls = [] if over or dead else find_stalls(active, self.info.stages)
        by_all = min((now.stats.step for now in ranks), default=0)
        step = max(self.history.step, self.info.first_step, by_all)
        simulated, simulated_of_1f1b = self._simulate(drains=step < self.info.synchronous_steps)
        return Snapshot(
            info=self.info,
            status=self._status(active, over, dead, bool(stalls)),
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

    def stragglers(self, seconds: float) -> list[str]:
        """Descriptions of the active ranks for which others have waited; see `find_stragglers`."""
        active = [now for now in self._ranks() if not now.state.closed]
        return find_stragglers(active, self.info.stages, seconds)

    def _ranks(self) -> list[RankStatus]:
        return [
            RankStatus(rank, state, self._stats[rank], self._heartbeat_age(rank, state.beat))
            for rank, state in enumerate(self._states)
            if state is not None
        ]

    def _heartbeat_age(self, rank: int, beat: int) -> float:
        """Seconds since a rank's last heartbeat."""
        last_beat = self._last_beat[rank]
        if last_beat is not None:
            return time.monotonic() - last_beat
        # Heartbeats from before the first poll are compared by the clocks of their hosts.
        latest = max(state.beat for state in self._states if state is not None)
        old = (latest - beat) / 1e9 + (max(time.time() - latest / 1e9, 0.0) if self._is_local else 0.0)
        return max(old, time.monotonic() - self._since)

    def _status(self, active: Sequence[RankStatus], over: bool, dead: bool, stalled: bool) -> str:
        if over:
            return self.history.end or "ended"
        if dead:
            return f"died (process {self.info.pid} does not exist)"
        if not active:
            return "starting"
        age = min(now.heartbeat_age for now in active)
        if age > HEARTBEAT_TIMEOUT:
            return f"no heartbeat for {approximate_duration(age)}"
        kinds = {now.kind for now in active}
        if Kind.SAVE in kinds:
            return "saving"
        if Kind.VALIDATE in kinds:
            return "validating"
        if stalled:
            return "stalled"
        return "running" if any(now.stats.step for now in active) else "in its first step"

    def _elapsed(self) -> int | None:
        # Only by the clock of rank 0.
        state = self._states[0]
        latest = max(self.history.last_time, state.beat / 1e9 if state is not None else 0.0)
        return max(int(latest - self.info.started), 0) if latest else None

    def _remaining(self, step: int) -> int | None:
        seconds = self.history.step_seconds or self._stats[0].step_seconds
        return None if seconds is None else round(seconds * max(self.info.steps - step, 0))

    def _bubble(self) -> float | None:
        busy = []
        for rank in self._stats:
            fractions = [s for stage in rank.stages.values() if (s := stage.average_utilization) is not None]
            busy += [sum(fractions)] if len(fractions) == len(rank.stages) else []
        return 1 - sum(busy) / len(busy) if busy else None

    def _simulate(self, drains: bool) -> tuple[float | None, float | None]:
        now, info = time.monotonic(), self.info
        if now - self._simulated_at < _SIMULATION_INTERVAL:
            return self._simulated
        # One replica of each rank of the pipeline.
        of_pipeline = dict(zip(info.ranks, self._stats, strict=True))
        measured = [stage_seconds(rank.stages.values()) for _, rank in sorted(of_pipeline.items())]
        seconds = [each for each in measured if each is not None]
        if 2 <= len(seconds) == len(measured):
            shape = info.microbatches, info.lookahead, info.overlap
            own = simulated_bubble(info.schedule, seconds, *shape, drains)
            others = None if info.schedule == "1F1B" else simulated_bubble("1F1B", seconds, info.microbatches)
            self._simulated, self._simulated_at = (own, others), now
        return self._simulated

    def _row(self, stage: int, ranks: Sequence[RankStatus], stalls: Sequence[Stall]) -> StageRow:
        holding = [now for now in ranks if stage in now.stats.stages]
        stalled = any(stage in stall.stages for stall in stalls)
        if not holding:
            return StageRow(stage=stage, stalled=stalled)
        stats = [now.stats.stages[stage] for now in holding]
        first, slowest = holding[0], max(range(len(stats)), key=lambda i: stats[i].busy_seconds)
        average = mean_of_known(each.average_utilization for each in stats)
        doing = first.kind if first.stage == stage else None
        return StageRow(
            stage=stage,
            utilization=mean_of_known(each.utilization for each in stats),
            average_utilization=average,
            busy_seconds=stats[slowest].busy_seconds,
            slowest_rank=None if len(holding) == 1 or average is None else holding[slowest].rank,
            in_flight=max(now.in_flight(stage) for now in holding),
            most_in_flight=max((each.steps[-1].most_in_flight for each in stats if each.steps), default=0),
            version=max(each.version for each in stats),
            memory=max(now.state.memory for now in holding),
            memory_limit=max(now.state.memory_limit for now in holding),
            doing=doing,
            microbatch=first.microbatch if doing in COMPUTE_KINDS else -1,
            neighbour=self._neighbour(first) if doing in (Kind.RECEIVE, Kind.SEND) else -1,
            stalled=stalled,
            steps=tuple(stats[slowest].steps)[-_STEPS_SHOWN:],
        )

    def _neighbour(self, now: RankStatus) -> int:
        """The stage at the other end of a rank's message; -1 if its span has several messages."""
        other = now.neighbour
        return other if now.microbatch >= 0 and 0 <= other < self.info.stages else -1
