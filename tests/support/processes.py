"""Processes that stay up for a whole session of tests and run one function after another under gloo."""

import contextlib
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.support.forks import context

__all__ = ["Pools", "WorkerPool"]


def _serve(rank: int, world_size: int, store: str, connection: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world_size)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=300),
    )
    # One group for each number of stages: a pipeline occupies the first ranks. All ranks take part in making
    # each, since torch names a group by the number of those that a process has made before.
    groups = {n: dist.new_group(list(range(n))) for n in range(1, world_size)} | {
        world_size: dist.group.WORLD
    }
    while True:
        request = connection.recv()
        if request is None:
            break
        function, size, args, kwargs = request
        try:
            connection.send((True, function(rank, groups[size], *args, **kwargs)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class WorkerPool:
    """`world_size` gloo processes; `run` calls a top-level function on the first `size` of them.

    They start with the first call, and anew after `most_calls` or when some of them did not answer. What is
    left behind in them, such as groups that nobody destroys, each with a thread that wakes a hundred times a
    second, would in the end take more of the processor than the tests.
    """

    def __init__(self, world_size: int, most_calls: int) -> None:
        self._world_size = world_size
        self._most_calls = most_calls
        self._connections: list[Any] = []
        self._processes: list[Any] = []
        self._calls, self._is_kept = 0, False

    def _start(self) -> None:
        self._calls, self._is_kept = 0, False
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self._world_size):
            here, there = context().Pipe()
            process = context().Process(
                target=_serve,
                args=(rank, self._world_size, str(Path(self._folder.name, "store")), there),
                daemon=True,
            )
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def run(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 300,
        keeps: bool = False,
        **kwargs: Any,
    ) -> list:
        """Results of `function(rank, group, *args, **kwargs)` in the order of ranks; raises if one failed.

        With `keeps` later calls need what this one leaves in the processes, which then stay up until
        `close_if_used_up`.
        """
        if not self._is_kept:
            self.close_if_used_up()
        if not self._processes:
            self._start()
        self._calls, self._is_kept = self._calls + 1, self._is_kept or keeps
        active = self._connections[:size]
        for connection in active:
            connection.send((function, size, args, kwargs))
        replies: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(replies) < size:
            pending = [connection for rank, connection in enumerate(active) if rank not in replies]
            for ready in wait(pending, max(deadline - time.monotonic(), 0)):
                rank = active.index(ready)
                replies[rank] = ready.recv()
                if not replies[rank][0]:
                    # The others may now wait for this rank for good: give them a moment, not the whole time.
                    deadline = min(deadline, time.monotonic() + 2)
            if time.monotonic() >= deadline:
                break
        failures = [f"rank {rank}:\n{text}" for rank, (fine, text) in sorted(replies.items()) if not fine]
        silent = sorted(set(range(size)) - set(replies))
        if silent:
            self.close()
            failures.append(f"ranks {silent} did not answer")
        if failures:
            raise RuntimeError("\n".join(failures))
        return [replies[rank][1] for rank in range(size)]

    def close_if_used_up(self) -> None:
        if self._processes and self._calls >= self._most_calls:
            self.close()

    def close(self) -> None:
        if not self._processes:
            return
        for connection, process in zip(self._connections, self._processes, strict=True):
            if process.is_alive():
                with contextlib.suppress(OSError):
                    connection.send(None)
        for process in self._processes:
            process.join(timeout=3)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()
        self._connections, self._processes = [], []


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
