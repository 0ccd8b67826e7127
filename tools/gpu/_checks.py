"""A check, its processes, and the rows of its table.

Every check runs in separate processes, so that each has a time limit, and none affects the device for the
next one. A process writes its measurements line by line, so that those before a hang are kept.
"""

import contextlib
import faulthandler
import json
import multiprocessing as mp
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

__all__ = ["Check", "Place", "Row", "joined", "not_checked", "run"]

OK, WRONG, DIFFERS, NOTED, NOT_CHECKED = "ok", "WRONG", "differs", "noted", "not checked"
_START = 30.0
"""Seconds for processes to start, in addition to the time limit of the check."""
_GRACE = 10.0
"""Seconds for other ranks to fail after the first."""
_LINES = 8


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    check: str
    expected: str
    found: str
    verdict: str
    """`WRONG` sets the exit status to 1; `differs` is a value outside of the estimate."""
    log: list[str] = field(default_factory=list)
    """The last lines of a process that failed."""


@dataclass(frozen=True)
class Place:
    """The rank and device of one process of a check."""

    rank: int
    ranks: int
    gpus: int
    """0 to run on CPU."""
    port: int

    @property
    def kind(self) -> str:
        return "cuda" if self.gpus else "cpu"

    @property
    def device(self) -> str:
        return f"cuda:{self.rank % self.gpus}" if self.gpus else "cpu"

    @property
    def shared(self) -> bool:
        """Whether ranks share a GPU, or the cores of a CPU."""
        return self.ranks > self.gpus


Measure = Callable[[Place], Iterator[tuple[str, Any]]]
"""Runs in each process; yields names of rows, the same on every rank, with JSON values."""
Judge = Callable[[str, list[Any], Place], Row]
"""Returns a row, given its name and the values of all ranks; runs in the parent, which has no device."""


@dataclass(frozen=True)
class Check:
    """A measurement and its judgement."""

    about: str
    measure: Measure
    judge: Judge
    seconds: int
    """Time limit, once the processes have started."""
    ranks: Callable[[int], int] = lambda gpus: 1
    """Returns the number of processes, given the number of GPUs."""
    on_cpu: bool = True
    """Whether it also runs without a GPU."""
    joined: bool = False
    """Whether the processes communicate, so that none can continue when one fails."""


def not_checked(name: str, why: str) -> Row:
    return Row(name, "", why, NOT_CHECKED)


@contextlib.contextmanager
def joined(place: Place, bound: bool = False) -> Iterator[Any]:
    """The process group of a check's ranks: NCCL, even if they share a GPU, or gloo on CPU.

    Args:
        bound: whether to bind the group to the device (`device_id`), so that it connects eagerly and other
            groups are split from it.
    """
    import torch
    import torch.distributed as dist

    options: dict[str, Any] = {}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if place.gpus:
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        if place.shared:  # as separate hosts: NCCL refuses two ranks on one GPU of one host
            os.environ |= {
                "NCCL_HOSTID": f"rank{place.rank}",
                "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # required by NCCL 2.30
                "NCCL_NET": "Socket",
                "NCCL_IB_DISABLE": "1",
                "NCCL_NVLS_ENABLE": "0",
            }
        torch.cuda.set_device(place.device)
        options = {"device_id": torch.device(place.device)} if bound else {}
    dist.init_process_group(
        "nccl" if place.gpus else "gloo",
        init_method=f"tcp://127.0.0.1:{place.port}",
        rank=place.rank,
        world_size=place.ranks,
        timeout=timedelta(minutes=10),  # longer than the time limit of a check, which prints stacks
        **options,
    )
    yield dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()


def _process(measure: Measure, place: Place, folder: str, seconds: float) -> None:
    """The main function of a check's process; writes its output to `folder`."""
    os.setsid()  # compilers that it starts end with it
    log = os.open(Path(folder, f"{place.rank}.log"), os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.enable()
    faulthandler.dump_traceback_later(seconds, exit=True)
    status = 1
    try:
        with Path(folder, f"{place.rank}.jsonl").open("w", buffering=1) as out:
            for name, value in measure(place):
                print(json.dumps([name, value]), file=out)
        status = 0
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)  # without destructors of CUDA and NCCL, which might wait for other ranks


def run(name: str, check: Check, gpus: int, seconds: float) -> Iterable[Row]:
    """The rows of a check with a time limit of `seconds`."""
    ranks = check.ranks(gpus)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = [Place(rank, ranks, gpus, port) for rank in range(ranks)]
    # CUDA does not support forked processes; on CPU, forks save the import of torch.
    context = mp.get_context("spawn" if gpus else "forkserver")
    if not gpus:
        context.set_forkserver_preload(["torch.distributed.pipelining", "torch.distributed.fsdp"])
    with tempfile.TemporaryDirectory() as folder:
        processes: list[Any] = []
        failed: list[int] = []
        try:
            for place in places:
                arguments = (check.measure, place, folder, seconds)
                processes.append(context.Process(target=_process, args=arguments))
                processes[-1].start()
            failed = _await(processes, seconds + _START, check.joined)
        finally:
            for process in processes:
                if process.is_alive():
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.kill()
                process.join()
        values = [_values(Path(folder, f"{place.rank}.jsonl")) for place in places]
        names = dict.fromkeys(each for of_rank in values for each in of_rank)
        for each in names:
            of_ranks = [of_rank[each] for of_rank in values if each in of_rank]
            if len(of_ranks) == ranks or not check.joined:
                yield check.judge(each, of_ranks, places[0])
        for rank in failed:
            log = Path(folder, f"{rank}.log")
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
            hangs = any(line.startswith("Timeout (") for line in lines)
            yield _failure(name, rank, processes[rank].exitcode, lines, hangs, seconds)
            if check.joined and not hangs:
                break  # the others fail because of it


def _await(processes: list[Any], seconds: float, joined: bool) -> list[int]:
    """The ranks that failed, in order, then those that did not end in time, or after the first failure."""
    deadline = time.monotonic() + seconds
    failed: list[int] = []
    running = dict(enumerate(processes))
    while running:
        ready = wait([process.sentinel for process in running.values()], max(deadline - time.monotonic(), 0))
        if not ready:
            break
        for rank in [rank for rank, process in running.items() if process.sentinel in ready]:
            running.pop(rank).join()
            if processes[rank].exitcode:
                failed.append(rank)
                deadline = min(deadline, time.monotonic() + _GRACE) if joined else deadline
    return [*failed, *running]


def _values(path: Path) -> dict[str, Any]:
    found = {}
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # the last line may be cut
        for line in path.read_text().splitlines():
            name, value = json.loads(line)
            found[name] = value
    return found


def _failure(name: str, rank: int, status: int | None, log: list[str], hangs: bool, seconds: float) -> Row:
    lines = [line.rstrip() for line in log if line.strip()]
    stacks = [index for index, line in enumerate(lines) if "(most recent call first)" in line]
    # The stack of the main thread is the last one.
    tail = lines[stacks[-1] + 1 :][:_LINES] if stacks else lines[-_LINES:]
    if hangs or status == -signal.SIGKILL:
        found = f"rank {rank} did not end within {seconds:.0f} s"
    elif status and status < 0:
        found = f"rank {rank} was ended by {signal.Signals(-status).name}"
    else:
        found = f"rank {rank}: {tail[-1].strip()[:200] if tail else f'exit status {status}'}"
    return Row(name, "ends", found, WRONG, tail)
