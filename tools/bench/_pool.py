"""Persistent gloo processes that run one function after another, for benchmarks and tests.

A pipeline of n ranks uses the first n processes; the others are idle.
"""

import contextlib
import multiprocessing as mp
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

__all__ = ["Pool"]

_GLOO_TIMEOUT = timedelta(seconds=300)
_GRACE = 2.0
"""Seconds for other ranks to answer after one has failed."""


def _groups_of_members(world_size: int, sizes: list[int]) -> dict[int, Any]:
    """A group for each size, created by its members only: threads of unused ranks would wake up, too."""
    import torch.distributed as dist

    from titan_async._group_internals import joint_group

    return {size: joint_group(range(size)) for size in sizes if dist.get_rank() < size}


Groups = Callable[[int, list[int]], dict[int, Any]]


def _serve(
    rank: int, world_size: int, sizes: list[int], store: str, make_groups: Groups, connection: Connection
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=_GLOO_TIMEOUT
    )
    groups = make_groups(world_size, sizes)
    with contextlib.suppress(EOFError):  # the parent has ended
        while (request := connection.recv()) is not None:
            function, size, args, kwargs = request
            try:
                connection.send((True, function(rank, groups[size], *args, **kwargs)))
            except BaseException:
                connection.send((False, traceback.format_exc()))
        dist.destroy_process_group()


class Pool:
    """`max(sizes)` gloo processes of one thread each, which start with the first call.

    As a context manager it starts them on entry, and ends them.

    Args:
        sizes: the numbers of ranks that `run` is called with.
        context: a context of `multiprocessing`; None for a new forkserver.
        make_groups: returns the groups in each process, by size, given the number of processes and `sizes`.
    """

    def __init__(
        self, sizes: list[int], context: Any = None, make_groups: Groups = _groups_of_members
    ) -> None:
        self.ranks = max(sizes)
        self._sizes, self._context, self._make_groups = sorted(sizes), context, make_groups
        self._connections: list[Connection] = []
        self._processes: list[Any] = []

    @property
    def is_up(self) -> bool:
        return bool(self._processes)

    def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name, "store"))
        context = self._context
        if context is None:
            context = mp.get_context("forkserver")
            context.set_forkserver_preload(["torch.distributed.pipelining", "torch.distributed.fsdp"])
            # Ctrl-C is sent to the whole process group, but only the parent ends its workers. They inherit
            # that SIGINT is ignored, so that this also holds during their imports.
            handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for rank in range(self.ranks):
            here, there = context.Pipe()
            arguments = (rank, self.ranks, self._sizes, store, self._make_groups, there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)
        if self._context is None:
            signal.signal(signal.SIGINT, handler)

    def __enter__(self) -> "Pool":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error some ranks may wait for others in gloo, and would not end on request.
        self.close(patience=3.0 if kind is None else 0.0)

    def run(
        self, size: int, function: Callable[..., Any], *args: Any, timeout: float = 300, **kwargs: Any
    ) -> list:
        """Results of a top-level `function(rank, group, *args, **kwargs)` on the first `size` ranks.

        Raises:
            RuntimeError: if a rank fails, ends, or does not answer within `timeout` seconds.
        """
        if not self.is_up:
            self.start()
        pending = {connection: rank for rank, connection in enumerate(self._connections[:size])}
        for connection in pending:
            connection.send((function, size, args, kwargs))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        ended = False
        deadline = time.monotonic() + timeout
        while pending and (ready := wait(list(pending), max(deadline - time.monotonic(), 0))):
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    fine, result = connection.recv()
                except EOFError:
                    fine, result, ended = False, "its process has ended", True
                if fine:
                    results[rank] = result
                else:
                    failures[rank] = f"rank {rank} failed:\n{result}"
                    # The others may now wait for this rank until their timeout.
                    deadline = min(deadline, time.monotonic() + _GRACE)
        if pending or ended:
            self.close()
        if pending:
            failures[self.ranks] = f"ranks {sorted(pending.values())} did not answer"
        if failures:
            raise RuntimeError("\n".join(failures[rank] for rank in sorted(failures)))
        return [results[rank] for rank in range(size)]

    def close(self, patience: float = 3.0) -> None:
        """Ends the processes, and kills those that are alive after `patience` seconds."""
        if not self.is_up:
            return
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        deadline = time.monotonic() + patience
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0))
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()
        self._connections, self._processes = [], []
