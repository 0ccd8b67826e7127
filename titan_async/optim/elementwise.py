"""Elementwise work in pieces that stay in the processor's cache from one operation to the next.

Several elementwise operations on a large tensor read and write it from memory each time. Done piece by piece,
they do it once. GPUs hide it otherwise, and want few large operations.
"""

from collections.abc import Iterator

from torch import Tensor

__all__ = ["tiles"]

_ELEMENTS = 2**16


def tiles(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of corresponding pieces of tensors of one shape; on other devices than the CPU, the tensors."""
    first = tensors[0]
    if first.device.type != "cpu" or first.numel() <= _ELEMENTS or first.ndim == 0:
        yield tensors
        return
    rows = max(1, _ELEMENTS * len(first) // first.numel())
    if rows == 1 and first.ndim > 1 and first[0].numel() > _ELEMENTS:
        for rows_of_all in zip(*tensors, strict=True):
            yield from tiles(*rows_of_all)
        return
    yield from zip(*(tensor.split(rows) for tensor in tensors), strict=True)
