"""Parameters as all layers see them: the part on this rank, and a name that wrappers do not change."""

import sys
from typing import Any, overload

from torch import Tensor

__all__ = ["as_dtensor", "canonical_name", "local_part"]


@overload
def local_part(tensor: Tensor) -> Tensor: ...
@overload
def local_part(tensor: None) -> None: ...
@overload
def local_part(tensor: Tensor | None) -> Tensor | None: ...
def local_part(tensor: Tensor | None) -> Tensor | None:
    """The part of ``tensor`` on this rank, sharing its memory; a plain tensor is its own local part.

    Call it without autograd recording: only then does writing to the result write to the DTensor.
    """
    dtensor = None if tensor is None else as_dtensor(tensor)
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


def canonical_name(name: str) -> str:
    """A parameter's name without what activation checkpointing and `torch.compile` put into it."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
