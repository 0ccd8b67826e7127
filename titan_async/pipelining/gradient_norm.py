"""The global norm of a batch's gradient, reduced while the pipeline goes on.

A norm that is waited for where it is needed costs a bubble at every batch: stages finish a batch one after
another. Here its all-reduce starts when a stage's gradient is complete, on a process group of its own.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.tensor import DTensor, Replicate

from titan_async._group_internals import joint_group
from titan_async.local_tensors import local_part
from titan_async.pipelining._torch_internals import group_of
from titan_async.pipelining.side_stream import SideStream

__all__ = ["GradientNorm", "NormReducer", "clip_", "connect_ranks", "share_of_squares"]


class GradientNorm:
    """A norm on its way: the sum of squares over all ranks that hold a part of the gradient."""

    def __init__(self, squares: Tensor, group: dist.ProcessGroup, aside: SideStream) -> None:
        self._squares = squares
        self._work = dist.all_reduce(squares, group=group, async_op=True)
        self._aside = aside

    def value(self) -> Tensor:
        """The norm, a float64 scalar on the gradient's device. Lets the current stream wait for it."""
        self._wait()
        return self._squares.sqrt()

    def is_finite(self) -> bool:
        """Whether no rank's gradient holds an infinity or a NaN. Waits for the norm and nothing else."""
        # The current stream may be full of forwards and backwards that come first.
        with self._aside.running(after_current=False):
            self._wait()
            return bool(self._squares.isfinite())

    def _wait(self) -> None:
        assert self._work is not None
        self._work.wait()


class NormReducer:
    """Starts the reductions of gradient norms. Making one is a collective of the ranks that it spans.

    Args:
        stage: the stage of this rank. The pipeline's group, and the meshes of the parameters of its module,
            say which ranks hold parts of the gradient.
    """

    def __init__(self, stage: _PipelineStageBase) -> None:
        self._device = stage.device
        self._group, self._ranks_of_a_stage = connect_ranks(stage)
        self._aside = SideStream(stage.device)

    def start(self, gradients: Sequence[Tensor | None]) -> GradientNorm:
        """Start reducing the norm of one batch's gradient, of which `gradients` are this rank's part.

        The gradients are there for the current stream.
        """
        squares = share_of_squares(gradients, self._ranks_of_a_stage, self._device)
        return GradientNorm(squares, self._group, self._aside)


def connect_ranks(stage: _PipelineStageBase) -> tuple[dist.ProcessGroup, int]:
    """A new group of all ranks that hold a part of any of the pipeline's stages, and how many hold each.

    A collective of these ranks.
    """
    group, mine = group_of(stage), {dist.get_rank()}
    for parameter in stage.submod.parameters():
        if isinstance(parameter, DTensor):
            mine.update(parameter.device_mesh.mesh.flatten().tolist())
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    ranks = set().union(*everyone)
    joint = joint_group(ranks)
    # Connects now: later, a rank that is the first to start a collective must not wait for the others.
    dist.all_reduce(torch.zeros(1, device=stage.device), group=joint)
    return joint, len(ranks) // len(everyone)


def share_of_squares(tensors: Sequence[Tensor | None], ranks_of_a_stage: int, device: torch.device) -> Tensor:
    """What this rank has to add for the sum over all ranks to be that of the squares of all stages' tensors.

    Args:
        tensors: of this rank's stage, plain ones or DTensors.
        ranks_of_a_stage: ranks that hold a stage, of which each tensor is split over some and the same on
            the others.
        device: of the result, a float64 scalar.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    shares: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        part = local_part(tensor)
        if tensor is not None and part is not None:
            dtype = torch.promote_types(part.dtype, torch.float32)
            shares.setdefault((_parts(tensor), dtype), []).append(part)
    for (parts, dtype), alike in shares.items():
        norms = torch.stack(torch._foreach_norm(alike, 2, dtype=dtype)).double()
        # The other ranks of the stage hold the same parts, also those outside of the tensor's mesh.
        squares += norms.square().sum() * parts / ranks_of_a_stage
    return squares


def clip_(gradients: Sequence[Tensor | None], max_norm: float, norm: Tensor) -> None:
    """Scale `gradients`, of norm `norm`, to at most `max_norm`, as `torch.nn.utils.clip_grad_norm_`.

    Each rank scales its own parts: DTensors of different meshes cannot be scaled together.
    """
    parts = [part for part in map(local_part, gradients) if part is not None]
    if parts:
        torch._foreach_mul_(parts, (max_norm / (norm + 1e-6)).clamp(max=1.0))


def _parts(gradient: Tensor) -> int:
    """Into how many parts a gradient is split over the ranks of its stage."""
    parts = 1
    if isinstance(gradient, DTensor):
        for placement, size in zip(gradient.placements, gradient.device_mesh.shape, strict=True):
            if placement.is_partial():
                raise NotImplementedError(f"a gradient with the placement {placement} has no norm yet")
            if not isinstance(placement, Replicate):
                parts *= size
    return parts
