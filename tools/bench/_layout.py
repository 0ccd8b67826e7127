"""Several stages of equal cost on every rank, and bounds for any order of their tasks."""

import math
from dataclasses import dataclass

from titan_async.pipelining.simulation import Task, Timing

__all__ = ["BACKWARD", "FORWARD", "PAIR", "Layout", "least_peak", "most_utilization"]

FORWARD, BACKWARD = 4800, 9600
PAIR = FORWARD + BACKWARD
"""A rank's forward and backward of a microbatch, over all its stages, in integer ticks, so that equal times
compare equal."""


@dataclass(frozen=True)
class Layout:
    """A placement of stages of equal cost, `per_rank` on each of `ranks`."""

    ranks: int
    per_rank: int = 1
    v_shaped: bool = False
    """Whether the second stages are on the ranks in reverse order; otherwise all are in the same order."""

    @property
    def stages(self) -> int:
        return self.ranks * self.per_rank

    def rank_of(self, stage: int) -> int:
        turn, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.v_shaped and turn % 2 else place

    @property
    def path(self) -> list[Task]:
        """The tasks of one microbatch, in order."""
        stages = range(self.stages)
        return [Task("F", s, 0, 0) for s in stages] + [Task("B", s, 0, 0) for s in reversed(stages)]

    @property
    def messages(self) -> int:
        """Number of messages per microbatch, activations and gradients."""
        ranks = [self.rank_of(task.stage) for task in self.path]
        return sum(a != b for a, b in zip(ranks, ranks[1:], strict=False))

    def timing(self, latency: float, jitter: float = 0.0, seed: int = 0) -> Timing:
        """Durations in ticks; `latency` is relative to `PAIR`.

        `jitter` is that of a rank's forward or backward: several stages vary more, so that their sum varies
        as much.
        """
        v = self.per_rank
        return Timing(
            [FORWARD / v] * self.stages,
            [BACKWARD / v] * self.stages,
            latency=latency * PAIR,
            jitter=jitter * math.sqrt(v),
            seed=seed,
        )


def least_peak(layout: Layout, latency: float) -> float:
    """A lower bound of the largest peak of a rank, in activations, for any order at full utilization.

    Activations of a microbatch on all stages of a rank count 1. On average a rank holds at least as many as
    if no microbatch ever waited; its peak is a multiple of a stage's part.
    """
    v, held = layout.per_rank, [0.0] * layout.ranks
    finish = 0.0
    for stage in reversed(range(layout.stages)):
        hop = layout.rank_of(stage) != layout.rank_of(min(stage + 1, layout.stages - 1))
        finish += 1 / v + 2 * latency * hop
        held[layout.rank_of(stage)] += finish / v
    return max(math.ceil(round(h * v, 6)) / v for h in held)


def most_utilization(layout: Layout, latency: float, microbatches: int) -> float:
    """An upper bound for any order with at most `microbatches` in flight (Little's law)."""
    return min(1.0, microbatches / (layout.ranks + layout.messages * latency))
