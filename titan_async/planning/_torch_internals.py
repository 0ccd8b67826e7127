"""All uses of torch's private names in this layer.

`tests/planning/test_torch_internals.py` fails if one of them is removed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.pipelining._backward import stage_backward_input
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

__all__ = [
    "FLOP_FORMULAS",
    "FakeTensorMode",
    "TorchDispatchMode",
    "address_of",
    "flash_attention",
    "fused_rms_norm",
    "input_backward",
    "observing_resizes",
    "tree_iter",
]


def address_of(storage: torch.UntypedStorage) -> int:
    """An identifier that is unique among live storages."""
    return storage._cdata


def flash_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal attention of [B, heads, L, head size], with grouped queries if there are fewer key-value heads.

    Narrower values, as in multi-head latent attention, are padded, and so cost as much as keys.
    """
    width = v.shape[-1]
    v = torch.nn.functional.pad(v, (0, q.shape[-1] - width)) if width < q.shape[-1] else v
    out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True, scale=scale)[0]
    return out[..., :width]


def fused_rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Tensor:
    """`torch.nn.functional.rms_norm` by the fused kernel of accelerators, also on fake CPU tensors."""
    return torch.ops.aten._fused_rms_norm(x, shape, weight, eps)[0]


def _grouped_mm_flops(a_shape: Any, b_shape: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """FLOPs of [R, K] x [E, K, N], and of [K, R] x [R, N], the gradient of the experts' weights."""
    return 2 * math.prod(a_shape) * b_shape[-1]


def _attention_flops(q_shape: Any, k_shape: Any, v_shape: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(q_shape, k_shape, v_shape)


def _attention_backward_flops(
    grad_shape: Any, q_shape: Any, k_shape: Any, v_shape: Any, *args: Any, **kwargs: Any
) -> int:
    return sdpa_backward_flop_count(grad_shape, q_shape, k_shape, v_shape)


FLOP_FORMULAS = {
    torch.ops.aten._grouped_mm: _grouped_mm_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
"""Formulas for `torch.utils.flop_counter`, for operators that it lacks."""


def input_backward(end: Tensor, gradient: Tensor | None, start: Tensor, part: nn.Module) -> Sequence[Any]:
    """The input half of a split backward; the gradient goes to `start.grad`.

    Returns:
        State for the weight half.
    """
    gradients = None if gradient is None else [gradient]
    return stage_backward_input([end], gradients, [start], part.parameters())[1]


@contextmanager
def observing_resizes(callback: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `callback` whenever FSDP2 allocates or frees the storage of an unsharded parameter."""

    def observed(function: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def call(tensor: Tensor) -> None:
            function(tensor)
            callback(tensor.untyped_storage())

        return call

    targets = [
        (_fsdp_param, "alloc_storage"),
        (_fsdp_param, "free_storage"),
        (_fsdp_param_group, "alloc_storage"),
    ]
    before = [getattr(module, name) for module, name in targets]
    for (module, name), function in zip(targets, before, strict=True):
        setattr(module, name, observed(function))
    try:
        yield
    finally:
        for (module, name), function in zip(targets, before, strict=True):
            setattr(module, name, function)
