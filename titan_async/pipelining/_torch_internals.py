"""All uses of torch's private pipelining API in this layer, for torch 2.11 to 2.14.

`tests/pipelining/test_torch_internals.py` fails when one of these names is removed.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.microbatch import TensorChunkSpec, split_args_kwargs_into_chunks
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from titan_async.local_tensors import local_part

__all__ = [
    "ParameterWatch",
    "WithoutFlexKernels",
    "allocate_buffers",
    "assignment",
    "check_microbatches",
    "check_target_spec",
    "check_wrapper",
    "clear_chunks",
    "expected_outputs",
    "generated_inputs",
    "gradients_to_send",
    "group_of",
    "has_compiled_parts",
    "has_hooks",
    "identity_of",
    "initialize_stage",
    "is_fully_sharded",
    "is_initialized",
    "keystr",
    "outputs_to_send",
    "prepare_buffers",
    "process_group",
    "release_buffers",
    "reset_shape_inference",
    "reshard",
    "split_microbatches",
    "tree_flatten_with_path",
    "undone",
]


def process_group(name: str) -> dist.ProcessGroup:
    """The process group of that name, which operators take instead of a group."""
    return cast(Any, distributed_c10d)._resolve_process_group(name)


def initialize_stage(
    schedule: PipelineScheduleSingle, args: tuple, kwargs: dict, target: Any, loss_kwargs: dict | None
) -> None:
    """Let torch infer the shapes between stages and allocate receive buffers, unless it has already."""
    if is_initialized(schedule):
        return
    with undone(schedule._stage.submod):
        if hasattr(schedule, "_initialize_pp_stages"):
            schedule._initialize_stage(args, kwargs, target, loss_kwargs)
        else:
            reset_shape_inference(schedule)
            cast(Any, schedule)._initialize_stage(args, kwargs)


@contextmanager
def undone(module: nn.Module) -> Iterator[None]:
    """Restore the buffers and `.grad` of `module` after the forwards and backwards inside.

    These may replace buffers, which torch's inference does not undo, or write to them, which it undoes from
    2.14 on. Losses that run backwards themselves accumulate gradients.
    """
    before = [
        (submodule, name, buffer, buffer.clone())
        for submodule in module.modules()
        for name, buffer in submodule.named_buffers(recurse=False, remove_duplicate=False)
    ]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    yield
    for submodule, name, buffer, value in before:
        if getattr(submodule, name) is not buffer:
            setattr(submodule, name, buffer)
        with torch.no_grad():
            buffer.copy_(value)
    for parameter, gradient in gradients:
        parameter.grad = gradient


class WithoutFlexKernels(TorchFunctionMode):
    """Replaces FlexAttention by outputs of the right shapes that depend on all inputs.

    FlexAttention is meant to be compiled. Run eagerly it materializes all scores of all heads, 8 GB and more
    for sequences of 8192.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.higher_order.flex_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = args[:3]
        nothing = 0 * (query.sum() + key.sum() + value.sum())
        out = query.new_zeros(*query.shape[:-1], value.shape[-1]) + nothing
        rows = query.new_zeros(query.shape[:-1], dtype=torch.float32)
        return out, rows, rows


def has_compiled_parts(module: nn.Module) -> bool:
    """Whether `module` or a part of it is compiled, by `nn.Module.compile` or `torch.compile`."""
    return any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in module.modules())


@contextmanager
def generated_inputs(stage: _PipelineStageBase, slot: int) -> Iterator[None]:
    """Fill the receive buffers of `slot` with random activations and zero gradients."""
    gradients = stage.grad_recv_info[slot] if stage.has_backward else ()
    for infos in (stage.args_recv_info[slot], gradients):
        allocate_buffers(infos, stage.device)
        for info in infos:
            buffer = getattr(info, "buffer", None)
            if buffer is not None:
                with torch.no_grad():
                    buffer.zero_()
                    if infos is not gradients and buffer.dtype.itemsize > 1 and buffer.is_floating_point():
                        buffer.normal_()
    yield
    release_buffers(stage.args_recv_info[slot])
    release_buffers(gradients)


def clear_chunks(stage: _PipelineStageBase) -> None:
    """Drop the outputs of all forwards and backwards. Nothing may be in flight."""
    stage.fwd_cache.clear()
    stage.bwd_cache.clear()
    stage.output_chunks.clear()


def group_of(stage: _PipelineStageBase) -> dist.ProcessGroup:
    """The process group of the pipeline."""
    return stage.group if stage.group is not None else distributed_c10d._get_default_group()


def split_microbatches(
    schedule: PipelineScheduleSingle,
    args: tuple,
    kwargs: dict,
    target: Any,
    arg_mbs: list | None,
    kwarg_mbs: list | None,
    target_mbs: list | None,
    target_chunk_spec: Any,
) -> tuple[list, list, list | None]:
    """Split whole-batch inputs into one entry per microbatch, or check inputs that are already split."""
    if arg_mbs is None and kwarg_mbs is None and target_mbs is None:
        try:
            arg_mbs, kwarg_mbs = schedule._split_inputs(args, kwargs)
            if target is not None:
                specs = None if target_chunk_spec is None else (target_chunk_spec,)
                parts, _ = split_args_kwargs_into_chunks((target,), None, schedule._n_microbatches, specs)
                target_mbs = [part for (part,) in parts]
        except AssertionError as error:
            raise ValueError(f"the batch cannot be split into microbatches: {error}") from error
    elif args or kwargs or target is not None:
        raise ValueError("whole-batch and pre-split inputs cannot be mixed; pass one kind")
    for name, microbatches, kind in (("arg_mbs", arg_mbs, tuple), ("kwarg_mbs", kwarg_mbs, dict)):
        for index, each in enumerate(microbatches or ()):
            if not isinstance(each, kind):
                raise TypeError(f"{name}[{index}] must be a {kind.__name__} but is a {type(each).__name__}")
    arg_mbs, kwarg_mbs = check_microbatches(schedule, arg_mbs, kwarg_mbs, target_mbs)
    return arg_mbs, kwarg_mbs, target_mbs


def check_microbatches(
    schedule: PipelineScheduleSingle, arg_mbs: list | None, kwarg_mbs: list | None, target_mbs: list | None
) -> tuple[list, list]:
    """Check that there is an entry for each microbatch, and add empty ones for inputs that are not given."""
    return schedule._check_inputs(arg_mbs, kwarg_mbs, target_mbs)


def check_target_spec(args_chunk_spec: tuple | None, kwargs_chunk_spec: dict | None) -> None:
    """Refuse inputs that are split along another dimension than 0, where the target's is not given."""
    specs = tree_leaves((args_chunk_spec, kwargs_chunk_spec))
    other = {spec.split_dim for spec in specs if isinstance(spec, TensorChunkSpec)} - {0}
    if other:
        raise ValueError(
            f"inputs are split along dimension {min(other)}, so the target needs a target_chunk_spec: "
            "pass TensorChunkSpec(0) if its dimension 0 is the batch"
        )


def prepare_buffers(stage: _PipelineStageBase, slots: int) -> None:
    """Create receive infos for `slots` chunks, without the buffers that torch has allocated.

    torch creates them for the microbatches of one batch, which may be more or fewer.

    torch receives into the same buffer in each batch, although it is the module's input and an autograd leaf:
    hooks would accumulate on it, and an input that a module keeps would change.
    """
    # The outputs of a traced stage may skip the next one, for which there are no channels.
    assert stage.is_last or all(to == [stage.stage_index + 1] for to in stage.act_send_info.values())
    stage.chunks = max(stage.chunks or 0, slots)  # torch checks ids against it
    infos = [stage.args_recv_info]
    if stage.has_backward:
        infos.append(stage.grad_recv_info)
    for info in infos:
        for chunk_id in [chunk_id for chunk_id in info if chunk_id >= slots]:
            del info[chunk_id]
        for chunk_id in range(len(info), slots):
            info[chunk_id] = tuple(map(copy.copy, info[0]))
        for chunk in info.values():
            release_buffers(chunk)


def allocate_buffers(infos: Iterable[Any], device: torch.device) -> list[Tensor]:
    """Allocate new receive buffers for one microbatch, contiguous as a receive needs, and return them."""
    buffers = []
    for info in infos:
        if getattr(info, "buffer", None) is not None:
            info.buffer = _empty_like(info.buffer, device)
            buffers.append(info.buffer)
    return buffers


def release_buffers(infos: Iterable[Any]) -> None:
    """Drop the references to received tensors, and keep their shapes and dtypes in meta tensors."""
    for info in infos:
        if getattr(info, "buffer", None) is not None:
            if not hasattr(info, "released"):  # our attribute; torch creates new infos for other shapes
                info.released = _empty_like(info.buffer, torch.device("meta"))
            info.buffer = info.released


def is_initialized(schedule: PipelineScheduleSingle) -> bool:
    """Whether torch has inferred shapes for training or evaluation, whichever is next."""
    return bool(
        schedule._stage_forward_initialized and schedule._stage_backward_initialized == schedule._has_backward
    )


def _empty_like(buffer: Tensor, device: torch.device) -> Tensor:
    # Before 2.14 the buffer itself decides whether the received tensor requires a gradient.
    return torch.empty(buffer.shape, dtype=buffer.dtype, device=device, requires_grad=buffer.requires_grad)


def reset_shape_inference(schedule: PipelineScheduleSingle) -> None:
    """Make the next `initialize_stage` infer shapes again. No microbatch may be in flight."""
    schedule._stage_forward_initialized = schedule._stage_backward_initialized = False
    stage = cast(Any, schedule._stage)
    stage.grad_send_info = None
    if hasattr(stage, "inputs_meta"):  # before 2.14
        stage.inputs_meta = stage._outputs_meta = None


def expected_outputs(stage: _PipelineStageBase) -> list[tuple[torch.Size, torch.dtype]]:
    """Shapes and dtypes of the local tensors that the next stage receives for a microbatch."""
    if hasattr(stage, "_stage_meta"):
        outputs = stage._stage_meta.outputs
    else:
        outputs = cast(Any, stage).get_outputs_meta()
    return [(output.shape, output.dtype) for output in outputs or ()]


def outputs_to_send(stage: _PipelineStageBase, chunk_id: int) -> list[Tensor]:
    """The outputs of a forward, contiguous as a send requires.

    In training, outputs that alias an input, a parameter (a tied weight) or a buffer are cloned: the send may
    complete as late as in the next step, after an optimizer has written to them in place.
    """
    outputs, inputs = stage.fwd_cache[chunk_id]
    sent = [local_part(output.detach()).contiguous() for output in outputs]
    storages: set[int] = set()
    for index, output in enumerate(outputs):
        base = output._base if output._is_view() else output
        # Computed by this forward, or never written to.
        if base.grad_fn is not None or not stage.has_backward:
            continue
        if not storages:
            tensors = [*filter(torch.is_tensor, inputs), *stage.submod.parameters(), *stage.submod.buffers()]
            storages = {_storage_of(tensor) for tensor in tensors}
        if _storage_of(output) in storages:
            sent[index] = sent[index].clone()
    return sent


def gradients_to_send(stage: _PipelineStageBase, chunk_id: int) -> list[Tensor]:
    """The input gradients of a backward, contiguous as a send requires. Only once."""
    return [op.tensor.contiguous() for op in stage.get_bwd_send_ops(chunk_id)]


def _storage_of(tensor: Tensor) -> int:
    return local_part(tensor.detach()).untyped_storage().data_ptr()


def reshard(module: nn.Module) -> None:
    """Free the unsharded parameters of FSDP and restore the shards."""
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether a hook runs on the gradient of `parameter`, or after its accumulation."""
    hooks = cast(Any, parameter)
    return bool(hooks._backward_hooks or hooks._post_accumulate_grad_hooks)


def identity_of(tensor: Tensor | None) -> tuple[int, int] | None:
    """The tensor's identity and its version counter."""
    return None if tensor is None else (id(tensor), tensor._version)


class ParameterWatch:
    """Detects changes of a module's trainable parameters, in a tenth of the time of `module.parameters()`."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._before = self._look()

    def changed(self) -> bool:
        """Whether a parameter or submodule has been replaced, frozen, unfrozen, added or removed."""
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
    """A function that assigns parameters to module attributes, without the checks of `nn.Module`.

    Modules with their own `__setattr__` are assigned through it: RNNs keep a list of their weights.
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


def check_wrapper(module: nn.Module) -> None:
    """Refuse a module that is neither plain nor under FSDP2."""
    wrapper = None
    if any(isinstance(m, DistributedDataParallel) for m in module.modules()):
        wrapper = "DistributedDataParallel"
    elif not is_fully_sharded(module) and any(isinstance(p, DTensor) for p in module.parameters()):
        wrapper = "DTensor parameters outside of fully_shard"
    if wrapper is not None:
        raise NotImplementedError(
            f"Async2BW does not support a module with {wrapper}; use a plain module or fully_shard, "
            "which also replicates (HSDP)"
        )
