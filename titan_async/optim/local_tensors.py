"""What the optimizers need to know about sharded parameters: the part that lies on this rank, and the mesh.

Elementwise work (weight decay, error feedback) runs on the local part whatever the placement.
"""

import sys
from typing import Any

import torch
from torch import Tensor

__all__ = ["as_dtensor", "at_least_float32", "fits", "local_part", "named"]


def local_part(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` on this rank, sharing its memory; a plain tensor is its own local part.

    Call it without autograd recording: only then does writing to the result write to the DTensor.
    """
    dtensor = as_dtensor(tensor)
    if dtensor is None:
        return tensor
    local: Tensor = dtensor.to_local()
    return local


def as_dtensor(tensor: Tensor) -> Any:
    """``tensor`` if it is a DTensor, else None."""
    # A DTensor can only exist once its module is loaded. Not importing it here saves 0.4 s at start-up
    # and keeps builds of torch without torch.distributed working.
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(tensor, module.DTensor):
        return None
    return tensor


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
