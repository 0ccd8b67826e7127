"""Processes that stay up for a whole session of tests and run one function after another under gloo."""

import os
from collections.abc import Callable
from typing import Any

from tests.support.forks import context
from tools.bench._pool import Pool

__all__ = ["Pools", "WorkerPool"]


def _make_groups(world_size: int, sizes: list[int]) -> dict[int, Any]:
    """A group for each size. All ranks make each: torch names a group by the number of those made before."""
    import torch.distributed as dist

    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(dist.get_rank()), str(world_size)
    groups: dict[int, Any] = {size: dist.new_group(list(range(size))) for size in sizes[:-1]}
    return groups | {world_size: dist.group.WORLD}


class WorkerPool(Pool):
    """`world_size` gloo processes that start anew after `most_calls`, or when some of them did not answer.

    What is left behind in them, such as groups that nobody destroys, each with a thread that wakes a hundred
    times a second, would in the end take more of the processor than the tests.
    """

    def __init__(self, world_size: int, most_calls: int) -> None:
        super().__init__(list(range(1, world_size + 1)), context(), _make_groups)
        self._most_calls = most_calls
        self._calls, self._is_kept = 0, False

    def start(self) -> None:
        self._calls, self._is_kept = 0, False
        super().start()

    def run(
        self, size: int, function: Callable[..., Any], *args: Any, keeps: bool = False, **kwargs: Any
    ) -> list:
        """As `Pool.run`.

        With `keeps` later calls need what this one leaves in the processes, which then stay up until
        `close_if_used_up`.
        """
        if not self._is_kept:
            self.close_if_used_up()
        if not self.is_up:
            self.start()
        self._calls, self._is_kept = self._calls + 1, self._is_kept or keeps
        return super().run(size, function, *args, **kwargs)

    def close_if_used_up(self) -> None:
        if self._calls >= self._most_calls:
            self.close()


class Pools:
    """A pool for each number of ranks that is asked for, of which only the last one that was is up."""

    def __init__(self, most_calls: int = 20) -> None:
        self._most_calls = most_calls
        self._pools: dict[int, WorkerPool] = {}

    def __call__(self, ranks: int) -> WorkerPool:
        pool = self._pools[ranks] = self._pools.pop(ranks, None) or WorkerPool(ranks, self._most_calls)
        pool.close_if_used_up()
        for idle in list(self._pools.values())[:-1]:
            idle.close()
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
