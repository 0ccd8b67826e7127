"""Orders of tasks that repeat with every microbatch, for several stages per rank, from a local search.

Each rank runs the tasks of one period in a fixed cyclic order, every microbatch one period after the previous
one; a microbatch waits for the next free slot. No rank is ever idle, and the search minimizes activations.
With one stage per rank it finds the order of Async2BW.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from _layout import BACKWARD, FORWARD, PAIR, Layout

from titan_async.pipelining.simulation import Task

__all__ = ["Order", "find_order"]


@dataclass(frozen=True)
class Order:
    """A periodic order of tasks."""

    layout: Layout
    starts: tuple[int, ...]
    """The start of each task of `layout.path` for microbatch 0, in ticks."""

    def programs(self, microbatches: int, batches: int) -> list[list[Task]]:
        """Each rank's tasks, for `simulate`."""
        timed: list[list[tuple[int, Task]]] = [[] for _ in range(self.layout.ranks)]
        for number in range(microbatches * batches):
            batch, microbatch = divmod(number, microbatches)
            for start, task in zip(self.starts, self.layout.path, strict=True):
                moved = task._replace(batch=batch, microbatch=microbatch)
                timed[self.layout.rank_of(task.stage)].append((start + number * PAIR, moved))
        return [[task for _, task in sorted(tasks)] for tasks in timed]


def find_order(layout: Layout, latency: float, microbatches: int, tries: int = 6000) -> Order | None:
    """The order with the lowest peak that a local search finds, or None.

    A microbatch may be in flight for `microbatches` periods, so that as many are in flight at a time. The
    search uses simulated annealing from four random orders, with fixed seeds.
    """
    search = _Search(layout, round(latency * PAIR), microbatches)
    found = [search.anneal(random.Random(seed), tries // 4) for seed in range(4)]
    best = min((state for state in found if state is not None), default=None)
    return Order(layout, best[1]) if best else None


class _Search:
    def __init__(self, layout: Layout, latency: int, microbatches: int) -> None:
        self.layout, self.most = layout, microbatches * PAIR
        path = layout.path
        self.length = len(path)
        self.ranks = [layout.rank_of(task.stage) for task in path]
        part = {"F": FORWARD // layout.per_rank, "B": BACKWARD // layout.per_rank}
        self.ticks = [part[task.kind] for task in path]
        # From a task's start to the earliest start of the following one.
        self.gaps = [
            self.ticks[i] + (latency if self.ranks[i] != self.ranks[(i + 1) % self.length] else 0)
            for i in range(self.length)
        ]
        self.own = [[i for i in range(self.length) if self.ranks[i] == r] for r in range(layout.ranks)]

    def anneal(self, rng: random.Random, tries: int) -> tuple[tuple[float, float], tuple[int, ...]] | None:
        """The best (peak, mean of activations) and its starts."""
        orders = [rng.sample(own, len(own)) for own in self.own]
        offsets = [rng.randrange(0, PAIR, FORWARD // 8) for _ in orders]
        starts = self._trace(orders, offsets)
        energy, _ = self._cost(starts)
        best = None
        for attempt in range(tries):
            rank = rng.randrange(len(orders))
            before = orders[rank][:], offsets[rank]
            if rng.random() < 0.5:
                i, j = rng.sample(range(len(orders[rank])), 2)
                orders[rank][i], orders[rank][j] = orders[rank][j], orders[rank][i]
            if rng.random() < 0.7:
                offsets[rank] = (offsets[rank] + self._fitting_shift(rng, rank, orders, offsets)) % PAIR
            starts = self._trace(orders, offsets)
            new, value = self._cost(starts)
            temperature = 0.125 * (1 - attempt / tries) + 1e-4
            if new <= energy or rng.random() < math.exp((energy - new) / temperature):
                energy = new
                if value is not None and (best is None or value < best[0]):
                    best = value, tuple(starts)
            else:
                orders[rank], offsets[rank] = before
        return best

    def _fitting_shift(
        self, rng: random.Random, rank: int, orders: Sequence[list[int]], offsets: Sequence[int]
    ) -> int:
        """A shift of a rank with which one of its tasks, or the following task, starts without a wait."""
        starts, task = self._trace(orders, offsets), rng.choice(self.own[rank])
        if task and rng.random() < 0.5:
            return starts[task - 1] + self.gaps[task - 1] - starts[task]
        if task < self.length - 1:
            return starts[task + 1] - starts[task] - self.gaps[task]
        return 0

    def _trace(self, orders: Sequence[list[int]], offsets: Sequence[int]) -> list[int]:
        """The start of each task of microbatch 0, at the earliest possible slots."""
        slots = [0] * self.length
        for order, now in zip(orders, offsets, strict=True):
            for task in order:
                slots[task] = now
                now += self.ticks[task]
        starts = [slots[0]]
        for task in range(1, self.length):
            earliest = starts[-1] + self.gaps[task - 1]
            starts.append(earliest + (slots[task] - earliest) % PAIR)
        return starts

    def _cost(self, starts: Sequence[int]) -> tuple[float, tuple[float, float] | None]:
        """The energy; and (peak, mean), or None if a microbatch is in flight for too long."""
        v, stages, peak, total = self.layout.per_rank, self.layout.stages, 0, 0
        for own in self.own:
            held = [
                (starts[i], starts[self.length - 1 - i] + self.ticks[self.length - 1 - i])
                for i in own
                if i < stages
            ]
            total += sum(end - begin for begin, end in held)
            for now, _ in held:
                count = sum((now - begin) // PAIR - (now - end) // PAIR for begin, end in held)
                peak = max(peak, count)
        mean = total / PAIR / v / self.layout.ranks
        late = max(0, starts[-1] + self.ticks[-1] - starts[0] - self.most) / PAIR
        return peak / v + 0.2 * mean + 2 * late, None if late else (peak / v, mean)
