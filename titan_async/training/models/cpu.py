"""Lets a parallelized module start and train on CPU and gloo, for machines without an accelerator."""

from collections.abc import Callable

import torch

from titan_async.config.device import has_accelerator

__all__ = ["adapt_module"]


def adapt_module(module: torch.nn.Module) -> torch.nn.Module:
    """Let a parallelized module start and train as it would on GPUs; unchanged with an accelerator.

    FSDP reduces by plain sums, because gloo has no pre-multiplied sum. Sharded parameters are initialized as
    full tensors: on the CPU every rank draws the same numbers for its shard, so that the experts of two ranks
    would be equal, receive the same tokens, and stay equal.
    """
    if not has_accelerator():
        from torch.distributed.fsdp import FSDPModule

        from titan_async.training._titan_internals import wrap_initializers

        for submodule in module.modules():
            if isinstance(submodule, FSDPModule):
                submodule.set_force_sum_reduction_for_comms(True)
        wrap_initializers(module, _initialize_full)
    return module


def _initialize_full(initialize: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], None]:
    """`initialize` for sharded parameters: each gets its shard of what the full tensor would get."""
    from torch.distributed.tensor import DTensor, Replicate

    def initialize_shard(parameter: torch.Tensor) -> None:
        if not isinstance(parameter, DTensor):
            initialize(parameter)
            return
        mesh = parameter.device_mesh
        full = DTensor.from_local(
            torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device),
            mesh,
            [Replicate()] * mesh.ndim,
        )
        initialize(full)
        # Slices it: `copy_` alone refuses a dimension of fewer entries than ranks.
        parameter.copy_(full.redistribute(placements=parameter.placements))

    return initialize_shard
