"""Measures P2P latency and bandwidth between two processes of this machine over gloo."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from titan_async.errors import UserError
from titan_async.planning.device_profile import Link, MessageTiming
from titan_async.planning.rate_fit import fit_terms

__all__ = ["exchange", "time_messages"]

SIZES = (8, 2**14, 2**18, 2**20, 2**22)
"""Bytes of the messages."""
_ROUND_TRIPS = 50
_LIMIT = 120.0
"""Timeout of both processes in seconds."""
_PROGRAM = f"import sys; from {__name__} import exchange; exchange(int(sys.argv[1]), sys.argv[2])"


def time_messages() -> Link:
    """Measure a ping-pong of messages of several sizes between two processes.

    Raises:
        UserError: if the processes fail or time out.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(rank), store],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            out, err = ranks[0].communicate(timeout=_LIMIT)
            reason = "" if ranks[0].returncode == 0 else (err.strip().splitlines() or ["no output"])[-1]
        except subprocess.TimeoutExpired:
            reason = f"timed out after {_LIMIT:g} seconds"
        finally:
            for process in ranks:
                process.kill()
                process.communicate()
    if reason:
        raise UserError(
            f"two processes of this machine could not communicate over gloo ({reason[:200]}): set "
            "GLOO_SOCKET_IFNAME to a network interface that works"
        )
    found = json.loads(out)
    fit = fit_terms([(1.0, float(size)) for size in SIZES], found)
    messages = [MessageTiming(size=size, seconds=s) for size, s in zip(SIZES, found, strict=True)]
    return Link(latency=fit.costs[0], bandwidth=1 / fit.costs[1], messages=messages)


def exchange(rank: int, store: str) -> None:
    """Run one of the two processes; rank 0 prints the seconds of each size as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    found = [_seconds(rank, size) for size in SIZES]
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _seconds(rank: int, size: int) -> float:
    """Half of the shortest round trip of a message, because other processes may interrupt."""
    message, times = torch.zeros(size, dtype=torch.uint8), []
    for _ in range(_ROUND_TRIPS):
        begin = time.perf_counter()
        for sends in (rank == 0, rank == 1):
            if sends:
                dist.send(message, 1 - rank)
            else:
                dist.recv(message, 1 - rank)
        times.append((time.perf_counter() - begin) / 2)
    return min(times)
