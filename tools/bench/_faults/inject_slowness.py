"""Stages of a fixed speed, slower ranks, jitter of computations, delayed messages.

netem would delay real packets, but few kernels have it, and it would also delay those of other programs.
"""

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.stage import _PipelineStageBase

from titan_async.pipelining.p2p_channels import P2PChannels


def install(
    rank: int,
    forward: float,
    backward: float,
    factors: Sequence[float] = (),
    jitter: float = 0.0,
    latency: float = 0.0,
) -> None:
    """Pads computations by sleeping, so that processes on few cores simulate ranks with their own device.

    Args:
        rank: of this process.
        forward, backward: minimum seconds per microbatch.
        factors: multiply these durations, by rank.
        jitter: half the width of the uniform distribution of a computation's time, relative to its mean.
        latency: seconds added to each message between stages.
    """
    factor = factors[rank] if factors else 1.0
    draw = random.Random(rank)

    def seconds(mean: float) -> Callable[[], float]:
        return lambda: factor * mean * draw.uniform(1 - jitter, 1 + jitter)

    for name, mean in (("forward_one_chunk", forward), ("backward_one_chunk", backward)):
        setattr(_PipelineStageBase, name, _padded(getattr(_PipelineStageBase, name), seconds(mean)))
    if latency:
        _delay_messages(latency)


def _padded(function: Callable[..., Any], seconds: Callable[[], float]) -> Callable[..., Any]:
    def padded(*args: Any, **kwargs: Any) -> Any:
        end = time.perf_counter() + seconds()
        result = function(*args, **kwargs)
        time.sleep(max(end - time.perf_counter(), 0.0))
        return result

    return padded


@dataclass
class _LateSend:
    """A send that has not started yet."""

    start: Callable[[], list[dist.Work]]
    due: float
    started: threading.Event = field(default_factory=threading.Event)
    work: dist.Work | None = None

    def wait(self, *timeout: timedelta) -> None:
        self.started.wait()
        assert self.work is not None
        self.work.wait(*timeout)


def _delay_messages(latency: float) -> None:
    """Delays messages, in order, without blocking the rank."""
    queues: dict[dist.ProcessGroup, SimpleQueue[_LateSend]] = {}
    start = P2PChannels._start

    def send_from(queue: SimpleQueue[_LateSend]) -> None:
        for late in itertools.starmap(queue.get, itertools.repeat(())):
            time.sleep(max(late.due - time.perf_counter(), 0.0))
            (late.work,) = late.start()
            late.started.set()

    def start_late(self: P2PChannels, call: Any, action: Any, tensors: list[Tensor]) -> list[Any]:
        if call == "recv":
            return start(self, call, action, tensors)
        group, works = self._edges.groups[call, action.kind], []
        for tensor in tensors:
            if group not in queues:
                queues[group] = SimpleQueue()
                threading.Thread(target=send_from, args=(queues[group],), daemon=True).start()
            works.append(
                _LateSend(partial(start, self, call, action, [tensor]), time.perf_counter() + latency)
            )
            queues[group].put(works[-1])
        return works

    P2PChannels._start = start_late
