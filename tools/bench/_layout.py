"""Several stages of equal cost on every rank, and bounds for any order of their tasks."""

import math
from dataclasses import dataclass

from titan_async.pipelining.simulation import Task, Timing

__all__ = ["BACKWARD", "FORWARD", "PAIR", "Layout", "least_peak", "most_utilization"]

FORWARD, BACKWARD = 4800, 9600
PAIR = FORWARD + BACKWARD
"""A rank's forward and backward of a microbatch, all of its stages together, in ticks: whole numbers, so that
times which are equal compare equal."""


@dataclass(frozen=True)
class Layout:
    """Where the stages are: `per_rank` on each of `ranks`, all of the same cost."""

    ranks: int
    per_rank: int = 1
    v_shaped: bool = False
    """Whether the stages run down the ranks and up again; otherwise they start again at the first rank."""

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
        """Of one microbatch, activations and gradients."""
        ranks = [self.rank_of(task.stage) for task in self.path]
        return sum(a != b for a, b in zip(ranks, ranks[1:], strict=False))

    def timing(self, latency: float, jitter: float = 0.0, seed: int = 0) -> Timing:
        """Ticks, for a latency that is given as a part of a pair.

        Jitter is that of a rank's forward or backward: stages that are smaller vary by more, so that their
        sum varies as much.
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
    """A bound that no order at full utilization can go below: the largest peak of a rank, in activations.

    Activations of a microbatch on a whole rank count 1. A rank holds, on average, what it would hold if no
    microbatch ever waited; its peak is a multiple of a stage's part.
    """
    v, held = layout.per_rank, [0.0] * layout.ranks
    finish = 0.0
    for stage in reversed(range(layout.stages)):
        hop = layout.rank_of(stage) != layout.rank_of(min(stage + 1, layout.stages - 1))
        finish += 1 / v + 2 * latency * hop
        held[layout.rank_of(stage)] += finish / v
    return max(math.ceil(round(h * v, 6)) / v for h in held)


def most_utilization(layout: Layout, latency: float, microbatches: int) -> float:
    """A bound for any order with at most `microbatches` in flight (Little's law)."""
    return min(1.0, microbatches / (layout.ranks + layout.messages * latency))
