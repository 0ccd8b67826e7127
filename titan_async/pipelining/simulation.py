"""How long a pipeline takes, from the order of work of its ranks: a small deterministic simulation.

A schedule is given as one list of tasks a rank, which the rank runs in that order, each as soon as its input
is there. All times are in the same unit, seconds say. A message takes `latency` from one rank to another and
occupies neither of them; receives are taken to be posted in time, and links to carry any number of messages.

Where an update is to be part of it, a batch has "R" and "U" tasks too: the reduction of a stage's gradient,
with which its share of the gradient's norm starts on its way, and the clip and update, which wait for the
norms of all stages. `titan_async.pipelining.programs` has such lists for every schedule.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

__all__ = ["COMPUTE", "Kind", "Run", "Task", "Timing", "inputs_of", "simulate"]

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

    def __str__(self) -> str:
        return f"{self.kind}{self.batch}.{self.microbatch} of stage {self.stage}"


@dataclass(frozen=True)
class Timing:
    """How long things take, in seconds. Sequences have one entry for each stage."""

    forward: Sequence[float]
    """Of one microbatch."""
    backward: Sequence[float]
    weight_gradient: Sequence[float] | None = None
    """The part of a backward that "W" takes where it is in two halves; "I" takes the rest. Default: half."""
    latency: float | Sequence[float] = 0.0
    """Of a message between two ranks; in a sequence, of those between a stage and the next, whatever their
    size."""
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
        mean = self._of_kind[task.kind][task.stage]
        if not self.jitter or task.kind not in COMPUTE:
            return mean
        return mean * random.Random(f"{self.seed} {task}").uniform(1 - self.jitter, 1 + self.jitter)

    def delay(self, task: Task, needed: Task) -> float:
        """From the end of `needed`, on another rank, to the time at which `task` can use its result."""
        if task.kind == "U":
            return self.norm
        if isinstance(self.latency, Sequence):
            return self.latency[min(task.stage, needed.stage)]
        return self.latency


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
        """Seconds that each rank spent in forwards and backwards."""
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
    for task in tasks:
        if task.kind in ("F", "B", "W"):  # what a gradient of weights needs is held until then
            held[task.stage] += 1 if task.kind == "F" else -1
            # Summed anew, so that sizes which are no whole numbers do not add up errors.
            peak = max(peak, sum(n * (sizes[stage] if sizes else 1) for stage, n in held.items()))
    return peak


def inputs_of(task: Task, num_stages: int) -> list[Task]:
    """The tasks whose results a task needs. "B" stands for an "I" as well."""
    if task.kind == "F":
        return [task._replace(stage=task.stage - 1)] if task.stage else []
    if task.kind in ("B", "I"):
        own = [task._replace(kind="F")]
        return own if task.stage == num_stages - 1 else [*own, task._replace(kind="B", stage=task.stage + 1)]
    if task.kind == "W":
        return [task._replace(kind="B")]
    if task.kind == "U":
        return [task._replace(kind="R", stage=stage) for stage in range(num_stages)]
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
    rank_of = {task.stage: rank for rank, program in enumerate(programs) for task in program}
    ended: dict[Task, float] = {}
    timelines: list[list[Span]] = [[] for _ in programs]
    free = [0.0 for _ in programs]
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(programs):
            spans = timelines[rank]
            while len(spans) < len(program):
                task = program[len(spans)]
                start = free[rank]
                for needed in inputs_of(task, len(rank_of)):
                    end = ended.get(needed)
                    if end is None:
                        break
                    if task.kind == "U" or rank_of[needed.stage] != rank:
                        end += timing.delay(task, needed)
                    start = max(start, end)
                else:
                    free[rank] = start + timing.seconds(task)
                    ended[task._replace(kind="B") if task.kind == "I" else task] = free[rank]
                    spans.append(Span(task, start, free[rank]))
                    progress = True
                    continue
                break
    waiting = [
        f"rank {rank} cannot run {program[len(spans)]}"
        for rank, (program, spans) in enumerate(zip(programs, timelines, strict=True))
        if len(spans) < len(program)
    ]
    if waiting:
        raise ValueError(f"the ranks wait for each other: {', '.join(waiting)}")
    return Run(timelines)
