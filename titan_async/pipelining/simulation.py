"""Step time of a pipeline, from the order of tasks on its ranks: a small deterministic simulation.

A schedule is given as one list of tasks per rank, which the rank runs in that order, each as soon as its
input is available. All times are in the same unit, such as seconds. A message takes `latency` from one rank
to another. By default receives are posted in time, and transfers are assumed not to block compute. With NCCL
both ends of a transfer are kernels that occupy processors of their ranks until the message has arrived: see
`Timing.receives_ahead`.

To include updates, a batch has "R" and "U" tasks: the reduction of a stage's gradient, after which its share
of the norm is reduced, and clip and update, which wait for the shares of all stages.
`titan_async.pipelining.programs` has such lists for every schedule.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal, NamedTuple

__all__ = ["COMPUTE", "Kind", "Run", "Task", "Timing", "inputs_of", "simulate"]

Kind = Literal["F", "B", "I", "W", "G", "R", "U"]
"""Forward and backward of a microbatch; split backwards are the gradients of the input ("I") and of the
weights ("W"). Of a batch: gathering the weights, reducing the gradient, updating."""

COMPUTE = ("F", "B", "I", "W")
"""The kinds that count as busy; a batch has at most one of each of the others, as microbatch 0."""


class Task(NamedTuple):
    """A task of one stage, for one microbatch or, with "G", "R" and "U", for one batch."""

    kind: Kind
    stage: int
    batch: int
    microbatch: int
    overlapped: "Task | None" = None
    """The backward that runs together with this forward: an overlapped pair."""

    def __str__(self) -> str:
        names = [f"{kind}{batch}.{microbatch}" for kind, _, batch, microbatch, _ in self.halves]
        return f"{' with '.join(names)} of stage {self.stage}"

    @property
    def halves(self) -> "tuple[Task, ...]":
        """The forward and the backward of a pair; of any other task the task itself."""
        return (self,) if self.overlapped is None else (self._replace(overlapped=None), self.overlapped)


@dataclass(frozen=True)
class Timing:
    """Durations in seconds. Sequences have one entry per stage."""

    forward: Sequence[float]
    """Of one microbatch."""
    backward: Sequence[float]
    pair: Sequence[float] = ()
    """Of an overlapped pair, by default the sum of its forward and its backward."""
    weight_gradient: Sequence[float] | None = None
    """The part of a split backward in "W"; "I" takes the rest. Default: half."""
    latency: float | Sequence[float] = 0.0
    """Of a message between two ranks, from when it is sent and its receive is posted; a sequence has one
    entry per pair of neighboring stages."""
    receives_ahead: Sequence[tuple[int, int] | None] = ()
    """When ranks post receives of activations and of gradients, per pair of neighboring stages. 0: when the
    rank is free for the task. 1: when it starts the previous task of the same kind, and so on; for forwards
    not before the "G" of their batch, and for the first one then at the latest. None, the default: before the
    message is sent, at no cost."""
    message_share: float | Sequence[float] = 0.0
    """Share of a rank's speed that each direction takes while a posted receive is pending, or a sent message
    has not arrived, per pair of neighboring stages. Gathers and reductions are not slowed down."""
    gather: Sequence[float] = ()
    """Of a "G"; 0 by default, like the following."""
    reduction: Sequence[float] = ()
    """Of an "R"."""
    update: Sequence[float] = ()
    """Of a "U"."""
    norm: float = 0.0
    """From the last "R" of all stages until the all-reduce of the norm is done."""
    jitter: float = 0.0
    """Half the width of the uniform distribution of a computation's time, relative to its mean."""
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
        """The time of a task. With jitter it depends on the seed and the task only, not on the order."""
        mean = self._of_kind["FB" if task.overlapped else task.kind][task.stage]
        if not self.jitter or task.kind not in COMPUTE:
            return mean
        if task.overlapped:  # with the jitter of its halves
            alone = self.forward[task.stage] + self.backward[task.stage]
            return mean * sum(map(self.seconds, task.halves)) / alone
        return mean * random.Random(f"{self.seed} {task}").uniform(1 - self.jitter, 1 + self.jitter)

    def delay(self, task: Task, needed: Task) -> float:
        """From the end of `needed`, on another rank, until `task` can use its result."""
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
    """The result of a simulation."""

    timelines: list[list[Span]]
    """The spans of each rank, in order."""

    @property
    def makespan(self) -> float:
        """Seconds from the start to the end of the last task."""
        return max(spans[-1].end for spans in self.timelines)

    @property
    def busy(self) -> list[float]:
        """Seconds of each rank in forwards and backwards, slowdown included."""
        return [sum(_busy(span) for span in spans) for spans in self.timelines]

    @property
    def step_seconds(self) -> float:
        """Seconds from one batch to the next in the steady state.

        Raises:
            ValueError: if a rank has fewer than three batches.
        """
        return max(_steady(spans)[1] for spans in self.timelines)

    @property
    def utilization(self) -> float:
        """The share of its time that a rank is busy in the steady state, the mean over ranks.

        Measured on each rank from its first forward of the middle batch to that of the last one, without the
        warm-up and cool-down of the pipeline.

        Raises:
            ValueError: if a rank has fewer than three batches.
        """
        return sum(busy / seconds for busy, seconds in map(_steady, self.timelines)) / len(self.timelines)

    def peak_in_flight(self, sizes: Sequence[float] | None = None) -> list[float]:
        """Peak of the microbatches in flight on each rank: from the start of a forward to the end of its
        backward.

        Args:
            sizes: of a microbatch on each stage, such as bytes of activations, instead of 1.
        """
        return [_peak([span.task for span in spans], sizes) for spans in self.timelines]


def _busy(span: Span) -> float:
    return span.end - span.start if span.task.kind in COMPUTE else 0.0


def _steady(spans: Sequence[Span]) -> tuple[float, float]:
    """Busy and total seconds per batch, from the first forward of the middle batch to the last one's."""
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
        if task.kind in ("F", "B", "W"):  # split backwards hold activations until "W"
            held[task.stage] += 1 if task.kind == "F" else -1
            # Summed from scratch, so that rounding errors do not accumulate.
            peak = max(peak, sum(n * (sizes[stage] if sizes else 1) for stage, n in held.items()))
    return peak


def inputs_of(task: Task, num_stages: int) -> list[Task]:
    """The tasks whose results a task needs. "B" also stands for "I"."""
    kind, stage, batch, microbatch, overlapped = task
    if overlapped is not None:
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
        ValueError: if ranks deadlock; the message names the tasks.

    Examples:
        Utilization of four stages whose backwards take twice as long as their forwards:

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
    """The state of a rank."""

    def __init__(self, program: Sequence[Task]) -> None:
        self.program = program
        self.spans: list[Span] = []
        self.start = 0.0  # of the running task
        self.end = math.inf  # of the running task at the current speed; infinite if none runs
        self.left = 0.0  # remaining, in seconds at full speed
        self.since = 0.0  # when `left` was computed
        self.speed = 1.0
        self.channels: dict[_Channel, float] = {}  # shares of those that occupy this rank


@dataclass(eq=False)
class _Channel:
    """The messages of one direction between two ranks, in order."""

    source: _Rank
    destination: _Rank
    latency: float
    share: float
    sending: int = 0  # sent messages that have not arrived
    receiving: int = 0  # posted receives that have not arrived
    posted: set[Task] = field(default_factory=set)  # receives, by the task that sends
    arrival: dict[Task, float] = field(default_factory=dict)  # of messages that are sent and posted
    last: float = 0.0  # arrival


class _Simulation:
    """Processes events in order: ends of tasks, arrivals of messages, inputs that become available."""

    def __init__(self, programs: Sequence[Sequence[Task]], timing: Timing) -> None:
        self._timing = timing
        self._ranks = [_Rank(program) for program in programs]
        self._rank_of = {task.stage: rank for rank in self._ranks for task in rank.program}
        self._num_stages = len(self._rank_of)
        self._ended: dict[Task, float] = {}
        self._waiting: dict[Task, list[_Rank]] = {}  # for the end of a task
        self._events: list[tuple[float, int, _Rank | _Channel]] = []
        self._pushed = 0
        self._channels: dict[tuple[str, int], _Channel] = {}  # by kind and source stage
        # Receives to post when a task starts, by the tasks that send.
        self._posts: dict[Task, list[Task]] = {}
        for edge, ahead in enumerate(timing.receives_ahead):
            if ahead is not None and self._rank_of[edge] is not self._rank_of[edge + 1]:
                self._open("F", edge, edge + 1, ahead[0])
                self._open("B", edge + 1, edge, ahead[1])

    def _open(self, kind: str, source: int, destination: int, ahead: int) -> None:
        timing, edge, rank = self._timing, min(source, destination), self._rank_of[destination]
        latency, share = _of_edge(timing.latency, edge), _of_edge(timing.message_share, edge)
        self._channels[kind, source] = _Channel(self._rank_of[source], rank, latency, share)
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
            self._start_next(rank, 0.0)
        while self._events:
            now, _, of = heappop(self._events)
            if isinstance(of, _Channel):
                self._arrive(of, now)
            elif of.end == now:
                self._finish(of, now)
            elif of.end == math.inf:
                self._start_next(of, now)
        waiting = [
            f"rank {number} cannot run {rank.program[len(rank.spans)]}"
            for number, rank in enumerate(self._ranks)
            if len(rank.spans) < len(rank.program)
        ]
        if waiting:
            raise ValueError(f"the ranks wait for each other: {', '.join(waiting)}")
        return Run([rank.spans for rank in self._ranks])

    def _push(self, time: float, of: _Rank | _Channel) -> None:
        self._pushed += 1
        heappush(self._events, (time, self._pushed, of))

    def _start_next(self, rank: _Rank, now: float) -> None:
        """Start the next task of an idle rank, or retry when its input may be available."""
        if len(rank.spans) == len(rank.program):
            return
        task = rank.program[len(rank.spans)]
        inputs, start = inputs_of(task, self._num_stages), now
        channels = [self._channel_to(rank, needed) for needed in inputs]
        for needed, channel in zip(inputs, channels, strict=True):
            if channel is not None:
                self._post(channel, needed, now)
        for needed, channel in zip(inputs, channels, strict=True):
            end = self._ended.get(needed)
            if end is None:
                self._waiting.setdefault(needed, []).append(rank)
                return
            if channel is not None:
                end = channel.arrival[needed]
            elif self._rank_of[needed.stage] is not rank or task.kind == "U":
                end += self._timing.delay(task, needed)
            if end > start:
                start = end
        if start > now and self._channels:  # other messages may arrive until then
            self._push(start, rank)
            return
        for needed in self._posts.get(task, ()):
            self._post(self._channels[needed[:2]], needed, now)
        rank.start = rank.since = start
        rank.left = self._timing.seconds(task)
        self._resume(rank, task)

    def _channel_to(self, rank: _Rank, needed: Task) -> _Channel | None:
        """The channel of a task's result to a rank, if messages occupy ranks."""
        return None if self._rank_of[needed.stage] is rank else self._channels.get(needed[:2])

    def _resume(self, rank: _Rank, task: Task) -> None:
        """Run the rest of a task at the speed that pending messages leave."""
        rank.speed = 1.0
        if rank.channels and task.kind not in ("G", "R"):
            rank.speed -= sum(rank.channels.values())
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
            channel = self._channels.get(half[:2])
            if channel is not None:
                channel.sending += 1
                rank.channels[channel] = channel.share
                self._connect(channel, half, now)
        for other in [other for half in ended for other in self._waiting.pop(half, ())]:
            self._start_next(other, now)
        self._start_next(rank, now)

    def _post(self, channel: _Channel, needed: Task, now: float) -> None:
        """Post the receive of a task's result, unless it is posted."""
        if needed not in channel.posted:
            channel.posted.add(needed)
            channel.receiving += 1
            channel.destination.channels[channel] = channel.share
            self._connect(channel, needed, now)

    def _connect(self, channel: _Channel, needed: Task, now: float) -> None:
        if needed in channel.posted and needed in self._ended:
            channel.last = channel.arrival[needed] = max(now, channel.last) + channel.latency
            self._push(channel.last, channel)

    def _arrive(self, channel: _Channel, now: float) -> None:
        """A message has arrived; it no longer occupies its ranks."""
        channel.sending -= 1
        channel.receiving -= 1
        if not channel.sending:
            del channel.source.channels[channel]
        if not channel.receiving:  # the next one may have been posted at the same time
            del channel.destination.channels[channel]
        for rank in (channel.source, channel.destination):
            if rank.end < math.inf:
                rank.left = max(rank.left - (now - rank.since) * rank.speed, 0.0)
                rank.since = now
                self._resume(rank, rank.program[len(rank.spans)])
