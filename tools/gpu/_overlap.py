"""Overlapped pairs: exactness of the recurrence with experts on two ranks, and hidden messages."""

import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from _checks import DIFFERS, NOTED, OK, Place, Row, joined
from _ranks import (
    LR,
    WIDTH,
    Sleepy,
    batches,
    delayed_sgd,
    judge_host,
    largest_error,
    shard,
    time_host,
    train_stage,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage

from titan_async.pipelining import ScheduleAsync2BW, all_to_all_single, hand_over

__all__ = ["hidden", "judge_hidden", "recurrence"]

_STAGES, _EXPERTS = 2, 2


class Layer(nn.Module):
    """The first half of a microbatch's rows goes to the first rank's expert, the rest to the other's."""

    def __init__(self, sleepy: nn.Module) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH).double()
        self.expert = nn.Linear(WIDTH, WIDTH).double()
        self.sleepy = sleepy
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.sleepy(self.dense(x)))
        rows = [len(x) // _EXPERTS] * _EXPERTS
        tokens = all_to_all_single(x, rows, rows, self.group)
        return x + all_to_all_single(self.sleepy(self.expert(tokens)), rows, rows, self.group)


def layers(stage: int, expert: int, sleepy: nn.Module) -> nn.Sequential:
    """Two layers. The experts depend on the rank; everything else is the same on all ranks of a stage."""
    found = []
    for number in range(2):
        torch.manual_seed(10 * stage + number)
        found.append(Layer(sleepy))
        torch.manual_seed(100 + 10 * stage + number)
        for _ in range(expert + 1):
            found[-1].expert.reset_parameters()
    return nn.Sequential(*found)


def written_out(data: list[tuple[Tensor, Tensor]], microbatches: int) -> list[list[nn.Sequential]]:
    """Modules by stage and expert after W[b+1] = W[b] - lr g_b, g_b at W[max(b-1, 0)], on one process."""
    modules = [
        [layers(stage, expert, nn.Identity()) for expert in range(_EXPERTS)] for stage in range(_STAGES)
    ]
    dense = [layer.dense for of_stage in modules for layer in of_stage[0]]
    experts = [layer.expert for of_stage in modules for of_rank in of_stage for layer in of_rank]
    params = [p for module in (*dense, *experts) for p in module.parameters()]
    of_experts = {id(p) for module in experts for p in module.parameters()}

    def gradients(inputs: Tensor, targets: Tensor) -> list[Tensor]:
        # [replica, microbatch, expert, row, width]
        x = inputs.unflatten(1, (microbatches, _EXPERTS, -1))
        for of_stage in modules:
            for number, layer in enumerate(of_stage[0]):
                x = torch.tanh(layer.dense(x))
                sent = [of_stage[expert][number].expert(x[:, :, expert]) for expert in range(_EXPERTS)]
                x = x + torch.stack(sent, dim=2)
        found = torch.autograd.grad(nn.functional.mse_loss(x.flatten(1, 3), targets), params)
        # FSDP averages over the replicas; an expert's gradient is the sum over all of its tokens.
        return [g * (_EXPERTS if id(p) in of_experts else 1) for p, g in zip(params, found, strict=True)]

    delayed_sgd(params, data, gradients)
    for of_stage in modules:
        for of_rank in of_stage[1:]:
            for layer, first in zip(of_rank, of_stage[0], strict=True):
                layer.dense.load_state_dict(first.dense.state_dict())
    return modules


def _error(place: Place, sharded: bool) -> float:
    """The largest error of this rank's parameters, with a drain halfway."""
    microbatches = 2 * _STAGES - 1 + 2
    data = list(batches(20 if place.gpus else 6, _EXPERTS, microbatches))
    mesh = init_device_mesh(place.kind, (_STAGES, 1, _EXPERTS), mesh_dim_names=("pp", "one", "dp"))
    index, expert = divmod(place.rank, _EXPERTS)
    sleepy = Sleepy(place.device, place.rank)
    module = layers(index, expert, sleepy).to(place.device)
    for layer in module:
        layer.group = mesh["dp"].get_group()
    if sharded:
        for layer in module:
            shard(layer.expert, mesh["one"], place)
            shard(layer.dense, mesh["dp"], place)
        shard(module, mesh["dp"], place)
    stage = PipelineStage(module, index, _STAGES, torch.device(place.device), group=mesh["pp"].get_group())
    schedule = ScheduleAsync2BW(stage, microbatches, loss_fn=nn.functional.mse_loss, overlap=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)

    def update() -> None:
        if not sharded:
            for param in (param for layer in module for param in layer.dense.parameters()):
                dist.all_reduce(param.grad, group=mesh["dp"].get_group())
                param.grad.div_(_EXPERTS)
        optimizer.step()
        optimizer.zero_grad()

    have = train_stage(place, schedule, data, expert, update)
    return largest_error(have, written_out(data, microbatches)[index][expert].parameters())


def recurrence(place: Place) -> Iterator[tuple[str, float]]:
    """The recurrence for two stages with experts on two ranks."""
    with joined(place):
        for sharded in (False, True):
            name = f"recurrence, overlapped pairs{', FSDP2' if sharded else ''}"
            yield name, _error(place, sharded)


_CYCLES = 16_000_000
"""Clock cycles of a GPU for the forward of attention or experts of a microbatch, about 10 ms."""
_SECONDS = 0.01
"""The same time on CPU."""
_MESSAGE = 0.75
"""Time of an all-to-all in the same unit; all of them together take half as long as the computation."""


class Waiting:
    """Computes, and sends on a separate stream, for fixed times."""

    def __init__(self, place: Place) -> None:
        self._on_gpu = bool(place.gpus)
        self._messages = torch.cuda.Stream(place.device) if place.gpus else None

    def compute(self, units: float) -> None:
        if self._on_gpu:
            torch.cuda._sleep(int(units * _CYCLES))
        else:
            time.sleep(units * _SECONDS)

    def send(self, units: float) -> None:
        if self._messages is None:
            arrives = time.perf_counter() + units * _SECONDS
            hand_over()
            time.sleep(max(0.0, arrives - time.perf_counter()))
            return
        self._messages.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._messages):
            torch.cuda._sleep(int(units * _CYCLES))
            arrived = self._messages.record_event()
        hand_over()
        torch.cuda.current_stream().wait_event(arrived)

    def seconds(self, call: Any) -> float:
        """Seconds that the device, or the CPU, needs for a call."""
        if not self._on_gpu:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        call()
        events[1].record()
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) / 1e3


class _Segment(torch.autograd.Function):
    """Attention or experts, with the all-to-all that follows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, waiting: Waiting) -> Tensor:
        ctx.waiting = waiting
        waiting.compute(1)
        waiting.send(_MESSAGE)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.waiting.send(_MESSAGE)
        ctx.waiting.compute(2)
        return gradient.clone(), None


class Segments(nn.Module):
    """Two layers of two segments each."""

    def __init__(self, waiting: Waiting) -> None:
        super().__init__()
        self.waiting, self.weight = waiting, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        for _ in range(4):
            x = _Segment.apply(x, self.waiting)
        return x


def hidden(place: Place) -> Iterator[tuple[str, Any]]:
    """Seconds of a step of one stage without and with overlap, and of its messages; where the host waits."""
    microbatches, times, step = 4, {}, None
    with joined(place):
        waiting = Waiting(place)
        x = torch.ones(microbatches, WIDTH, device=place.device)
        for overlap in (False, True):
            module = Segments(waiting).to(place.device)
            stage = PipelineStage(module, 0, 1, torch.device(place.device))
            schedule = ScheduleAsync2BW(stage, microbatches, loss_fn=nn.functional.mse_loss, overlap=overlap)
            step = functools.partial(schedule.step, x, target=x, return_outputs=False)
            step()
            times[overlap] = statistics.median(waiting.seconds(step) for _ in range(3))
        message = statistics.median(waiting.seconds(lambda: waiting.send(_MESSAGE)) for _ in range(3))
        yield "hidden by overlapped pairs", [times[False], times[True], 8 * microbatches * message]
        if place.gpus:
            (_, free, _), (_, held, waits) = (time_host(step, is_held, place) for is_held in (False, True))
            yield "host in step, overlapped", [held, free, waits]


def judge_hidden(name: str, values: list[Any], place: Place) -> Row:
    """The fraction of the time of the messages by which overlap shortens a step."""
    if name.startswith("host"):
        return judge_host(name, values, place)
    one_by_one, together, messages = values[0]
    share = (one_by_one - together) / messages
    found = f"{share:.0%}, {1e3 * together:.0f} ms per step instead of {1e3 * one_by_one:.0f}"
    if not place.gpus:
        return Row(name, "at least 80%", f"{found}, asleep", NOTED)
    return Row(name, "at least 80%", found, OK if share >= 0.8 else DIFFERS)
