"""How long a pipeline takes, from the order of work of its ranks: a small deterministic simulation.

A schedule is given as one list of tasks a rank, which the rank runs in that order, each as soon as its input
is there. All times are in the same unit, seconds say. A message takes `latency` from one rank to another. By
default receives are posted in time and messages occupy neither rank. With NCCL both ends are kernels that
take processors from what the rank computes until the message is there: see `Timing.receives_ahead`.

Where an update is to be part of it, a batch has "R" and "U" tasks too: the reduction of a stage's gradient,
with which its share of the gradient's norm starts on its way, and the clip and update, which wait for the
norms of all stages. `titan_async.pipelining.programs` has such lists for every schedule.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal, NamedTuple

__all__ = ["COMPUTE", "Half", "Kind", "Run", "Task", "Timing", "inputs_of", "pair_seconds", "simulate"]

Kind = Literal["F", "B", "I", "W", "G", "R", "U"]
"""Forward and backward of a microbatch; in place of a backward its two halves, the gradient of the input
("I") and those of the weights ("W"). Of a batch: gathering the weights, reducing the gradient, updating."""

COMPUTE = ("F", "B", "I", "W")
"""The kinds that count as being busy; of the others a batch has one each at most, as microbatch 0."""


class Task(NamedTuple):
    """What one stage does at a time, for one microbatch or, with "G", "R" and "U", for one batch."""

    kind: Kind
    stage: int
    batch: int
    microbatch: int
    beside: "Task | None" = None
    """The backward that the stage computes together with this forward: an overlapped pair."""

    def __str__(self) -> str:
        names = [f"{kind}{batch}.{microbatch}" for kind, _, batch, microbatch, _ in self.halves]
        return f"{' with '.join(names)} of stage {self.stage}"

    @property
    def halves(self) -> "tuple[Task, ...]":
        """The forward and the backward of a pair; any other task alone."""
        return (self,) if self.beside is None else (self._replace(beside=None), self.beside)


class Half(NamedTuple):
    """A forward or a backward, when it runs alone."""

    seconds: float
    exchange: float
    """Of these, those in which tokens travel between experts and nothing is computed."""
    hand_overs: int
    """The number of times that it waits for tokens."""


def pair_seconds(forward: Half, backward: Half) -> float:
    """What an overlapped pair takes, if exchanges and what is computed between them are equally long.

    Each half computes while the other's tokens travel, of which one exchange at a time does. The backward has
    the first turn, and sends its tokens before it computes anything; the forward ends with tokens. What one
    half has more than the other runs alone.
    """
    rounds = min(forward.hand_overs, backward.hand_overs)
    if not rounds:
        return forward.seconds + backward.seconds
    hidden = 0.0
    for one, other in ((forward, backward), (backward, forward)):
        computed = (one.seconds - one.exchange) / one.hand_overs
        hidden += min(computed, other.exchange / other.hand_overs)
    return forward.seconds + backward.seconds - rounds * hidden


@dataclass(frozen=True)
class Timing:
    """How long things take, in seconds. Sequences have one entry for each stage."""

    forward: Sequence[float]
    """Of one microbatch."""
    backward: Sequence[float]
    pair: Sequence[float] = ()
    """Of an overlapped pair, see `pair_seconds`; by default as long as its forward and its backward."""
    weight_gradient: Sequence[float] | None = None
    """The part of a backward that "W" takes where it is in two halves; "I" takes the rest. Default: half."""
    latency: float | Sequence[float] = 0.0
    """Of a message between two ranks, from when it is sent and its receive is posted; in a sequence, of those
    between a stage and the next, whatever their size."""
    receives_ahead: Sequence[tuple[int, int] | None] = ()
    """When ranks post receives, of activations and of gradients, between a stage and the next. 0: when the
    rank is free for the task. 1: when it starts the task of the same kind before that one, and so on; of
    forwards not before the "G" of their batch, which is where the first one's is posted at the latest. None,
    as by default: before the message is sent, at no cost."""
    message_share: float | Sequence[float] = 0.0
    """Between a stage and the next: of a rank's speed, what each direction takes in which it waits for a
    message whose receive it has posted, or has sent one that has not arrived. Gathers and reductions are not
    slowed down."""
    gather: Sequence[float] = ()
    """What a "G" takes; nothing by default, as the following."""
    reduction: Sequence[float] = ()
    """What an "R" takes."""
    update: Sequence[float] = ()
    """What a "U" takes."""
    norm: float = 0.0
    """From the last stage's "R" to the time at which all know the gradient's norm."""
    jitter: float = 0.0
    """Half the width of the uniform distribution of a computation's time, as a part of its mean."""
    seed: int = 0
    _of_kind: dict[str, Sequence[float]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        weight = self.weight_gradient
        if weight is None:
            weight = [seconds / 2 for seconds in self.backward]
        none = [0.0] * len(self.forward)
        seconds = {
            "F": self.forward,
            "B": self.backward,
            "FB": self.pair or [sum(both) for both in zip(self.forward, self.backward, strict=True)],
            "I": [whole - part for whole, part in zip(self.backward, weight, strict=True)],
            "W": weight,
            "G": self.gather or none,
            "R": self.reduction or none,
            "U": self.update or none,
        }
        object.__setattr__(self, "_of_kind", seconds)

    def seconds(self, task: Task) -> float:
        """The time that a task takes. With jitter, it depends on the seed and the task alone.

        So two orders of the same tasks meet the same noise.
        """
        mean = self._of_kind["FB" if task.beside else task.kind][task.stage]
        if not self.jitter or task.kind not in COMPUTE:
            return mean
        if task.beside:  # meets the noise of its halves
            alone = self.forward[task.stage] + self.backward[task.stage]
            return mean * sum(map(self.seconds, task.halves)) / alone
        return mean * random.Random(f"{self.seed} {task}").uniform(1 - self.jitter, 1 + self.jitter)

    def delay(self, task: Task, needed: Task) -> float:
        """From the end of `needed`, on another rank, to the time at which `task` can use its result."""
        if task.kind == "U":
            return self.norm
        return _of_edge(self.latency, min(task.stage, needed.stage))


def _of_edge(value: float | Sequence[float], edge: int) -> float:
    return value if isinstance(value, int | float) else value[edge]


class Span(NamedTuple):
    """When a task ran, in seconds since the start."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Run:
    """What a simulation found."""

    timelines: list[list[Span]]
    """What each rank did, in order."""

    @property
    def makespan(self) -> float:
        """Seconds from the start to the end of the last task."""
        return max(spans[-1].end for spans in self.timelines)

    @property
    def busy(self) -> list[float]:
        """Seconds that each rank spent in forwards and backwards, however slowly they ran."""
        return [sum(_busy(span) for span in spans) for spans in self.timelines]

    @property
    def step_seconds(self) -> float:
        """Seconds from one batch to the next once the pipeline runs evenly.

        Raises:
            ValueError: if a rank has fewer than three batches.
        """
        return max(_steady(spans)[1] for spans in self.timelines)

    @property
    def utilization(self) -> float:
        """The share of its time that a rank is busy once the pipeline runs evenly, the mean over ranks.

        Counted on each rank from its first forward of the middle batch to that of the last one, so that
        neither filling nor emptying the pipeline counts.

        Raises:
            ValueError: if a rank has fewer than three batches.
        """
        return sum(busy / seconds for busy, seconds in map(_steady, self.timelines)) / len(self.timelines)

    def peak_in_flight(self, sizes: Sequence[float] | None = None) -> list[float]:
        """The most that each rank holds for backwards to come, in microbatches.

        A stage holds a microbatch from the start of its forward to the end of its backward.

        Args:
            sizes: what a microbatch of each stage counts, bytes of activations for example, instead of 1.
        """
        return [_peak([span.task for span in spans], sizes) for spans in self.timelines]


def _busy(span: Span) -> float:
    return span.end - span.start if span.task.kind in COMPUTE else 0.0


def _steady(spans: Sequence[Span]) -> tuple[float, float]:
    """Busy and all seconds a batch, from the first forward of the middle batch to that of the last one."""
    first_forward: dict[int, int] = {}
    for position, span in enumerate(spans):
        if span.task.kind == "F":
            first_forward.setdefault(span.task.batch, position)
    batches = sorted(first_forward)
    if len(batches) < 3:
        raise ValueError(f"a steady state needs at least 3 batches, not {len(batches)}")
    middle, last = batches[len(batches) // 2], batches[-1]
    begin, end = first_forward[middle], first_forward[last]
    busy = sum(_busy(span) for span in spans[begin:end])
    return busy / (last - middle), (spans[end].start - spans[begin].start) / (last - middle)


def _peak(tasks: Sequence[Task], sizes: Sequence[float] | None) -> float:
    held: Counter[int] = Counter()
    peak = 0.0
    for task in (half for whole in tasks for half in whole.halves):
        if task.kind in ("F", "B", "W"):  # what a gradient of weights needs is held until then
            held[task.stage] += 1 if task.kind == "F" else -1
            # Summed anew, so that sizes which are no whole numbers do not add up errors.
            peak = max(peak, sum(n * (sizes[stage] if sizes else 1) for stage, n in held.items()))
    return peak


def inputs_of(task: Task, num_stages: int) -> list[Task]:
    """The tasks whose results a task needs. "B" stands for an "I" as well."""
    kind, stage, batch, microbatch, beside = task
    if beside is not None:
        return [needed for half in task.halves for needed in inputs_of(half, num_stages)]
    if kind == "F":
        return [Task("F", stage - 1, batch, microbatch)] if stage else []
    if kind in ("B", "I"):
        own = [Task("F", stage, batch, microbatch)]
        return own if stage == num_stages - 1 else [*own, Task("B", stage + 1, batch, microbatch)]
    if kind == "W":
        return [task._replace(kind="B")]
    if kind == "U":
        return [Task("R", each, batch, microbatch) for each in range(num_stages)]
    return []


def simulate(programs: Sequence[Sequence[Task]], timing: Timing) -> Run:
    """Run a schedule.

    Args:
        programs: each rank's tasks in its order. All tasks of a stage are in one rank's list.
        timing: with the times of as many stages as occur.

    Raises:
        ValueError: if some ranks wait for each other for ever; the message says for what.

    Examples:
        How busy four stages are whose backwards take twice as long as their forwards:

        >>> from titan_async.pipelining.programs import schedule_programs
        >>> timing = Timing(forward=[1.0] * 4, backward=[2.0] * 4)
        >>> for schedule in ("1F1B", "Async2BW"):
        ...     run = simulate(schedule_programs(schedule, 4, 8, n_batches=8), timing)
        ...     print(f"{schedule:8} {run.utilization:.3f}")
        1F1B     0.727
        Async2BW 1.000
    """
    return _Simulation(programs, timing).run()


class _Rank:
    """What a rank is doing."""

    def __init__(self, program: Sequence[Task]) -> None:
        self.program = program
        self.spans: list[Span] = []
        self.start = 0.0  # of the task that runs
        self.end = math.inf  # when it will end at its present speed; infinite while none runs
        self.left = 0.0  # of it, in seconds at full speed
        self.since = 0.0  # when that was so
        self.speed = 1.0
        self.lanes: dict[_Lane, float] = {}  # the shares of those that occupy this rank


@dataclass(eq=False)
class _Lane:
    """The messages of one direction between two ranks, one after another."""

    source: _Rank
    destination: _Rank
    latency: float
    share: float
    sending: int = 0  # what has been sent and has not arrived
    receiving: int = 0  # what has been posted and has not arrived
    posted: set[Task] = field(default_factory=set)  # receives, by the task that sends
    arrival: dict[Task, float] = field(default_factory=dict)  # of what is sent and posted
    last: float = 0.0  # of the arrivals


class _Simulation:
    """Goes from event to event: the end of a task, the arrival of a message, an input that is there."""

    def __init__(self, programs: Sequence[Sequence[Task]], timing: Timing) -> None:
        self._timing = timing
        self._ranks = [_Rank(program) for program in programs]
        self._rank_of = {task.stage: rank for rank in self._ranks for task in rank.program}
        self._num_stages = len(self._rank_of)
        self._ended: dict[Task, float] = {}
        self._waiting: dict[Task, list[_Rank]] = {}  # for a task's end
        self._events: list[tuple[float, int, _Rank | _Lane]] = []
        self._pushed = 0
        self._lanes: dict[tuple[str, int], _Lane] = {}  # by what is sent and from where
        self._posts: dict[Task, list[Task]] = {}  # whose results' receives are posted when a task starts
        for edge, ahead in enumerate(timing.receives_ahead):
            if ahead is not None and self._rank_of[edge] is not self._rank_of[edge + 1]:
                self._open("F", edge, edge + 1, ahead[0])
                self._open("B", edge + 1, edge, ahead[1])

    def _open(self, kind: str, source: int, destination: int, ahead: int) -> None:
        timing, edge, rank = self._timing, min(source, destination), self._rank_of[destination]
        latency, share = _of_edge(timing.latency, edge), _of_edge(timing.message_share, edge)
        self._lanes[kind, source] = _Lane(self._rank_of[source], rank, latency, share)
        kinds = "GF" if kind == "F" else "BI"
        tasks = [
            (task, half)
            for task in rank.program
            for half in task.halves
            if half.stage == destination and half.kind in kinds
        ]
        first = 0
        for index, (_, half) in enumerate(tasks):
            if half.kind == "G":
                first = index
                continue
            at = max(index - ahead, first)
            if index and tasks[index - 1][1].kind == "G":
                at = first
            if at < index:
                needed = inputs_of(half, self._num_stages)[-1]
                self._posts.setdefault(tasks[at][0], []).append(needed)

    def run(self) -> Run:
        for rank in self._ranks:
            self._try(rank, 0.0)
        while self._events:
            now, _, of = heappop(self._events)
            if isinstance(of, _Lane):
                self._arrive(of, now)
            elif of.end == now:
                self._finish(of, now)
            elif of.end == math.inf:
                self._try(of, now)
        waiting = [
            f"rank {number} cannot run {rank.program[len(rank.spans)]}"
            for number, rank in enumerate(self._ranks)
            if len(rank.spans) < len(rank.program)
        ]
        if waiting:
            raise ValueError(f"the ranks wait for each other: {', '.join(waiting)}")
        return Run([rank.spans for rank in self._ranks])

    def _push(self, time: float, of: _Rank | _Lane) -> None:
        self._pushed += 1
        heappush(self._events, (time, self._pushed, of))

    def _try(self, rank: _Rank, now: float) -> None:
        """Start a free rank's next task, or see to it that this is tried again when it may be possible."""
        if len(rank.spans) == len(rank.program):
            return
        task = rank.program[len(rank.spans)]
        inputs, start = inputs_of(task, self._num_stages), now
        lanes = [self._lane_to(rank, needed) for needed in inputs]
        for needed, lane in zip(inputs, lanes, strict=True):
            if lane is not None:
                self._post(lane, needed, now)
        for needed, lane in zip(inputs, lanes, strict=True):
            end = self._ended.get(needed)
            if end is None:
                self._waiting.setdefault(needed, []).append(rank)
                return
            if lane is not None:
                end = lane.arrival[needed]
            elif self._rank_of[needed.stage] is not rank or task.kind == "U":
                end += self._timing.delay(task, needed)
            if end > start:
                start = end
        if start > now and self._lanes:  # until then messages may come and go
            self._push(start, rank)
            return
        for needed in self._posts.get(task, ()):
            self._post(self._lanes[needed[:2]], needed, now)
        rank.start = rank.since = start
        rank.left = self._timing.seconds(task)
        self._go_on(rank, task)

    def _lane_to(self, rank: _Rank, needed: Task) -> _Lane | None:
        """The one in which a task's result comes to a rank, if messages occupy ranks."""
        return None if self._rank_of[needed.stage] is rank else self._lanes.get(needed[:2])

    def _go_on(self, rank: _Rank, task: Task) -> None:
        """Let the rest of a task run at the speed that the messages under way leave."""
        rank.speed = 1.0
        if rank.lanes and task.kind not in ("G", "R"):
            rank.speed -= sum(rank.lanes.values())
            if rank.speed <= 0:
                raise ValueError(f"messages take all processors while a rank runs {task}: lower their share")
        rank.end = rank.since + rank.left / rank.speed
        self._push(rank.end, rank)

    def _finish(self, rank: _Rank, now: float) -> None:
        task = rank.program[len(rank.spans)]
        rank.spans.append(Span(task, rank.start, now))
        rank.end = math.inf
        ended = [half._replace(kind="B") if half.kind == "I" else half for half in task.halves]
        for half in ended:
            self._ended[half] = now
            lane = self._lanes.get(half[:2])
            if lane is not None:
                lane.sending += 1
                rank.lanes[lane] = lane.share
                self._connect(lane, half, now)
        for other in [other for half in ended for other in self._waiting.pop(half, ())]:
            self._try(other, now)
        self._try(rank, now)

    def _post(self, lane: _Lane, needed: Task, now: float) -> None:
        """Post the receive of a task's result, once."""
        if needed not in lane.posted:
            lane.posted.add(needed)
            lane.receiving += 1
            lane.destination.lanes[lane] = lane.share
            self._connect(lane, needed, now)

    def _connect(self, lane: _Lane, needed: Task, now: float) -> None:
        if needed in lane.posted and needed in self._ended:
            lane.last = lane.arrival[needed] = max(now, lane.last) + lane.latency
            self._push(lane.last, lane)

    def _arrive(self, lane: _Lane, now: float) -> None:
        """A message is there, and its two ends are free of it."""
        lane.sending -= 1
        lane.receiving -= 1
        if not lane.sending:
            del lane.source.lanes[lane]
        if not lane.receiving:  # at the same time the next one may have been posted
            del lane.destination.lanes[lane]
        for rank in (lane.source, lane.destination):
            if rank.end < math.inf:
                rank.left = max(rank.left - (now - rank.since) * rank.speed, 0.0)
                rank.since = now
                self._go_on(rank, rank.program[len(rank.spans)])
