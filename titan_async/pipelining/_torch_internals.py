"""Everything that this layer uses of torch's private pipelining API, for torch 2.11 to 2.14.

`tests/pipelining/test_torch_internals.py` fails when one of these names is gone.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

__all__ = [
    "ParameterWatch",
    "assignment",
    "forget_input_gradients",
    "group_of",
    "has_hooks",
    "identity_of",
    "initialize_stage",
    "is_fully_sharded",
    "own_output",
    "prepare_buffers",
    "reshard",
    "split_microbatches",
    "unsupported_wrapper",
]


def initialize_stage(
    schedule: PipelineScheduleSingle, args: tuple, kwargs: dict, target: Any, loss_kwargs: dict | None
) -> None:
    """Let torch infer the shapes between stages and allocate receive buffers, if that is still to be done."""
    if schedule._stage_forward_initialized and schedule._stage_backward_initialized == schedule._has_backward:
        return
    before = [
        (module, name, buffer, buffer.clone())
        for module in schedule._stage.submod.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    if hasattr(schedule, "_initialize_pp_stages"):
        schedule._initialize_stage(args, kwargs, target, loss_kwargs)
    else:
        cast(Any, schedule)._initialize_stage(args, kwargs)
    # Its forward may have replaced buffers, which torch does not undo, or have written to them, which it
    # undoes from 2.14 on.
    for module, name, buffer, value in before:
        if getattr(module, name) is not buffer:
            setattr(module, name, buffer)
        with torch.no_grad():
            buffer.copy_(value)


def group_of(stage: _PipelineStageBase) -> dist.ProcessGroup:
    """The process group over which the stages of a pipeline lie."""
    return stage.group if stage.group is not None else distributed_c10d._get_default_group()


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


def prepare_buffers(stage: _PipelineStageBase, slots: int) -> None:
    """Keep the receive buffers of the first `slots` chunks, where torch makes one for each microbatch.

    They become contiguous, as a receive must be; torch gives them the strides of what will be sent.
    """
    infos = [stage.args_recv_info]
    if stage.has_backward:
        infos.append(stage.grad_recv_info)
    for info in infos:
        for chunk_id in [chunk_id for chunk_id in info if chunk_id >= slots]:
            del info[chunk_id]
        for received in (each for chunk in info.values() for each in chunk):
            buffer = getattr(received, "buffer", None)
            if buffer is not None and not buffer.is_contiguous():
                received.buffer = torch.empty(buffer.shape, dtype=buffer.dtype, device=buffer.device)


def forget_input_gradients(stage: _PipelineStageBase, chunk_id: int) -> None:
    """Clear the gradient of a receive buffer, which is an autograd leaf, before the buffer is used again."""
    for info in stage.args_recv_info[chunk_id]:
        buffer = getattr(info, "buffer", None)
        if buffer is not None:
            buffer.grad = None


def own_output(stage: _PipelineStageBase, chunk_id: int) -> None:
    """Copy what the last stage returns of a chunk if it lies in its receive buffer, which is used again."""
    received = (getattr(info, "buffer", None) for info in stage.args_recv_info[chunk_id])
    buffers = {buffer.untyped_storage().data_ptr() for buffer in received if buffer is not None}

    def own(value: Any) -> Any:
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            return value.clone() if value.untyped_storage().data_ptr() in buffers else value
        return value

    if buffers:
        stage.output_chunks[-1] = tree_map(own, stage.output_chunks[-1])


def reshard(module: nn.Module) -> None:
    """Free the unsharded parameters of FSDP and let the module show its shards."""
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether a hook is to run on the gradient of `parameter`, or after it has been accumulated."""
    hooks = cast(Any, parameter)
    return bool(hooks._backward_hooks or hooks._post_accumulate_grad_hooks)


def identity_of(tensor: Tensor | None) -> tuple[int, int] | None:
    """Which tensor it is, and how often it has been written to."""
    return None if tensor is None else (id(tensor), tensor._version)


class ParameterWatch:
    """Sees whether the trainable parameters of a module are still the same, in a tenth of the time that
    `module.parameters()` takes."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._before = self._look()

    def changed(self) -> bool:
        """Whether a parameter has been replaced, frozen, unfrozen, added or removed, or a submodule so."""
        return self._look() != self._before

    def _look(self) -> tuple[list[int], int]:
        trainable = [
            id(parameter)
            for module in self._modules
            for parameter in module._parameters.values()
            if parameter is not None and parameter.requires_grad
        ]
        return trainable, sum(len(module._modules) for module in self._modules)


def assignment(places: Iterable[tuple[nn.Module, str, nn.Parameter]]) -> Callable[[], None]:
    """A function that assigns parameters in the places of others, without the checks of `nn.Module`.

    A module with an assignment of its own gets them that way: RNNs keep a list of their weights.
    """
    checked, unchecked = [], []
    for module, name, parameter in places:
        if type(module).__setattr__ is nn.Module.__setattr__:
            unchecked.append((module._parameters, name, parameter))
        else:
            checked.append((module, name, parameter))

    def assign() -> None:
        for parameters, name, parameter in unchecked:
            parameters[name] = parameter
        for module, name, parameter in checked:
            setattr(module, name, parameter)

    return assign


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` or `replicate` has been applied to the module or a part of it."""
    return any(isinstance(m, FSDPModule) for m in module.modules())


def unsupported_wrapper(module: nn.Module) -> str | None:
    """What makes `module` neither plain nor under FSDP2, None if nothing does."""
    if any(isinstance(m, DistributedDataParallel) for m in module.modules()):
        return "DistributedDataParallel"
    if not is_fully_sharded(module) and any(isinstance(p, DTensor) for p in module.parameters()):
        return "DTensor parameters outside of fully_shard"
    return None
