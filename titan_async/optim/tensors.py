"""What the optimizers ask of tensors: whether one fits another, its name, in which dtype to compute, a copy
that depends on the device."""

import torch
from torch import Tensor

from titan_async.local_tensors import as_dtensor, local_part

__all__ = ["at_least_float32", "copy_unless_", "fits", "named", "skips"]


def fits(tensor: Tensor, param: Tensor) -> bool:
    """Whether the local parts of both are the same part of a whole of the same shape."""
    one, other = as_dtensor(tensor), as_dtensor(param)
    return (
        tensor.shape == param.shape
        and local_part(tensor.detach()).shape == local_part(param.detach()).shape
        and (one is None or other is None or one.placements == other.placements)
    )


def named(tensor: Tensor, name: str | None) -> str:
    """``tensor`` in the words of an error message: its name if it has one, and its shape."""
    shape = list(tensor.shape)
    return f"parameter {name!r} of shape {shape}" if name is not None else f"a parameter of shape {shape}"


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """``dtype``, or float32 in place of bfloat16 and float16, which round differences and overflow early."""
    return torch.promote_types(dtype, torch.float32)


def skips(found_inf: Tensor | None) -> Tensor | None:
    """Whether to skip a step, as a scalar on the device; None if that does not depend on the device."""
    return None if found_inf is None else (found_inf != 0).reshape(())


def copy_unless_(skip: Tensor | None, target: Tensor, value: Tensor) -> None:
    """Copy ``value`` to ``target``, which keeps its bits if ``skip``, whatever ``value`` is then."""
    if skip is None:
        target.copy_(value)
    else:
        torch.where(skip, target, value.to(target.dtype), out=target)
