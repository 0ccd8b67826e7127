"""Pipelines whose stages are under FSDP2, or plain.

The model is `build_model`: four layers, some of whose parameters do not divide by two, and a norm and
a head at the end.
"""

from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor import DTensor

from tests.support.recurrence import WIDTH, build_data, loss_fn, run_batch
from titan_async.pipelining import ScheduleAsync2BW

LAYERS = 4
BATCHES = 5
MICROBATCHES = 4
MAX_NORM = 0.05  # clips every batch
EVERY = range(BATCHES)

MESHES = {
    ("pp",): (2,),
    ("pp", "one"): (4, 1),
    ("pp", "dp"): (2, 2),
    ("pp", "replicate", "shard"): (2, 2, 2),
    ("pp", "dp", "tp"): (2, 2, 2),
}
meshes: dict[tuple[str, ...], DeviceMesh] = {}


def make_meshes(rank: int, group: Any) -> None:
    """Creates the meshes; all ranks participate in the creation of each group."""
    for names, shape in MESHES.items():
        if torch.Size(shape).numel() > dist.get_world_size():
            continue
        ranks = torch.arange(torch.Size(shape).numel()).view(shape)
        meshes[names] = DeviceMesh("cpu", ranks, mesh_dim_names=names)


class Layer(nn.Module):
    """Two matrices, vectors, and a scalar; all shards of the scalar except one are empty."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x * self.scale)))


class Stage(nn.Module):
    """Parts of the model, with their names in the whole model."""

    def __init__(self, parts: Iterable[tuple[str, nn.Module]]) -> None:
        super().__init__()
        for name, part in parts:
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return x


def build_model(hidden: int = 5, frozen: bool = False, dtype: torch.dtype = torch.float64) -> Stage:
    """The whole model; an odd `hidden` is not divisible by the number of shards."""
    torch.manual_seed(0)
    parts: list[tuple[str, nn.Module]] = [(str(index), Layer(hidden)) for index in range(LAYERS)]
    parts += [("norm", nn.LayerNorm(WIDTH)), ("head", nn.Linear(WIDTH, WIDTH))]
    model = Stage(parts).to(dtype)
    if frozen:
        for layer in list(model.children())[:LAYERS]:
            layer.up.weight.requires_grad_(False)
            layer.scale.requires_grad_(False)
        model.norm.requires_grad_(False)
    return model


def cut(model: Stage, stage: int, stages: int) -> Stage:
    """One stage of the model: its share of the layers, on the last one also norm and head."""
    parts = list(model.named_children())
    per_stage = LAYERS // stages
    end = len(parts) if stage == stages - 1 else (stage + 1) * per_stage
    return Stage(parts[stage * per_stage : end])


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # One tensor at a time, because they are on different meshes with tensor parallelism.
    return torch.optim.AdamW(parameters, lr=0.02, foreach=False)


def shard(module: Any, mesh: DeviceMesh, **options: Any) -> Any:
    """`fully_shard` as Async2BW requires it."""
    return fully_shard(module, mesh=mesh, reshard_after_forward=False, **options)


def shard_each_part(stage: Stage, mesh: DeviceMesh, **options: Any) -> None:
    """Shards every layer, the norm and the head as a separate FSDP group."""
    for part in stage.children():
        shard(part, mesh["dp"], **options)
    shard(stage, mesh["dp"], **options)


def shard_in_bfloat16(stage: Stage, mesh: DeviceMesh) -> None:
    """`shard_each_part` with forward and backward in bfloat16, and gradients in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_each_part(stage, mesh, mp_policy=policy)


class Place(NamedTuple):
    """The stage of a rank, and its share of the data."""

    mesh: DeviceMesh
    stage: int
    stages: int
    share: int
    shares: int


def place(names: tuple[str, ...]) -> Place:
    mesh = meshes[names]
    share, shares = 0, 1
    for name in names:
        if name not in ("pp", "tp"):
            share = share * mesh[name].size() + mesh.get_local_rank(name)
            shares *= mesh[name].size()
    return Place(mesh, mesh.get_local_rank("pp"), mesh["pp"].size(), share, shares)


class Run(NamedTuple):
    """One rank's share of a training run."""

    module: nn.Module
    stage: PipelineStage
    schedule: PipelineScheduleSingle
    optimizer: torch.optim.Optimizer
    inputs: Tensor
    targets: Tensor

    def step(self, batch: int) -> list[float]:
        """Runs one batch; returns the losses of its microbatches, on the last stage."""
        return run_batch(self.schedule.step, self.stage, self.inputs[batch], self.targets[batch])

    def update(self, clip: bool = False) -> list[float]:
        """Applies a delivered gradient, if any; returns its norm if it was clipped."""
        if not self.schedule.gradient_ready:
            return []
        norms = [self.schedule.clip_grad_norm_(MAX_NORM).item()] if clip else []
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norms


def prepare(
    wrap: Callable[[Stage, DeviceMesh], Any],
    names: tuple[str, ...],
    *,
    schedule_class: type = ScheduleAsync2BW,
    **model: Any,
) -> Run:
    """This rank's stage under `wrap`, with its schedule, optimizer and data."""
    where = place(names)
    module = cut(build_model(**model), where.stage, where.stages)
    wrap(module, where.mesh)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)
    pp = where.mesh.get_group("pp")
    stage = PipelineStage(module, where.stage, where.stages, torch.device("cpu"), group=pp)
    schedule = schedule_class(stage, MICROBATCHES, loss_fn=loss_fn)
    inputs, targets = data(where.shares, model.get("dtype", torch.float64))
    share = slice(where.share, None, where.shares)
    return Run(module, stage, schedule, adamw(module.parameters()), inputs[:, share], targets[:, share])


def whole(module: nn.Module) -> dict[str, Tensor]:
    """The module's weights, gathered from its shards."""
    if isinstance(module, FSDPModule):
        assert all(isinstance(p, DTensor) for p in module.parameters()), "unsharded between steps"
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in module.named_parameters()}
    return {name: value.detach().clone() for name, value in whole.items()}


def train(
    rank: int,
    group: Any,
    wrap: Callable[[Stage, DeviceMesh], Any],
    names: tuple[str, ...],
    *,
    clip: Container[int] = (),
    between: Callable[[Run], None] | None = None,
    break_it: Callable[[], Callable[[], None]] | None = None,
    **model: Any,
) -> tuple[dict[str, Tensor], list[list[float]], list[float]]:
    """Weights, losses and norms of a run.

    Args:
        clip: the batches whose gradient is clipped.
        between: called after every step and its update.
        break_it: plants a fault in this process and returns the function that removes it.
    """
    run = prepare(wrap, names, **model)
    losses, norms = [], []
    undo = break_it() if break_it else None
    try:
        for batch in range(BATCHES):
            losses.append(run.step(batch))
            norms += run.update(batch - 1 in clip)
            if between is not None:
                between(run)
        run.schedule.drain()
        norms += run.update(BATCHES - 1 in clip)
    finally:
        if undo is not None:
            undo()
    return whole(run.module), losses, norms


def data(shares: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all shares of the data; microbatch `i` of a share is `i * shares + share`."""
    inputs, targets = build_data(BATCHES, MICROBATCHES * shares)
    return inputs.to(dtype), targets.to(dtype)
