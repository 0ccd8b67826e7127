"""Times messages between two processes of this machine over gloo, as stages on a CPU send them."""

import multiprocessing
import queue
import tempfile
import time
from multiprocessing.queues import Queue
from pathlib import Path

import torch
import torch.distributed as dist

from titan_async.errors import UserError
from titan_async.planning.device_profile import Link, MessageTiming
from titan_async.planning.rate_fit import fit_terms

__all__ = ["time_messages"]

SIZES = (8, 2**14, 2**18, 2**20, 2**22)
"""Bytes of the messages."""
_TURNS = 50
_LIMIT = 60.0
"""Seconds that both processes get, to start and to end."""


def time_messages() -> Link:
    """Let two processes send messages of several sizes to and fro.

    The shortest of many counts: others may use the cores in between.

    Raises:
        UserError: if they do not get through.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results: Queue = context.Queue()
        ranks = [
            context.Process(target=_exchange, args=(rank, str(Path(folder, "store")), results), daemon=True)
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        try:
            found = results.get(timeout=_LIMIT)
        except queue.Empty:
            found = f"no answer in {_LIMIT:g} seconds"
        finally:
            for process in ranks:
                process.join(1 if isinstance(found, str) else _LIMIT)
                process.kill()
    if isinstance(found, str):
        raise UserError(
            f"two processes of this machine could not send messages over gloo ({found}): GLOO_SOCKET_IFNAME "
            "chooses the network interface"
        )
    fit = fit_terms([(1.0, float(size)) for size in SIZES], found)
    messages = [MessageTiming(size=size, seconds=s) for size, s in zip(SIZES, found, strict=True)]
    return Link(latency=fit.costs[0], bandwidth=1 / fit.costs[1], messages=messages)


def _exchange(rank: int, store: str, results: "Queue[list[float] | str]") -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
        found = [_seconds(rank, size) for size in SIZES]
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        results.put(" ".join(f"{type(error).__name__}: {error}".split())[:200])
        return
    if rank == 0:
        results.put(found)


def _seconds(rank: int, size: int) -> float:
    """Of one message: half of the shortest way there and back."""
    message, times = torch.zeros(size, dtype=torch.uint8), []
    for _ in range(_TURNS):
        begin = time.perf_counter()
        for sends in (rank == 0, rank == 1):
            if sends:
                dist.send(message, 1 - rank)
            else:
                dist.recv(message, 1 - rank)
        times.append((time.perf_counter() - begin) / 2)
    return min(times)
