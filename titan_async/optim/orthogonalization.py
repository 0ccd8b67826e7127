"""Orthogonalization of matrices by Newton-Schulz iterations, the heart of Muon.

An iteration with coefficients (a, b, c) turns a wide matrix X into (a I + b R + c R^2) X, where R = X X^T,
which applies p(x) = a x + b x^3 + c x^5 to its singular values. There are two ways to compute the same:

- The standard form multiplies X in every iteration (Keller Jordan,
  https://kellerjordan.github.io/posts/muon/).
- The Gram form (Zhang, Amsel, Chen, Dao, 2026) works with small matrices only: it multiplies up the
  polynomials, Q <- Q P with P = a I + b R + c R^2, follows R <- P R P, and applies Q to X at the end. The
  wider the matrix, the more that saves. Rounding may give R eigenvalues below zero, which the polynomials
  blow up within a few iterations; so it is restarted now and then: Q is applied to X, and R computed from X
  anew.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from titan_async.optim.coefficients import Triple
from titan_async.optim.local_tensors import at_least_float32
from titan_async.optim.symmetric import symmetric_addmm, symmetric_mm, symmetric_share

__all__ = ["FORMS", "orthogonalization_cost", "orthogonalize"]

FORMS = ("auto", "standard", "gram")

# Iterations of the Gram form from one restart to the next. With these its error was nowhere above that of
# the standard form by more than the factor 5, and at half precision mostly below it, on spectra from
# flat to rank one; with one more it grows a hundredfold on some.
_ITERATIONS_BETWEEN_RESTARTS = {
    torch.bfloat16: 2,
    torch.float16: 2,
    torch.float32: 3,
    torch.float64: 5,
}

# On the CPU a stack of matrices smaller than this is faster in one batched product than in a loop.
_SMALLEST_FOR_LOOP = 256


def orthogonalize(
    matrices: Tensor,
    coefficients: Sequence[Triple],
    *,
    eps: float = 1e-7,
    compute_dtype: torch.dtype = torch.bfloat16,
    form: str = "auto",
) -> Tensor:
    """Replace the singular values of a matrix, or of each matrix of a stack, by values near 1.

    The result does not depend on the scale of the input, from the smallest normal number to the largest
    finite one; a zero matrix gives zeros, and a matrix with an infinite or undefined entry gives NaN.

    Args:
        matrices: a plain tensor ``[rows, cols]`` or ``[experts, rows, cols]`` of any floating dtype;
            not modified.
        coefficients: one triple (a, b, c) an iteration, as `resolve_coefficients` returns them.
        eps: smallest norm divided by, relative to the matrix's largest entry (which is between half
            and one when the norm is taken), so that it only ever matters for a zero matrix.
        compute_dtype: dtype of the iterations.
        form: ``"standard"``, in torch's own operations and with the bits of ``torch.optim.Muon``;
            ``"gram"``; or ``"auto"``, whichever takes fewer operations for the shape. The last two
            compute only half of what is symmetric, where that is faster.

    Returns:
        A tensor of the input's shape in ``compute_dtype``.
    """
    if matrices.numel() == 0:
        return matrices.to(compute_dtype)
    if (
        matrices.ndim == 3
        and matrices.device.type == "cpu"
        and (len(matrices) == 1 or min(matrices.shape[-2:]) >= _SMALLEST_FOR_LOOP)
    ):
        out = torch.empty_like(matrices, dtype=compute_dtype)
        for each, matrix in zip(out, matrices, strict=True):
            each.copy_(orthogonalize(matrix, coefficients, eps=eps, compute_dtype=compute_dtype, form=form))
        return out

    x = _scaled_to_one(matrices).to(compute_dtype)
    # The Gram matrix of the shorter side is the smaller one.
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    # Both norms are the same number up to rounding; the one of torch.optim.Muon gives its very bits.
    norm = x.norm() if x.ndim == 2 else torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x.div_(norm.clamp(min=eps))

    if form == "auto":
        rows, cols = x.shape[-2:]
        costs = _costs(rows, cols, len(coefficients), compute_dtype, symmetric_share(x))
        form = min(costs, key=lambda name: costs[name])
        x = _gram_form(x, coefficients) if form == "gram" else _standard_form(x, coefficients)
    else:
        x = _gram_form(x, coefficients) if form == "gram" else _plain_standard_form(x, coefficients)
    return x.mT if tall else x


def orthogonalization_cost(
    rows: int, cols: int, iterations: int, *, compute_dtype: torch.dtype, form: str
) -> float:
    """Multiplications and additions for one matrix, symmetric products counted in full."""
    costs = _costs(min(rows, cols), max(rows, cols), iterations, compute_dtype, 1.0)
    return costs.get(form, min(costs.values()))


def _costs(rows: int, cols: int, iterations: int, dtype: torch.dtype, symmetric: float) -> dict[str, float]:
    """Operations of each form, for rows <= cols and a share of symmetric products that is computed."""
    restarts = math.ceil(iterations / _ITERATIONS_BETWEEN_RESTARTS[dtype])
    wide, small = 2.0 * rows**2 * cols, 2.0 * rows**3
    return {
        "standard": iterations * (wide * (symmetric + 1) + small * symmetric),
        "gram": restarts * wide * (symmetric + 1)
        + small * symmetric * (iterations + 3 * (iterations - restarts)),
    }


def _plain_standard_form(x: Tensor, coefficients: Sequence[Triple]) -> Tensor:
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for a, b, c in coefficients:
        gram = x @ x.mT
        polynomial = multiply_add(gram, gram, gram, beta=b, alpha=c)
        x = multiply_add(x, polynomial, x, beta=a)
    return x


def _standard_form(x: Tensor, coefficients: Sequence[Triple]) -> Tensor:
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for a, b, c in coefficients:
        gram = symmetric_mm(x, x.mT)
        polynomial = symmetric_addmm(gram, gram, gram, beta=b, alpha=c)
        x = multiply_add(x, polynomial, x, beta=a)
    return x


def _gram_form(x: Tensor, coefficients: Sequence[Triple]) -> Tensor:
    between = _ITERATIONS_BETWEEN_RESTARTS[x.dtype]
    for start in range(0, len(coefficients), between):
        stretch = coefficients[start : start + between]
        gram = symmetric_mm(x, x.mT)
        product: Tensor | None = None
        for index, (a, b, c) in enumerate(stretch):
            # The polynomial without its constant: adding that in the product costs nothing and rounds less.
            polynomial = symmetric_addmm(gram, gram, gram, beta=b, alpha=c)
            if index + 1 < len(stretch):
                half = symmetric_addmm(gram, gram, polynomial, beta=a)
                gram = symmetric_addmm(half, half, polynomial, beta=a)
            if product is None:
                product = polynomial
                product.diagonal(dim1=-2, dim2=-1).add_(a)
            else:
                product = symmetric_addmm(product, product, polynomial, beta=a)
        assert product is not None
        x = product @ x
    return x


def _scaled_to_one(matrices: Tensor) -> Tensor:
    """A copy, each matrix times the power of two that brings its largest entry to [0.5, 1).

    Squares of entries then neither vanish nor overflow in the norm. A power of two changes no mantissa,
    so at ordinary scales the result of the orthogonalization keeps every bit.
    """
    wide = matrices.to(at_least_float32(matrices.dtype))
    tiny = torch.finfo(wide.dtype).tiny
    # On CPU twenty times as fast as the infinity norm.
    largest = wide.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=tiny)
    # mantissa / largest is exactly 2^-exponent. It is subnormal for the very largest numbers, and
    # would be flushed to zero on some devices: hence the clamp.
    power_of_two: Tensor = (torch.frexp(largest).mantissa / largest).clamp(min=tiny)
    return wide * power_of_two
