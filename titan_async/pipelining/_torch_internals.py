"""Everything that this layer uses of torch's private pipelining API, for torch 2.11 to 2.14.

`tests/pipelining/test_torch_internals.py` fails when one of these names is gone.
"""

from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "canonical_name",
    "forget_input_gradients",
    "has_hooks",
    "identity_of",
    "initialize_stage",
    "post_p2p",
    "split_microbatches",
    "wrapper_of",
]


def initialize_stage(
    schedule: PipelineScheduleSingle, args: tuple, kwargs: dict, target: Any, loss_kwargs: dict | None
) -> None:
    """Let torch infer the shapes between stages and allocate receive buffers, if that is still to be done."""
    if hasattr(schedule, "_initialize_pp_stages"):
        schedule._initialize_stage(args, kwargs, target, loss_kwargs)
    else:
        cast(Any, schedule)._initialize_stage(args, kwargs)


def split_microbatches(
    schedule: PipelineScheduleSingle,
    args: tuple,
    kwargs: dict,
    target: Any,
    arg_mbs: list | None,
    kwarg_mbs: list | None,
    target_mbs: list | None,
) -> tuple[list, list, list | None]:
    """Split whole-batch inputs into one entry a microbatch, or check those that came split."""
    if hasattr(schedule, "_get_microbatch_inputs"):
        split_args, split_kwargs, targets = schedule._get_microbatch_inputs(
            args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs
        )
    elif arg_mbs is None and kwarg_mbs is None and target_mbs is None:
        split_args, split_kwargs = schedule._split_inputs(args, kwargs)
        targets = None if target is None else list(target.tensor_split(schedule._n_microbatches))
    elif args or kwargs or target is not None:
        raise ValueError("whole-batch and pre-split inputs cannot be mixed; pass one kind")
    else:
        split_args, split_kwargs, targets = arg_mbs, kwarg_mbs, target_mbs
    split_args, split_kwargs = schedule._check_inputs(split_args, split_kwargs, targets)
    return split_args, split_kwargs, targets


def post_p2p(ops: list[dist.P2POp]) -> list[dist.Work]:
    """Start a fused batch of sends and receives."""
    return schedules._batch_p2p(ops)


def forget_input_gradients(stage: _PipelineStageBase, chunk_id: int) -> None:
    """Clear the gradient of a receive buffer, which is an autograd leaf, before the buffer is used again."""
    for info in stage.args_recv_info[chunk_id]:
        buffer = getattr(info, "buffer", None)
        if buffer is not None:
            buffer.grad = None


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether a hook is to run on the gradient of `parameter`, or after it has been accumulated."""
    hooks = cast(Any, parameter)
    return bool(hooks._backward_hooks or hooks._post_accumulate_grad_hooks)


def identity_of(tensor: Tensor | None) -> tuple[int, int] | None:
    """Which tensor it is, and how often it has been written to."""
    return None if tensor is None else (id(tensor), tensor._version)


def canonical_name(name: str) -> str:
    """A parameter's name without what activation checkpointing and `torch.compile` put into it."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def wrapper_of(module: nn.Module) -> str | None:
    """The name of the data- or tensor-parallel wrapper of `module`, None for a plain module."""
    if any(isinstance(m, FSDPModule) for m in module.modules()):
        return "fully_shard (FSDP2)"
    if any(isinstance(m, DistributedDataParallel) for m in module.modules()):
        return "DistributedDataParallel"
    if any(isinstance(p, DTensor) for p in module.parameters()):
        return "DTensor parameters"
    return None
