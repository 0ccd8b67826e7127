"""Symmetric matrix products, of which only half of the entries are computed.

On the CPU large products are computed in row blocks, and the lower half is copied from the upper. On NVIDIA
GPUs of compute capability 9 and newer the kernels of the optional package ``quack-kernels`` do the same in
one launch. Other products are torch's.
"""

import functools
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["symmetric_addmm", "symmetric_mm", "symmetric_time_fraction"]

# Below, the overhead of blocking exceeds its savings.
_MIN_SIZE_FOR_BLOCKS = 384
_BLOCK_ROWS = 128
_MAX_BLOCKS = 8
# Overhead of blocking, as measured, as a fraction of the time of a full product.
_BLOCKING_OVERHEAD = 0.2
# The tile size of the GPU kernels.
_MIN_SIZE_FOR_KERNELS = 256


def symmetric_mm(a: Tensor, b: Tensor) -> Tensor:
    """The product a @ b, which must be symmetric.

    Args:
        a: ``[size, inner]`` or ``[batch, size, inner]``.
        b: ``[inner, size]`` or ``[batch, inner, size]``, of the same dtype.
    """
    if _uses_blocks(a):
        return _blocked(None, a, b, 0.0, 1.0)
    if _uses_kernels(a):
        product: Tensor = _gemm_symmetric()(a, b)
        return product
    return a @ b


def symmetric_addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float = 1.0) -> Tensor:
    """beta c + alpha a @ b, where c and the result are symmetric; shapes as in `symmetric_mm`."""
    if _uses_blocks(a):
        return _blocked(c, a, b, beta, alpha)
    if _uses_kernels(a):
        product: Tensor = _gemm_symmetric()(a, b, C=c, beta=beta, alpha=alpha)
        return product
    return (torch.addmm if a.ndim == 2 else torch.baddbmm)(c, a, b, beta=beta, alpha=alpha)


def symmetric_time_fraction(x: Tensor) -> float:
    """The approximate time of the symmetric product x @ x.mT, relative to a full product."""
    if _uses_kernels(x):
        return 0.5
    if not _uses_blocks(x):
        return 1.0
    blocks = _num_blocks(x.shape[-2])
    return (blocks + 1) / (2 * blocks) + _BLOCKING_OVERHEAD


def _uses_blocks(a: Tensor) -> bool:
    return a.device.type == "cpu" and a.ndim == 2 and a.shape[0] >= _MIN_SIZE_FOR_BLOCKS


def _num_blocks(size: int) -> int:
    return min(_MAX_BLOCKS, size // _BLOCK_ROWS)


def _blocked(c: Tensor | None, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    """Compute blocks of rows from the diagonal to the right, and copy them below the diagonal."""
    size = len(a)
    out = a.new_empty(size, size)
    blocks = _num_blocks(size)
    for start, stop in pairwise(size * index // blocks for index in range(blocks + 1)):
        block = out[start:stop, start:]
        if c is None:
            torch.mm(a[start:stop], b[:, start:], out=block)
        else:
            torch.addmm(c[start:stop, start:], a[start:stop], b[:, start:], beta=beta, alpha=alpha, out=block)
        out[stop:, start:stop] = block[:, stop - start :].mT
    return out


def _uses_kernels(a: Tensor) -> bool:
    return (
        a.device.type == "cuda"
        and a.dtype in (torch.bfloat16, torch.float16)
        and a.shape[-2] >= _MIN_SIZE_FOR_KERNELS
        # The kernels need rows that are aligned to 16 bytes.
        and a.shape[-1] % 8 == 0
        and a.shape[-2] % 8 == 0
        and torch.cuda.get_device_capability(a.device)[0] >= 9
        and _gemm_symmetric() is not None
    )


@functools.cache
def _gemm_symmetric() -> Any:
    """The kernel, or None if its package is not installed."""
    try:
        from quack.gemm_interface import gemm_symmetric
    except ImportError:
        return None
    return gemm_symmetric
