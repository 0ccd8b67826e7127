"""Processes that stay up for the whole benchmark and run one function after another under gloo.

A pipeline of n ranks occupies the first n of them; the others sleep on their pipe.
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

_GLOO_TIMEOUT = timedelta(seconds=120)


def _serve(rank: int, world_size: int, sizes: list[int], store: str, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    from titan_async._group_internals import joint_group

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=_GLOO_TIMEOUT
    )
    # Of its members alone, or the threads of those that are not used would wake up all the time.
    groups = {size: joint_group(range(size)) for size in sizes if rank < size}
    with contextlib.suppress(EOFError):  # the parent is gone
        while (request := connection.recv()) is not None:
            function, size, args = request
            try:
                connection.send((True, function(rank, groups[size], *args)))
            except BaseException:
                connection.send((False, traceback.format_exc()))
        dist.destroy_process_group()


class Pool:
    """`max(sizes)` gloo processes of one thread each; use it as a context manager.

    Args:
        sizes: the numbers of ranks that `run` will be asked for.
    """

    def __init__(self, sizes: list[int]) -> None:
        self.ranks = max(sizes)
        self._folder = tempfile.TemporaryDirectory()
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.pipelining", "torch.distributed.fsdp"])
        store = str(Path(self._folder.name, "store"))
        # Ctrl-C reaches the whole process group, but the parent alone decides when its workers end. They
        # inherit that they ignore it, so that it holds while they still import.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for rank in range(max(sizes)):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, max(sizes), sorted(sizes), store, there), daemon=True
            )
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)
        signal.signal(signal.SIGINT, handler)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error some ranks wait for others in gloo and would not read a farewell.
        self._close(patience=3.0 if kind is None else 0.0)

    def run(self, size: int, function: Callable[..., Any], *args: Any, timeout: float = 240) -> list:
        """Results of the top-level `function(rank, group, *args)` on the first `size` ranks, in their order.

        Raises:
            RuntimeError: if a rank fails, dies, or does not answer within `timeout` seconds.
        """
        waiting = dict(enumerate(self._connections[:size]))
        for connection in waiting.values():
            connection.send((function, size, args))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting.values()), max(deadline - time.monotonic(), 0))
            if not ready:
                raise RuntimeError(f"ranks {sorted(waiting)} did not answer within {timeout:.0f} s")
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                try:
                    fine, result = waiting.pop(rank).recv()
                except EOFError:
                    raise RuntimeError(f"the process of rank {rank} has died") from None
                if not fine:
                    raise RuntimeError(f"rank {rank} failed:\n{result}")
                results[rank] = result
        return [results[rank] for rank in range(size)]

    def _close(self, patience: float) -> None:
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
