"""Products of matrices that are known to be symmetric, of which half the entries need not be computed.

On the CPU large ones are computed in panels, the lower half copied from the upper. On NVIDIA GPUs of
compute capability 9 and newer the kernels of the optional package ``quack-kernels`` do the same inside one
launch. Everywhere else it is torch's own product.
"""

import functools
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["symmetric_addmm", "symmetric_mm", "symmetric_share"]

# Below, what narrow products lose in speed outweighs what they save.
_SMALLEST_FOR_PANELS = 384
_PANEL_ROWS = 128
_MOST_PANELS = 8
# Of the time of a full product, what panels lose by being narrow and copied, as measured.
_LOSS_BY_PANELS = 0.2
# The tile of the GPU kernels.
_SMALLEST_FOR_KERNELS = 256


def symmetric_mm(a: Tensor, b: Tensor) -> Tensor:
    """The product a @ b, which the caller knows to be symmetric.

    Args:
        a: ``[size, inner]`` or ``[batch, size, inner]``.
        b: ``[inner, size]`` or ``[batch, inner, size]``, of the same dtype.
    """
    if _by_panels(a):
        return _panels(None, a, b, 0.0, 1.0)
    if _by_kernels(a):
        product: Tensor = _gemm_symmetric()(a, b)
        return product
    return a @ b


def symmetric_addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float = 1.0) -> Tensor:
    """beta c + alpha a @ b, where c and the result are symmetric; shapes as in `symmetric_mm`."""
    if _by_panels(a):
        return _panels(c, a, b, beta, alpha)
    if _by_kernels(a):
        product: Tensor = _gemm_symmetric()(a, b, C=c, beta=beta, alpha=alpha)
        return product
    return (torch.addmm if a.ndim == 2 else torch.baddbmm)(c, a, b, beta=beta, alpha=alpha)


def symmetric_share(x: Tensor) -> float:
    """The share of a full product's time that symmetric ones of x's rows take, about."""
    if _by_kernels(x):
        return 0.5
    if not _by_panels(x):
        return 1.0
    panels = _number_of_panels(x.shape[-2])
    return (panels + 1) / (2 * panels) + _LOSS_BY_PANELS


def _by_panels(a: Tensor) -> bool:
    return a.device.type == "cpu" and a.ndim == 2 and a.shape[0] >= _SMALLEST_FOR_PANELS


def _number_of_panels(size: int) -> int:
    return min(_MOST_PANELS, size // _PANEL_ROWS)


def _panels(c: Tensor | None, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    """Compute panels of rows from the diagonal to the right, and copy them below it."""
    size = len(a)
    out = a.new_empty(size, size)
    panels = _number_of_panels(size)
    for start, stop in pairwise(size * index // panels for index in range(panels + 1)):
        panel = out[start:stop, start:]
        if c is None:
            torch.mm(a[start:stop], b[:, start:], out=panel)
        else:
            torch.addmm(c[start:stop, start:], a[start:stop], b[:, start:], beta=beta, alpha=alpha, out=panel)
        out[stop:, start:stop] = panel[:, stop - start :].mT
    return out


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
