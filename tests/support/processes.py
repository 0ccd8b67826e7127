"""Persistent gloo processes that run the functions of all tests of a session."""

import os
from collections.abc import Callable
from typing import Any

from tests.support.forks import context
from tools.bench._pool import Pool

__all__ = ["Pools", "WorkerPool"]


def _make_groups(world_size: int, sizes: list[int]) -> dict[int, Any]:
    """A group for each size. All ranks create each of them, because torch names groups by a counter."""
    import torch.distributed as dist

    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(dist.get_rank()), str(world_size)
    groups: dict[int, Any] = {size: dist.new_group(list(range(size))) for size in sizes[:-1]}
    return groups | {world_size: dist.group.WORLD}


class WorkerPool(Pool):
    """`world_size` gloo processes, which are restarted after `most_calls`, or if some of them did not answer.

    Groups that are never destroyed each have a thread that wakes up a hundred times per second; without
    restarts these would need more processor time than the tests.
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

        With `keeps` later calls need the state that this one leaves in the processes, which are then not
        restarted until `close_if_used_up`.
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
    """A pool for each number of ranks; only the last requested one is running."""

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
