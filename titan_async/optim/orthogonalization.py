"""Orthogonalization of matrices by Newton-Schulz iterations, for Muon.

An iteration with coefficients (a, b, c) maps a wide matrix X to (a I + b R + c R^2) X, where R = X X^T,
which applies p(x) = a x + b x^3 + c x^5 to its singular values. It has two forms:

- The standard form multiplies X in every iteration (Keller Jordan,
  https://kellerjordan.github.io/posts/muon/).
- The Gram form (Zhang, Amsel, Chen, Dao, 2026) iterates on small matrices only: it accumulates the
  polynomials, Q <- Q P with P = a I + b R + c R^2, updates R <- P R P, and applies Q to X at the end. This
  saves more for wider matrices. Rounding may give R negative eigenvalues, which the polynomials amplify
  within a few iterations, so it is restarted: Q is applied to X, and R recomputed from X.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.backends.cpu import get_cpu_capability

from titan_async.optim.coefficients import Triple
from titan_async.optim.elementwise import at_least_float32
from titan_async.optim.symmetric_matmul import symmetric_addmm, symmetric_mm, symmetric_time_fraction

__all__ = ["FORMS", "orthogonalization_cost", "orthogonalize", "orthogonalize_all", "restart_intervals"]

FORMS = ("auto", "standard", "gram")

# When the Gram form is restarted; see `restart_intervals`. Rounding perturbs an eigenvalue of R by about half
# a unit in the last place, 2^-9 in bfloat16, and by less before the first iteration, when few matrices have a
# singular value near 1. On spectra from flat to rank one the error is then at most ten times that of the
# standard form and mostly below it; with a first interval longer by one it is up to a hundred times as large.
_PERTURBATION = 2.0**-9
_FIRST_PERTURBATION = _PERTURBATION / 8
_MAX_ERROR = 0.1

# On the CPU a stack of matrices smaller than this is faster in one batched product than in a loop.
_MIN_SIZE_FOR_LOOP = 384


def orthogonalize(
    matrices: Tensor,
    coefficients: Sequence[Triple],
    *,
    eps: float = 1e-7,
    compute_dtype: torch.dtype = torch.bfloat16,
    form: str = "auto",
) -> Tensor:
    """Replace the singular values of a matrix, or of each matrix of a stack, by values near 1.

    The result does not depend on the scale of the input, from a million times the smallest normal number
    to the largest finite one; a zero matrix gives zeros, and a matrix with an entry that is not finite NaN.

    Args:
        matrices: a plain tensor ``[rows, cols]`` or ``[experts, rows, cols]`` of any floating dtype;
            not modified.
        coefficients: one triple (a, b, c) per iteration, from `resolve_coefficients`.
        eps: lower bound of the norm to divide by, relative to the matrix's largest entry (which is scaled to
            between half and one), so that it only matters for a zero matrix.
        compute_dtype: dtype of the iterations, unless ``form`` is ``"auto"`` on a CPU where it is slow.
        form: ``"standard"``, with torch's operations and the bits of ``torch.optim.Muon``; ``"gram"``; or
            ``"auto"``, the form with fewer operations for the shape. The last two compute only half of
            symmetric products, if that is faster. ``"auto"`` also iterates in float32 on CPUs with slow
            matrix products in bfloat16 and float16.

    Returns:
        A tensor of the input's shape in ``compute_dtype``.

    Examples:
        >>> from titan_async.optim import resolve_coefficients
        >>> matrix = torch.diag(torch.tensor([9.0, -4.0, 1.0]))
        >>> coefficients = resolve_coefficients("polar_express", 8)
        >>> result = orthogonalize(matrix, coefficients, compute_dtype=torch.float32)
        >>> print(result.round(decimals=2).diag())
        tensor([ 1., -1.,  1.])
    """
    if matrices.numel() == 0:
        return matrices.to(compute_dtype)
    if matrices.ndim == 3 and (len(matrices) == 1 or not _batched_is_faster(matrices)):
        out = torch.empty_like(matrices, dtype=compute_dtype)
        for each, matrix in zip(out, matrices, strict=True):
            each.copy_(orthogonalize(matrix, coefficients, eps=eps, compute_dtype=compute_dtype, form=form))
        return out

    working_dtype = _working_dtype(compute_dtype, matrices.device) if form == "auto" else compute_dtype
    x = _scaled_to_one(matrices, working_dtype)
    # The Gram matrix of the shorter side is the smaller one.
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    # Both norms are equal up to rounding; x.norm() is bitwise that of torch.optim.Muon.
    norm = x.norm() if x.ndim == 2 else torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    # The norm of a nonzero matrix is above a half; eps may round to zero in the working dtype.
    x.div_(norm.clamp(min=max(eps, torch.finfo(x.dtype).tiny)))

    if form == "auto":
        rows, cols = x.shape[-2:]
        costs = _costs(rows, cols, tuple(coefficients), symmetric_time_fraction(x))
        form = min(costs, key=lambda name: costs[name])
        x = _gram_form(x, coefficients) if form == "gram" else _standard_form(x, coefficients)
    else:
        x = _gram_form(x, coefficients) if form == "gram" else _plain_standard_form(x, coefficients)
    # Contiguous: for the caller, reading columns would take longer than this copy.
    x = x.to(compute_dtype)
    return x.mT.contiguous() if tall else x


def orthogonalize_all(
    matrices: Sequence[Tensor],
    coefficients: Sequence[Triple],
    *,
    eps: float = 1e-7,
    compute_dtype: torch.dtype = torch.bfloat16,
    form: str = "auto",
) -> list[Tensor]:
    """`orthogonalize` for several matrices ``[rows, cols]`` and stacks of them of one size and dtype.

    They are batched into one stack where that is faster.
    """

    def apply(stack: Tensor) -> Tensor:
        return orthogonalize(stack, coefficients, eps=eps, compute_dtype=compute_dtype, form=form)

    if len(matrices) == 1 or not _batched_is_faster(matrices[0]):
        return [apply(matrix) for matrix in matrices]
    stack = torch.cat([matrix if matrix.ndim == 3 else matrix.unsqueeze(0) for matrix in matrices])
    parts = apply(stack).split([len(matrix) if matrix.ndim == 3 else 1 for matrix in matrices])
    return [part.view(matrix.shape) for part, matrix in zip(parts, matrices, strict=True)]


def _working_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype to iterate in: without AVX-512, half precision is tens of times slower than float32."""
    if device.type == "cpu" and get_cpu_capability() in ("AVX2", "NO AVX"):
        return at_least_float32(dtype)
    return dtype


def _batched_is_faster(matrix: Tensor) -> bool:
    return matrix.device.type != "cpu" or min(matrix.shape[-2:]) < _MIN_SIZE_FOR_LOOP


def orthogonalization_cost(rows: int, cols: int, coefficients: Sequence[Triple], form: str) -> float:
    """Multiplications and additions for one matrix, with symmetric products counted in full."""
    costs = _costs(min(rows, cols), max(rows, cols), tuple(coefficients), 1.0)
    return costs.get(form, min(costs.values()))


def _costs(rows: int, cols: int, coefficients: tuple[Triple, ...], symmetric: float) -> dict[str, float]:
    """Operations of each form for rows <= cols, if a fraction of symmetric products is computed."""
    iterations, parts = len(coefficients), len(restart_intervals(coefficients))
    wide, small = 2.0 * rows**2 * cols, 2.0 * rows**3
    return {
        "standard": iterations * (wide * (symmetric + 1) + small * symmetric),
        "gram": parts * wide * (symmetric + 1) + small * symmetric * (iterations + 3 * (iterations - parts)),
    }


@functools.lru_cache
def restart_intervals(coefficients: tuple[Triple, ...]) -> tuple[tuple[Triple, ...], ...]:
    """Divide the iterations of the Gram form at its restarts.

    If rounding perturbs an eigenvalue 0 of R to -d, the polynomials apply q(-d) instead of q(0), and multiply
    d by the square of that in every iteration. An interval ends before the error, relative to q(0), exceeds a
    bound. Error and bound are proportional to the unit roundoff, so the intervals do not depend on the dtype;
    for the standard coefficients they have 3 and 2 iterations.
    """
    intervals: list[tuple[Triple, ...]] = []
    interval: list[Triple] = []
    eigenvalue, error = -_FIRST_PERTURBATION, 1.0
    for a, b, c in coefficients:
        factor = a + b * eigenvalue + c * eigenvalue**2
        if interval and abs(error * factor / a - 1) > _MAX_ERROR:
            intervals.append(tuple(interval))
            interval = []
            eigenvalue, error = -_PERTURBATION, 1.0
            factor = a + b * eigenvalue + c * eigenvalue**2
        interval.append((a, b, c))
        error *= factor / a
        eigenvalue *= factor**2
    return (*intervals, tuple(interval))


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
    for interval in restart_intervals(tuple(coefficients)):
        gram = symmetric_mm(x, x.mT)
        product: Tensor | None = None
        for index, (a, b, c) in enumerate(interval):
            # The polynomial without its constant, which beta adds in the product, for free and with less
            # rounding.
            polynomial = symmetric_addmm(gram, gram, gram, beta=b, alpha=c)
            if index + 1 < len(interval):
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


def _scaled_to_one(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in another dtype, each matrix scaled by a power of two so that its largest entry is in [0.5, 1).

    Squares of entries then neither vanish nor overflow in the norm. A power of two changes no mantissa,
    so at ordinary scales the result of the orthogonalization is bitwise the same.
    """
    # Faster than the infinity norm or the maximum of absolute values.
    largest = torch.maximum(
        matrices.amax(dim=(-2, -1), keepdim=True), -matrices.amin(dim=(-2, -1), keepdim=True)
    )
    largest = largest.to(at_least_float32(matrices.dtype))
    tiny = torch.finfo(largest.dtype).tiny
    largest = largest.clamp(min=tiny)
    # mantissa / largest is exactly 2^-exponent. It is subnormal for the very largest numbers, and
    # would be flushed to zero on some devices: hence the clamp.
    power_of_two = (torch.frexp(largest).mantissa / largest).clamp(min=tiny)
    # float16 cannot represent the powers of two by which its smallest numbers are multiplied.
    if dtype != torch.float16 and torch.finfo(dtype).tiny <= torch.finfo(matrices.dtype).tiny:
        return matrices.to(dtype, copy=True).mul_(power_of_two.to(dtype))
    return (matrices.to(largest.dtype) * power_of_two).to(dtype)
