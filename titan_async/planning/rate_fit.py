"""Fits rates to timings: seconds as a sum of terms, each an amount divided by a rate.

Least squares in log space weight relative errors of short and long timings equally.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Fit", "fit_attention", "fit_products", "fit_terms"]

_ITERATIONS = 100
_STARTS = (0.05, 0.5, 0.95)
"""Initial shares of the first term; the fit has several local minima for some timings."""
_SMALLEST = 1e-4
"""Lower bound of a term's share of every timing, which keeps rates finite."""


@dataclass(frozen=True)
class Fit:
    """Seconds per unit of each of two terms, and predictions."""

    costs: tuple[float, float]
    seconds: list[float]
    """Predicted for each timing."""
    mean_error: float
    """Geometric mean of the factors between predictions and timings: 1.1 for 10 %."""
    worst_error: float


def fit_products(shapes: Sequence[tuple[int, int, int]], each: int, seconds: Sequence[float]) -> Fit:
    """Seconds per operation and per byte of products of m x k and k x n.

    Args:
        shapes: m, n, k of each product.
        each: bytes of a number.
        seconds: of each product.

    Raises:
        ValueError: as `fit_terms`.
    """
    amounts = [(2.0 * m * n * k, each * float(m * k + k * n + m * n)) for m, n, k in shapes]
    return fit_terms(amounts, seconds)


def fit_attention(sequences: Sequence[int], operations: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Seconds per operation over long sequences, and the overhead of a sequence of one token.

    Args:
        sequences: their lengths in tokens.
        operations: of each timing.
        seconds: of each timing.

    Raises:
        ValueError: as `fit_terms`.
    """
    return fit_terms([(o, o / length) for length, o in zip(sequences, operations, strict=True)], seconds)


def fit_terms(amounts: Sequence[tuple[float, float]], seconds: Sequence[float]) -> Fit:
    """Find non-negative c with c[0] * amounts[i][0] + c[1] * amounts[i][1] near seconds[i] for all i.

    Raises:
        ValueError: if there are fewer than two timings, or one is not positive and finite.
    """
    if len(seconds) < 2 or not all(0 < value < math.inf for value in seconds):
        raise ValueError("a fit needs at least two timings, all above 0")
    terms = torch.tensor(amounts, dtype=torch.float64)
    wanted = torch.tensor(seconds, dtype=torch.float64).log()
    alone = wanted[:, None] - terms.log()  # log of each term's cost if it took all of the time
    least = alone.min(dim=0).values + math.log(_SMALLEST)
    middle = alone.median(dim=0).values
    found = []
    for share in _STARTS:
        start = middle + torch.tensor([share, 1 - share], dtype=torch.float64).log()
        found.append(_descend(terms, wanted, least, start))
    costs = min(found, key=lambda logs: float(_errors(terms, wanted, logs).square().sum()))
    off = _errors(terms, wanted, costs).abs()
    return Fit(
        costs=(costs[0].exp().item(), costs[1].exp().item()),
        seconds=(terms @ costs.exp()).tolist(),
        mean_error=off.mean().exp().item(),
        worst_error=off.max().exp().item(),
    )


def _errors(terms: torch.Tensor, wanted: torch.Tensor, logs: torch.Tensor) -> torch.Tensor:
    return (terms @ logs.exp()).log() - wanted


def _descend(
    terms: torch.Tensor, wanted: torch.Tensor, least: torch.Tensor, logs: torch.Tensor
) -> torch.Tensor:
    """Levenberg-Marquardt over the logarithms of the costs, bounded below by `least`."""
    damping, errors = 1e-3, _errors(terms, wanted, logs)
    for _ in range(_ITERATIONS):
        parts = terms * logs.exp()
        slopes = parts / parts.sum(dim=1, keepdim=True)
        square = slopes.T @ slopes
        damped = square + damping * torch.diag(square.diagonal() + 1e-12)
        step = torch.linalg.solve(damped, -(slopes.T @ errors)).clamp(-2, 2)
        tried = torch.maximum(logs + step, least)
        then = _errors(terms, wanted, tried)
        if then.square().sum() < errors.square().sum():
            logs, errors, damping = tried, then, max(damping / 10, 1e-12)
        else:
            damping = min(damping * 10, 1e6)
    return logs
