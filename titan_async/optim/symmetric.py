"""Products of matrices that are known to be symmetric, of which half the entries need not be computed.

On the CPU large ones are computed by blocks, the lower half copied from the upper. On NVIDIA GPUs of
compute capability 9 and newer the kernels of the optional package ``quack-kernels`` do the same inside one
launch. Everywhere else it is torch's own product.
"""

import functools
from typing import Any

import torch
from torch import Tensor

__all__ = ["symmetric_addmm", "symmetric_mm", "symmetric_share"]

# Below it, what smaller products lose in speed outweighs what half of them saves.
_SMALLEST_BLOCK = 192
# The tile of the GPU kernels.
_SMALLEST_FOR_KERNELS = 256


def symmetric_mm(a: Tensor, b: Tensor) -> Tensor:
    """The product a @ b, which the caller knows to be symmetric.

    Args:
        a: ``[size, inner]`` or ``[batch, size, inner]``.
        b: ``[inner, size]`` or ``[batch, inner, size]``, of the same dtype.
    """
    if _by_blocks(a):
        return _blocks(None, a, b, 0.0, 1.0)
    if _by_kernels(a):
        product: Tensor = _gemm_symmetric()(a, b)
        return product
    return a @ b


def symmetric_addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float = 1.0) -> Tensor:
    """beta c + alpha a @ b, where c and the result are symmetric; shapes as in `symmetric_mm`."""
    if _by_blocks(a):
        return _blocks(c, a, b, beta, alpha)
    if _by_kernels(a):
        product: Tensor = _gemm_symmetric()(a, b, C=c, beta=beta, alpha=alpha)
        return product
    return (torch.addmm if a.ndim == 2 else torch.baddbmm)(c, a, b, beta=beta, alpha=alpha)


def symmetric_share(x: Tensor) -> float:
    """The share of a full product's operations that symmetric ones of x's rows take."""
    if _by_kernels(x):
        return 0.5
    return _share(x.shape[-2]) if _by_blocks(x) else 1.0


def _by_blocks(a: Tensor) -> bool:
    return a.device.type == "cpu" and a.ndim == 2 and a.shape[0] >= 2 * _SMALLEST_BLOCK


def _blocks(c: Tensor | None, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    out = a.new_empty(len(a), len(a))
    _fill(out, c, a, b, beta, alpha, 0, len(a))
    return out


def _fill(
    out: Tensor, c: Tensor | None, a: Tensor, b: Tensor, beta: float, alpha: float, start: int, stop: int
) -> None:
    """Compute the block on the diagonal from ``start`` to ``stop``."""
    # A function of the module, for one that calls itself inside another would keep its tensors alive
    # until the garbage collector runs.
    if stop - start < 2 * _SMALLEST_BLOCK:
        rows = slice(start, stop)
        out[rows, rows] = _block(c, a, b, beta, alpha, rows, rows)
        return
    middle = (start + stop) // 2
    _fill(out, c, a, b, beta, alpha, start, middle)
    _fill(out, c, a, b, beta, alpha, middle, stop)
    upper, lower = slice(start, middle), slice(middle, stop)
    product = _block(c, a, b, beta, alpha, upper, lower)
    out[upper, lower] = product
    out[lower, upper] = product.mT


def _block(
    c: Tensor | None, a: Tensor, b: Tensor, beta: float, alpha: float, rows: slice, cols: slice
) -> Tensor:
    if c is None:
        return a[rows] @ b[:, cols]
    return torch.addmm(c[rows, cols], a[rows], b[:, cols], beta=beta, alpha=alpha)


def _share(size: int) -> float:
    return 1.0 if size < 2 * _SMALLEST_BLOCK else 0.25 + _share(size // 2) / 2


def _by_kernels(a: Tensor) -> bool:
    return (
        a.device.type == "cuda"
        and a.dtype in (torch.bfloat16, torch.float16)
        and a.shape[-2] >= _SMALLEST_FOR_KERNELS
        # Rows of the kernels' operands start at multiples of 16 bytes.
        and a.shape[-1] % 8 == 0
        and a.shape[-2] % 8 == 0
        and torch.cuda.get_device_capability(a.device)[0] >= 9
        and _gemm_symmetric() is not None
    )


@functools.cache
def _gemm_symmetric() -> Any:
    """The kernel, or None where its package is not installed."""
    try:
        from quack.gemm_interface import gemm_symmetric
    except ImportError:
        return None
    return gemm_symmetric
