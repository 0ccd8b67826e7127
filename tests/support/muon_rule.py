"""Muon by its formulas in one process, for comparison with a sharded Muon.

From the formulas in https://kellerjordan.github.io/posts/muon/, with the scale of arXiv 2502.16982.
"""

from math import sqrt

import torch
from torch import Tensor

__all__ = ["muon_displacement", "newton_schulz"]


def newton_schulz(matrix: Tensor, steps: int = 5) -> Tensor:
    """The quintic iteration on one matrix, in float64."""
    x = matrix.double()
    if not x.any():
        return x
    x = x / x.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def muon_displacement(
    weight: Tensor,
    grad: Tensor,
    momentum: Tensor,
    *,
    lr: float,
    decay: float,
    coefficient: float,
    split_sizes: tuple[int, ...] = (),
) -> Tensor:
    """The displacement of a matrix ``[rows, cols]`` or of experts ``[experts, rows, cols]`` in one step.

    Args:
        momentum: float64; updated in place.
        split_sizes: rows of each logical matrix in a fused one.
    """
    if weight.ndim == 3:
        settings = {"lr": lr, "decay": decay, "coefficient": coefficient}
        each = zip(weight, grad, momentum, strict=True)
        return torch.stack([muon_displacement(*parts, **settings) for parts in each])
    momentum.copy_(coefficient * momentum + (1 - coefficient) * grad.double())
    update = coefficient * momentum + (1 - coefficient) * grad.double()
    pieces = [
        0.2 * sqrt(max(part.shape)) * newton_schulz(part)
        for part in update.split(list(split_sizes) or [len(update)])
    ]
    return (-lr * torch.cat(pieces) - lr * decay * weight.double()).to(weight.dtype)
