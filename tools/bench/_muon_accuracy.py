"""Errors of orthogonalized matrices, in float64.

With the eigenvalues of the Gram matrix, G G^T = Q diag(s^2) Q^T, any function of the singular values s is
one multiplication: Q diag(f(s) / s) Q^T G. This gives the polar factor (f = 1), and the result of the
iterations without rounding (f = their composed polynomials).
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["STANDARD", "YOU", "Exact", "relative_error"]

Triples = tuple[tuple[float, float, float], ...]

STANDARD: Triples = ((3.4445, -4.7750, 2.0315),) * 5
"""Keller Jordan's coefficients."""
YOU: Triples = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Coefficients of heavyball and dion, which cannot be changed."""


class Exact:
    """Functions of the singular values of ``matrix``, which has two dimensions and full rank."""

    def __init__(self, matrix: Tensor) -> None:
        self._transposed = matrix.shape[0] > matrix.shape[1]
        matrix = matrix.double()
        self._wide = matrix.T if self._transposed else matrix
        squares, self._vectors = torch.linalg.eigh(self._wide @ self._wide.T)
        self._values = squares.clamp(min=torch.finfo(torch.float64).tiny).sqrt()

    def _apply(self, factors: Tensor) -> Tensor:
        result = (self._vectors * factors) @ (self._vectors.T @ self._wide)
        return result.T if self._transposed else result

    @cached_property
    def polar(self) -> Tensor:
        """U V^T of the singular value decomposition."""
        return self._apply(1 / self._values)

    def iterated(self, triples: Sequence[tuple[float, float, float]]) -> Tensor:
        """The result of the iterations on the matrix, scaled to Frobenius norm 1."""
        values = self._values / self._values.norm()
        result = values
        for a, b, c in triples:
            result = result * (a + b * result.square() + c * result.square().square())
        return self._apply(result / self._values)


def relative_error(measured: Tensor, expected: Tensor) -> float:
    """In the Frobenius norm."""
    return ((measured.double() - expected).norm() / expected.norm()).item()
