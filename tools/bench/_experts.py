"""Stages whose layers have the all-to-alls of a mixture of experts.

A layer computes ("attention"), dispatches its tokens with an all-to-all, computes ("experts") and combines
with another one. Computing is sleeping or matrix products; the latency of messages can be set.
"""

import time
from typing import Any

import torch
import torch.distributed as dist
from sleeping import Clock, SleepingStage
from torch import Tensor, nn

from titan_async.pipelining import all_to_all_single, hand_over

__all__ = ["DelayedExchange", "Exchange", "computing_stage", "sleeping_stage"]


def _delayed(x: Tensor, group: dist.ProcessGroup, latency: float) -> Tensor:
    """An all-to-all of equal parts, which arrive `latency` seconds after the last rank has sent its part.

    As in a real transfer, the rank can compute until then. The message contains the time of sending: all
    processes of a machine have the same monotonic clock.
    """
    parts = x.view(group.size(), -1, x.shape[-1])
    sent = torch.zeros(len(parts), 1, x.shape[-1])
    sent.view(torch.float64)[..., 0] = time.perf_counter()
    message = torch.cat([parts, sent], dim=1)
    received = torch.empty_like(message)
    work = dist.all_to_all_single(received, message, group=group, async_op=True)
    hand_over()
    work.wait()
    arrives = received[:, -1].contiguous().view(torch.float64)[:, 0].max().item() + latency
    time.sleep(max(0.0, arrives - time.perf_counter()))
    return received[:, :-1].reshape(x.shape).contiguous()


class _Delayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, latency: float) -> Tensor:
        ctx.group, ctx.latency = group, latency
        return _delayed(x, group, latency)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _delayed(gradient.contiguous(), ctx.group, ctx.latency), None, None


class DelayedExchange(nn.Module):
    """An all-to-all over `group` that takes `latency` seconds each way."""

    def __init__(self, group: dist.ProcessGroup, latency: float) -> None:
        super().__init__()
        self.group, self.latency = group, latency

    def forward(self, x: Tensor) -> Tensor:
        return _Delayed.apply(x, self.group, self.latency)


class Exchange(nn.Module):
    """An all-to-all over `group`, of equal parts, without added latency."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        rows = [len(x) // self.group.size()] * self.group.size()
        return all_to_all_single(x, rows, rows, self.group)


def sleeping_stage(layers: int, clock: Clock, group: dist.ProcessGroup, latency: float) -> nn.Module:
    """Layers of two sleeps, each with the times of `SleepingStage`, and two delayed messages."""
    halves = ((SleepingStage(clock), DelayedExchange(group, latency)) for _ in range(2 * layers))
    return nn.Sequential(*(module for half in halves for module in half))


def computing_stage(layers: int, width: int, group: dist.ProcessGroup) -> nn.Module:
    """Layers of two residual matrix products and two real messages."""
    return nn.Sequential(*(_Computing(width, group) for _ in range(2 * layers)))


class _Computing(nn.Module):
    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.linear, self.exchange = nn.Linear(width, width, bias=False), Exchange(group)

    def forward(self, x: Tensor) -> Tensor:
        return self.exchange(x + torch.tanh(self.linear(x)))
