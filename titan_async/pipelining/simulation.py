"""How long a pipeline takes, from the order of work of its ranks: a small deterministic simulation.

A schedule is given as one list of tasks a rank, which the rank runs in that order, each as soon as its input
is there. All times are in the same unit, seconds say. A message takes `latency` from one rank to another and
occupies neither of them; receives are taken to be posted in time, and links to carry any number of messages.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from titan_async.pipelining.actions import drain_actions, step_actions

__all__ = ["Run", "Task", "Timing", "async_2bw_programs", "inputs_of", "simulate"]


class Task(NamedTuple):
    """The forward ("F") or backward ("B") of one microbatch on one stage."""

    kind: Literal["F", "B"]
    stage: int
    batch: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.batch}.{self.microbatch} of stage {self.stage}"


@dataclass(frozen=True)
class Timing:
    """How long things take, in seconds."""

    forward: Sequence[float]
    """Of one microbatch, for each stage."""
    backward: Sequence[float]
    latency: float = 0.0
    """Of a message between two ranks."""
    boundary: float = 0.0
    """What a rank spends before its first forward of each batch but its first: the update."""
    jitter: float = 0.0
    """Half the width of the uniform distribution of a task's time, as a part of its mean."""
    seed: int = 0

    def seconds(self, task: Task) -> float:
        """The time that a task takes. With jitter, it depends on the seed and the task alone.

        So two orders of the same tasks meet the same noise.
        """
        mean = (self.forward if task.kind == "F" else self.backward)[task.stage]
        if not self.jitter:
            return mean
        return mean * random.Random(f"{self.seed} {task}").uniform(1 - self.jitter, 1 + self.jitter)


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
        return [sum(span.end - span.start for span in spans) for spans in self.timelines]

    @property
    def utilization(self) -> float:
        """The share of its time that a rank is busy once the pipeline runs evenly, the mean over ranks.

        Counted on each rank from its first forward of the middle batch to that of the last one, so that
        neither filling nor emptying the pipeline counts.

        Raises:
            ValueError: if a rank has fewer than three batches.
        """
        return sum(map(_steady_utilization, self.timelines)) / len(self.timelines)

    def peak_in_flight(self, sizes: Sequence[float] | None = None) -> list[float]:
        """The most that each rank holds for backwards to come, in microbatches.

        A stage holds a microbatch from the start of its forward to the end of its backward.

        Args:
            sizes: what a microbatch of each stage counts, bytes of activations for example, instead of 1.
        """
        return [_peak([span.task for span in spans], sizes) for spans in self.timelines]


def _steady_utilization(spans: Sequence[Span]) -> float:
    first_forward: dict[int, int] = {}
    for position, span in enumerate(spans):
        if span.task.kind == "F":
            first_forward.setdefault(span.task.batch, position)
    batches = sorted(first_forward)
    if len(batches) < 3:
        raise ValueError(f"a steady state needs at least 3 batches, not {len(batches)}")
    begin, end = first_forward[batches[len(batches) // 2]], first_forward[batches[-1]]
    busy = sum(span.end - span.start for span in spans[begin:end])
    return busy / (spans[end].start - spans[begin].start)


def _peak(tasks: Sequence[Task], sizes: Sequence[float] | None) -> float:
    held: Counter[int] = Counter()
    peak = 0.0
    for task in tasks:
        held[task.stage] += 1 if task.kind == "F" else -1
        # Summed anew, so that sizes which are no whole numbers do not add up errors.
        peak = max(peak, sum(n * (sizes[stage] if sizes else 1) for stage, n in held.items()))
    return peak


def inputs_of(task: Task, num_stages: int) -> list[Task]:
    """The tasks whose results a task needs."""
    if task.kind == "F":
        return [task._replace(stage=task.stage - 1)] if task.stage else []
    own = [task._replace(kind="F")]
    return own if task.stage == num_stages - 1 else [*own, task._replace(stage=task.stage + 1)]


def simulate(programs: Sequence[Sequence[Task]], timing: Timing) -> Run:
    """Run a schedule.

    Args:
        programs: each rank's tasks in its order. All tasks of a stage are in one rank's list.
        timing: with the times of as many stages as occur.

    Raises:
        ValueError: if some ranks wait for each other for ever; the message says for what.
    """
    rank_of = {task.stage: rank for rank, program in enumerate(programs) for task in program}
    ended: dict[Task, float] = {}
    timelines: list[list[Span]] = [[] for _ in programs]
    newest = [program[0].batch if program else 0 for program in programs]
    free = [0.0 for _ in programs]
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(programs):
            for task in program[len(timelines[rank]) :]:
                inputs = inputs_of(task, len(rank_of))
                if any(needed not in ended for needed in inputs):
                    break
                if task.kind == "F" and task.batch > newest[rank]:
                    newest[rank] = task.batch
                    free[rank] += timing.boundary
                arrivals = [
                    ended[needed] + (timing.latency if rank_of[needed.stage] != rank else 0.0)
                    for needed in inputs
                ]
                start = max([free[rank], *arrivals])
                free[rank] = ended[task] = start + timing.seconds(task)
                timelines[rank].append(Span(task, start, free[rank]))
                progress = True
    waiting = [
        f"rank {rank} cannot run {program[len(spans)]}"
        for rank, (program, spans) in enumerate(zip(programs, timelines, strict=True))
        if len(spans) < len(program)
    ]
    if waiting:
        raise ValueError(f"the ranks wait for each other: {', '.join(waiting)}")
    return Run(timelines)


def async_2bw_programs(
    num_stages: int, n_microbatches: int, n_batches: int, lookahead: int = 0
) -> list[list[Task]]:
    """What the stages of `ScheduleAsync2BW`, one a rank, do in `n_batches` steps and a drain."""
    programs = []
    for stage in range(num_stages):
        actions = [
            action
            for batch in range(n_batches)
            for action in step_actions(stage, num_stages, n_microbatches, batch, lookahead)
        ]
        actions += drain_actions(stage, num_stages, n_microbatches, n_batches - 1, lookahead)
        programs.append([Task(kind, stage, batch, microbatch) for kind, batch, microbatch in actions])
    return programs
