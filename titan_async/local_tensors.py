"""Local shards of DTensors, and parameter names without wrappers' prefixes."""

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
    """The local shard of a DTensor, which shares its memory; a plain tensor is returned unchanged.

    Call it under `torch.no_grad()` to modify the DTensor through the result.
    """
    dtensor = None if tensor is None else as_dtensor(tensor)
    if dtensor is None:
        return tensor
    local: Tensor = dtensor.to_local()
    return local


def as_dtensor(tensor: Tensor) -> Any:
    """``tensor`` if it is a DTensor, else None."""
    # A DTensor only exists if its module is imported. Not importing it here saves 0.4 s at start-up, and
    # supports builds of torch without torch.distributed.
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(tensor, module.DTensor):
        return None
    return tensor


def canonical_name(name: str) -> str:
    """A parameter's name without the prefixes of activation checkpointing and `torch.compile`."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
