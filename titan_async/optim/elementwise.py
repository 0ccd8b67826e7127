"""Parts of elementwise updates: compute dtype, cache blocking, steps conditional on the device."""

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["at_least_float32", "blocks", "copy_unless_", "should_skip"]

_BLOCK_NUMEL = 2**16


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """``dtype``, but float32 for bfloat16 and float16, which round differences and overflow early."""
    return torch.promote_types(dtype, torch.float32)


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of corresponding blocks of tensors of one shape; on accelerators, the whole tensors.

    On the CPU, each elementwise operation on a large tensor reads and writes it from memory. Applied block by
    block, several operations do so once. Accelerators prefer few large operations.
    """
    first = tensors[0]
    if first.device.type != "cpu" or first.numel() <= _BLOCK_NUMEL or first.ndim == 0:
        yield tensors
        return
    rows = max(1, _BLOCK_NUMEL * len(first) // first.numel())
    if rows == 1 and first.ndim > 1 and first[0].numel() > _BLOCK_NUMEL:
        for row in zip(*tensors, strict=True):
            yield from blocks(*row)
        return
    yield from zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def should_skip(found_inf: Tensor | None) -> Tensor | None:
    """``found_inf`` as a bool scalar on the device; None if the step does not depend on the device."""
    return None if found_inf is None else (found_inf != 0).reshape(())


def copy_unless_(skip: Tensor | None, target: Tensor, value: Tensor) -> None:
    """Copy ``value`` to ``target``, which keeps its bits if ``skip`` is true, even if ``value`` is NaN."""
    if skip is None:
        target.copy_(value)
    else:
        torch.where(skip, target, value.to(target.dtype), out=target)
