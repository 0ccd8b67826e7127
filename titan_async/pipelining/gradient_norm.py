"""Clipping by the global gradient norm, whose all-reduce overlaps with the pipeline.

Waiting for the norm at the end of a batch would cost a bubble in every batch, because stages finish a batch
one after another. Instead its all-reduce starts when a stage's gradient is complete, on its own process
group.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.tensor import DTensor, Replicate

from titan_async._group_internals import joint_group
from titan_async.local_tensors import local_part
from titan_async.pipelining._torch_internals import group_of, identity_of
from titan_async.pipelining.side_stream import SideStream

__all__ = ["GradientClipper", "GradientNorm", "NormReducer", "connect_ranks", "share_of_squares"]

_Grads = list[Tensor | None]


class GradientClipper:
    """Clips each batch's gradient on one stage by the global norm.

    The reduction of a batch's norm starts when its gradient is complete. Without any call of `clip` nothing
    is reduced.

    Args:
        stage: the stage of this rank.
        exclude_shared: drops the gradients that another stage counts in the norm.
    """

    def __init__(self, stage: _PipelineStageBase, exclude_shared: Callable[[_Grads], _Grads]) -> None:
        self._stage = stage
        self._exclude_shared = exclude_shared
        self._reducer: NormReducer | None = None
        self._pending: GradientNorm | None = None  # of the gradient to publish next
        self._norm: GradientNorm | None = None  # of the gradient in .grad
        self._published: list[tuple[int, int] | None] | None = None  # tensor identities and versions

    def start(self, grads: _Grads) -> None:
        """Start to reduce the norm of `grads`, which `.grad` will hold after the next `publish`."""
        assert self._pending is None
        if self._reducer is not None:
            self._pending = self._reducer.start(self._exclude_shared(grads))

    def publish(self, grads: _Grads) -> None:
        """Record that `.grad` now holds `grads`."""
        self._norm, self._pending = self._pending, None
        self._published = [identity_of(grad) for grad in grads]

    def clip(self, grads: _Grads, max_norm: float) -> Tensor:
        """Clip `grads`, which `.grad` holds, in place; see `ScheduleAsync2BW.clip_grad_norm_`."""
        if self._reducer is None:
            self._reducer = NormReducer(self._stage)
            self._norm = self._reducer.start(self._exclude_shared(grads))
        if [identity_of(grad) for grad in grads] != self._published:
            raise RuntimeError(
                "the gradient in .grad is not what step() has delivered, so its norm is not known; clip it "
                "once, before you change it"
            )
        assert self._norm is not None
        norm = self._norm.value()
        # As `torch.nn.utils.clip_grad_norm_`, but each rank scales its local tensors: foreach operations do
        # not take DTensors of different meshes.
        local = [part for part in map(local_part, grads) if part is not None]
        if local:
            torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        self._published = None
        return norm

    def is_finite(self) -> bool:
        """Whether the gradient that was clipped last is finite on all ranks."""
        if self._norm is None:
            raise RuntimeError("the norm is not known; call clip_grad_norm_() first")
        return self._norm.is_finite()


class GradientNorm:
    """An asynchronous all-reduce of the sum of squares over all ranks that hold a part of the gradient."""

    def __init__(self, squares: Tensor, group: dist.ProcessGroup, side_stream: SideStream) -> None:
        self._squares = squares
        self._work = dist.all_reduce(squares, group=group, async_op=True)
        self._side_stream = side_stream

    def value(self) -> Tensor:
        """The norm, a float64 scalar on the gradient's device. The current stream waits for it."""
        self._wait()
        return self._squares.sqrt()

    def is_finite(self) -> bool:
        """Whether no rank's gradient holds an infinity or a NaN. Waits for the norm only."""
        # The current stream may have forwards and backwards enqueued before.
        with self._side_stream.running(after_current=False):
            self._wait()
            return bool(self._squares.isfinite())

    def _wait(self) -> None:
        assert self._work is not None
        self._work.wait()


class NormReducer:
    """Starts the all-reduces of gradient norms. The constructor is a collective of the ranks it spans.

    Args:
        stage: the stage of this rank. The ranks that hold parts of the gradient are those of the pipeline's
            process group and of the device meshes of the module's parameters.
    """

    def __init__(self, stage: _PipelineStageBase) -> None:
        self._device = stage.device
        self._group, self._ranks_per_stage = connect_ranks(stage)
        self._side_stream = SideStream(stage.device)

    def start(self, grads: Sequence[Tensor | None]) -> GradientNorm:
        """Start to reduce the norm of one batch's gradient, of which this rank holds `grads`.

        The gradients must be ready on the current stream.
        """
        squares = share_of_squares(grads, self._ranks_per_stage, self._device)
        return GradientNorm(squares, self._group, self._side_stream)


def connect_ranks(stage: _PipelineStageBase) -> tuple[dist.ProcessGroup, int]:
    """A new process group of all ranks that hold a part of any stage, and the number of ranks of a stage.

    A collective of these ranks.
    """
    group, ranks_of_stage = group_of(stage), {dist.get_rank()}
    for parameter in stage.submod.parameters():
        if isinstance(parameter, DTensor):
            ranks_of_stage.update(parameter.device_mesh.mesh.flatten().tolist())
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, ranks_of_stage, group=group)
    ranks = set().union(*gathered)
    joint = joint_group(ranks)
    # Connects now: later, the first rank to start a collective must not wait for the others.
    dist.all_reduce(torch.zeros(1, device=stage.device), group=joint)
    return joint, len(ranks) // len(gathered)


def share_of_squares(tensors: Sequence[Tensor | None], ranks_per_stage: int, device: torch.device) -> Tensor:
    """This rank's contribution to the sum of squares over all stages' tensors.

    Args:
        tensors: of this rank's stage, plain tensors or DTensors.
        ranks_per_stage: ranks that hold a stage. Each tensor is sharded over some of them and replicated over
            the others.
        device: of the result, a float64 scalar.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    by_shards: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        local = local_part(tensor)
        if tensor is not None and local is not None:
            dtype = torch.promote_types(local.dtype, torch.float32)
            by_shards.setdefault((_num_shards(tensor), dtype), []).append(local)
    for (num_shards, dtype), local_tensors in by_shards.items():
        norms = torch.stack(torch._foreach_norm(local_tensors, 2, dtype=dtype)).double()
        # The other ranks of the stage hold replicas, also ranks outside of the tensor's mesh.
        squares += norms.square().sum() * num_shards / ranks_per_stage
    return squares


def _num_shards(grad: Tensor) -> int:
    """The number of shards of a gradient over the ranks of its stage."""
    num_shards = 1
    if isinstance(grad, DTensor):
        for placement, size in zip(grad.placements, grad.device_mesh.shape, strict=True):
            if placement.is_partial():
                raise NotImplementedError(f"a gradient with the placement {placement} has no norm yet")
            if not isinstance(placement, Replicate):
                num_shards *= size
    return num_shards
