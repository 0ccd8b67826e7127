"""The schedules that the benchmarks compare, each in a typical training step."""

import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from titan_async.pipelining import ScheduleAsync2BW

__all__ = [
    "KEPT",
    "SCHEDULES",
    "Pipeline",
    "build_pipeline",
    "clip_over_pipeline",
    "forget",
    "squared_error",
    "time_steps",
]

MAX_NORM = 1.0

KEPT: dict[Hashable, Any] = {}
"""In a worker: the pipelines that are ready to be measured."""


def forget(rank: int, group: dist.ProcessGroup) -> None:
    """Removes all pipelines of a worker."""
    KEPT.clear()


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule class and its placement of stages."""

    build: Callable[..., Any]
    stages_per_rank: int = 1
    tied: bool = False
    """Whether `module.tied` of the first and of the last stage are tied."""
    v_shaped: bool = False
    """Whether the second stages are on the ranks in reverse order; otherwise all are in the same order."""

    def stage_indices(self, rank: int, size: int) -> list[int]:
        if self.v_shaped:
            return [rank, 2 * size - 1 - rank]
        return [rank + size * i for i in range(self.stages_per_rank)]


SCHEDULES = {
    "GPipe": ScheduleKind(ScheduleGPipe),
    "1F1B": ScheduleKind(Schedule1F1B),
    "Interleaved1F1B": ScheduleKind(ScheduleInterleaved1F1B, 2),
    "InterleavedZeroBubble": ScheduleKind(ScheduleInterleavedZeroBubble, 2),
    "ZBVZeroBubble": ScheduleKind(ScheduleZBVZeroBubble, 2, v_shaped=True),
    "DualPipeV": ScheduleKind(ScheduleDualPipeV, 2, v_shaped=True),
    "Async2BW": ScheduleKind(ScheduleAsync2BW),
    "Async2BW, tied": ScheduleKind(ScheduleAsync2BW, tied=True),
}


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def clip_over_pipeline(
    parameters: list[nn.Parameter], group: dist.ProcessGroup, max_norm: float = MAX_NORM
) -> None:
    """Clips by the norm over all stages, with a blocking all-reduce as in torchtitan."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    squared = torch.nn.utils.get_total_norm(gradients) ** 2
    dist.all_reduce(squared, group=group)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, squared.sqrt())


@dataclass
class Pipeline:
    """One rank's part of a pipeline, which trains on the same batch repeatedly."""

    schedule: Any
    stages: list[PipelineStage]
    optimizer: torch.optim.Optimizer
    group: dist.ProcessGroup
    inputs: Tensor
    targets: Tensor

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def train_step(self) -> None:
        """One batch: forward, backward, clip, update."""
        args = (self.inputs,) if any(stage.is_first for stage in self.stages) else ()
        target = self.targets if any(stage.is_last for stage in self.stages) else None
        self.schedule.step(*args, target=target, return_outputs=False)
        if not isinstance(self.schedule, ScheduleAsync2BW):
            clip_over_pipeline(self.parameters, self.group)
        elif self.schedule.gradient_ready:
            self.schedule.clip_grad_norm_(MAX_NORM)
        else:
            return
        self.optimizer.step()
        self.optimizer.zero_grad()

    def warm_up(self) -> None:
        """Runs the steps in which torch infers shapes and Async2BW creates process groups for the norm."""
        for _ in range(2):
            self.train_step()
        self.finish()

    def finish(self) -> None:
        """Drains the pipeline, so that another one can use the group."""
        if isinstance(self.schedule, ScheduleAsync2BW):
            self.schedule.drain()
            self.optimizer.zero_grad()


def time_steps(
    pipeline: Any, steps: int, warm_up: int = 1, synchronize: Callable[[], object] = lambda: None
) -> float:
    """Seconds per step after `warm_up` steps and without the drain.

    Args:
        pipeline: a `Pipeline`, or an object with its `train_step` and `finish`.
        steps: number of timed steps.
        warm_up: steps before them. No barrier follows: in a steady state the stages of Async2BW are at
            different points of the batch, and a barrier would drain the pipeline.
        synchronize: waits for the device; called at the start and at the end of the timing.
    """
    for _ in range(warm_up):
        pipeline.train_step()
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        pipeline.train_step()
    synchronize()
    seconds = (time.perf_counter() - start) / steps
    pipeline.finish()
    return seconds


def build_pipeline(
    name: str,
    group: dist.ProcessGroup,
    n_microbatches: int,
    make_modules: Callable[[list[int], int], Iterable[nn.Module]],
    batch: tuple[Tensor, Tensor],
    loss_fn: Callable[[Tensor, Tensor], Tensor] = squared_error,
    lookahead: int | None = None,
    **options: Any,
) -> Pipeline | None:
    """One rank's part of the pipeline `name`, or None if the schedule refuses this number of microbatches.

    Args:
        make_modules: returns the modules of this rank, given their stage indices and the number of stages.
        batch: inputs and targets, split along dimension 0 into `n_microbatches`, on the stages' device.
        lookahead: of Async2BW; None for its default.
        options: further arguments of the schedule.
    """
    kind, rank = SCHEDULES[name], dist.get_rank(group)
    indices = kind.stage_indices(rank, group.size())
    count = kind.stages_per_rank * group.size()
    modules = list(make_modules(indices, count))
    stages = [
        PipelineStage(module, index, count, batch[0].device, group=group)
        for index, module in zip(indices, modules, strict=True)
    ]
    if lookahead is not None:
        options["lookahead"] = lookahead
    if kind.tied and (stages[0].is_first or stages[0].is_last):
        options["tied_parameters"] = [modules[0].tied]
    try:
        schedule = kind.build(
            stages[0] if kind.stages_per_rank == 1 else stages, n_microbatches, loss_fn=loss_fn, **options
        )
    except ValueError:
        return None
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=1e-4)
    return Pipeline(schedule, stages, optimizer, group, *batch)
