"""Several ranks, on one GPU each or sharing one: exactness of the recurrence, and waits of the host."""

import os
import statistics
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from _checks import NOT_CHECKED, OK, WRONG, Place, Row, joined
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from titan_async.optim import ErrorFeedback, Muon, set_found_inf
from titan_async.pipelining import ScheduleAsync2BW

__all__ = [
    "LR",
    "WIDTH",
    "Sleepy",
    "batches",
    "bound_recurrence",
    "delayed_sgd",
    "host",
    "judge_error",
    "judge_host",
    "largest_error",
    "recurrence",
    "shard",
    "time_host",
    "train_stage",
]

WIDTH, LR = 64, 0.05
_ROWS = 4


class Sleepy(nn.Module):
    """Delays the device at random, forward and backward, to reveal missing synchronization."""

    def __init__(self, device: str, seed: int) -> None:
        super().__init__()
        self._sleeps = device != "cpu"
        self._random = torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor) -> Tensor:
        self.sleep()
        if x.requires_grad:
            x.register_hook(self.sleep)
        return x

    def sleep(self, _: Tensor | None = None) -> None:
        draw = torch.rand((), generator=self._random).item()
        if self._sleeps and draw < 0.3:
            torch.cuda._sleep(int(draw * 6e6))  # up to a millisecond


def layers(stages: int) -> list[nn.Module]:
    """The modules of all stages, the same on every rank."""
    torch.manual_seed(7)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
        for _ in range(stages)
    ]


def batches(count: int, replicas: int, microbatches: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, [replica, row, width]."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        shape = (2, replicas, microbatches * _ROWS, WIDTH)
        inputs, targets = torch.randn(shape, generator=generator, dtype=torch.double)
        yield inputs, targets


Gradients = Callable[[Tensor, Tensor], Sequence[Tensor]]


def delayed_sgd(
    params: list[nn.Parameter], data: Iterable[tuple[Tensor, Tensor]], gradients: Gradients
) -> None:
    """Trains `params` by W[b+1] = W[b] - lr g_b, with g_b at W[max(b-1, 0)], in a loop in one process."""
    before = [param.detach().clone() for param in params]
    for inputs, targets in data:
        newest = [param.detach().clone() for param in params]
        with torch.no_grad():
            torch._foreach_copy_(params, before)
        found = gradients(inputs, targets)
        with torch.no_grad():
            for param, value, gradient in zip(params, newest, found, strict=True):
                param.copy_(value - LR * gradient)
        before = newest


def train_stage(
    place: Place,
    schedule: ScheduleAsync2BW,
    data: list[tuple[Tensor, Tensor]],
    replica: int,
    update: Callable[[], None],
    halfway: Callable[..., object] = lambda *args, **kwargs: None,
) -> list[Tensor]:
    """Parameters after training on a replica's data, with a drain and a call of `halfway` in the middle."""
    stage = schedule._stage
    for number, (inputs, targets) in enumerate(data):
        args = (inputs[replica].to(place.device),) if stage.is_first else ()
        target = targets[replica].to(place.device) if stage.is_last else None
        schedule.step(*args, target=target, return_outputs=False)
        if schedule.gradient_ready:
            update()
        if number == len(data) // 2:
            if schedule.drain():
                update()
            halfway(*args, target=target)
    if schedule.drain():
        update()
    params = stage.submod.parameters()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().cpu() for p in params]


def largest_error(have: Iterable[Tensor], want: Iterable[Tensor]) -> float:
    return max((a - b.detach()).abs().max().item() for a, b in zip(have, want, strict=True))


def shard(module: nn.Module, mesh: DeviceMesh, place: Place) -> None:
    """FSDP2 that keeps parameters unsharded between forward and backward."""
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    module.set_force_sum_reduction_for_comms(not place.gpus)  # gloo supports only sums


def written_out(stages: int, data: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The parameters of all stages after the recurrence, computed in one process."""
    model = nn.Sequential(*layers(stages))
    params = list(model.parameters())

    def gradients(inputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        loss = nn.functional.mse_loss(model(inputs.flatten(0, 1)), targets.flatten(0, 1))
        return torch.autograd.grad(loss, params)

    delayed_sgd(params, data, gradients)
    return list(params)


def _error(place: Place, stages: int, sharded: bool, **options: Any) -> float:
    """The largest error of this rank's parameters, with a drain and a validation halfway."""
    replicas, microbatches = place.ranks // stages, stages + 2
    data = list(batches(40 if place.gpus else 6, replicas, microbatches))
    mesh = init_device_mesh(place.kind, (stages, replicas), mesh_dim_names=("pp", "dp"))
    index, replica = place.rank // replicas, place.rank % replicas
    sleepy = Sleepy(place.device, place.rank)
    module = nn.Sequential(layers(stages)[index], sleepy).to(place.device)
    if sharded:
        for each in (module[0], module):
            shard(each, mesh["dp"], place)
    stage = PipelineStage(module, index, stages, torch.device(place.device), group=mesh["pp"].get_group())
    schedule = ScheduleAsync2BW(stage, microbatches, loss_fn=nn.functional.mse_loss, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)

    def update() -> None:
        schedule.clip_grad_norm_(1e9)  # does not change gradients, but tests the ordering
        sleepy.sleep()
        optimizer.step()
        optimizer.zero_grad()

    have = train_stage(place, schedule, data, replica, update, schedule.eval)
    return largest_error(have, written_out(stages, data)[len(have) * index :][: len(have)])


def recurrence(place: Place) -> Iterator[tuple[str, float]]:
    """The recurrence with as many stages as ranks, and with half as many under FSDP2."""
    with joined(place):
        name, stages = f"recurrence, {place.ranks} stages", place.ranks // 2
        yield f"{name}, receives late", _error(place, place.ranks, False, early_receives=False)
        yield f"recurrence, {stages} stages x FSDP2 over 2", _error(place, stages, True)
        # The last one, when all kernels are loaded: two ranks that synchronize with their devices would hang.
        yield f"{name}, receives early", _error(place, place.ranks, False, early_receives=True)


def bound_recurrence(place: Place) -> Iterator[tuple[str, float]]:
    """The recurrence with the default group bound to a device."""
    with joined(place, bound=True):
        name = f"recurrence, {place.ranks} stages, device_id"
        yield name, _error(place, place.ranks, False)


def judge_error(name: str, values: list[Any], place: Place) -> Row:
    right = all(value < 1e-10 for value in values)  # not if it is NaN
    return Row(name, "error below 1e-10", f"{max(values):.1e}", OK if right else WRONG)


_HELD_CYCLES = 600_000_000
"""A quarter of a second at the highest clock of any GPU."""


def time_host(call: Callable[[], Any], held: bool, place: Place) -> tuple[Any, float, Counter[str]]:
    """The result of a call, the host's seconds in it, and counts of the lines that synchronized.

    Args:
        call: the call.
        held: whether to block the device before the call, if there is one. Only the current stream is
            synchronized first, because receives for the next batch may wait on others.
        place: of this process.
    """
    if place.gpus and held:
        torch.cuda.current_stream().synchronize()
        torch.cuda._sleep(_HELD_CYCLES)
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - start
    if place.gpus:
        torch.cuda.set_sync_debug_mode("default")
    waits = (each for each in caught if "synchroniz" in str(each.message))
    return result, seconds, Counter(f"{os.path.basename(w.filename)}:{w.lineno}" for w in waits)


def host(place: Place) -> Iterator[tuple[str, Any]]:
    """Seconds of the host in each call of a step while the device is blocked, and where it waits."""
    with joined(place):
        torch.manual_seed(place.rank)
        width = 256 if place.gpus else 16
        module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4))).to(place.device)
        stage = PipelineStage(module, place.rank, place.ranks, torch.device(place.device))
        schedule = ScheduleAsync2BW(stage, 8, loss_fn=nn.functional.mse_loss)
        # A different optimizer for each layer.
        a, b, c, d = ([layer.weight] for layer in module)
        optimizers = {
            "Muon": Muon(a, lr=0.01),
            "Muon, error feedback": ErrorFeedback(Muon(b, lr=0.01)),
            "fused AdamW": torch.optim.AdamW(c, fused=True),
            "AdamW, error feedback": ErrorFeedback(torch.optim.AdamW(d, fused=True)),
        }
        x = torch.randn(32, width, device=place.device)
        seconds: dict[bool, dict[str, list[float]]] = {held: defaultdict(list) for held in (False, True)}
        lines: dict[str, Counter] = defaultdict(Counter)

        def timed(what: str, call: Any) -> Any:
            result, spent, waits = time_host(call, held, place)
            seconds[held][what].append(spent)
            lines[what] += waits
            return result

        def train_step() -> None:
            args = (x,) if stage.is_first else ()
            target = x if stage.is_last else None
            timed("step", lambda: schedule.step(*args, target=target, return_outputs=False))
            if schedule.gradient_ready:
                norm = timed("clip_grad_norm_", lambda: schedule.clip_grad_norm_(1.0))
                found_inf = (~norm.isfinite()).to(torch.float32)
                for name, optimizer in optimizers.items():
                    set_found_inf(optimizer, found_inf)
                    timed(name, optimizer.step)
                    optimizer.zero_grad()

        for held in (False, True):
            for _ in range(3 if held else 6):
                train_step()
        schedule.drain()
        for what, times in seconds[True].items():
            # The host's own time, after the first steps.
            free = statistics.median(seconds[False][what][-3:])
            yield f"host in {what}", [statistics.median(times), free, dict(lines[what])]


def judge_host(name: str, values: list[Any], place: Place) -> Row:
    """The host must take no longer while the device is blocked."""
    held, free, _ = max(values, key=lambda value: value[0] - value[1])
    lines = sorted({line for *_, of_rank in values for line in of_rank})
    found = f"{1e3 * held:.0f} ms ({1e3 * free:.0f} else)" + "".join(f"; waits in {line}" for line in lines)
    if not place.gpus:
        return Row(name, "does not wait for the device", f"{found}; it has none", NOT_CHECKED)
    expected = "no longer while the device is blocked for 250 ms, no synchronization"
    return Row(name, expected, found, OK if held - free < 0.12 and not lines else WRONG)
