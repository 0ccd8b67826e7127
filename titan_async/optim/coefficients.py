"""Coefficients of Muon's Newton-Schulz iterations.

Each iteration applies an odd polynomial p(x) = a x + b x^3 + c x^5 to the singular values of a matrix
of Frobenius norm 1; after a few iterations all of them lie near 1. Sources: Keller Jordan, "Muon: An
optimizer for hidden layers in neural networks" (https://kellerjordan.github.io/posts/muon/) for the
standard coefficients; arXiv 2505.16932 ("The Polar Express", Algorithm 1) for coefficients that differ
from iteration to iteration.
"""

from collections.abc import Sequence
from typing import TypeAlias

__all__ = [
    "POLAR_EXPRESS_COEFFICIENTS",
    "STANDARD_COEFFICIENTS",
    "Coefficients",
    "Triple",
    "resolve_coefficients",
]

Triple: TypeAlias = tuple[float, float, float]
Coefficients: TypeAlias = str | Sequence[float] | Sequence[Sequence[float]]

STANDARD_COEFFICIENTS: Triple = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's quintic: steepest at zero; singular values end between about 0.7 and 1.2."""

# Algorithm 1 of arXiv 2505.16932: the optimal quintic for the interval after the previous iterations,
# starting from [0.001, 1]. From the eighth iteration on it is the Newton-Schulz limit.
_POLAR_EXPRESS_EXACT: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
_POLAR_EXPRESS_MARGIN = 1.01


def _shrunk(triple: Triple) -> Triple:
    """The polynomial x -> p(x / margin)."""
    a, b, c = triple
    return a / _POLAR_EXPRESS_MARGIN, b / _POLAR_EXPRESS_MARGIN**3, c / _POLAR_EXPRESS_MARGIN**5


def _with_margins(exact: tuple[Triple, ...]) -> tuple[Triple, ...]:
    # The paper divides every input but the last by the margin, because rounding may move a singular
    # value above the interval, where the polynomials diverge. It divides the matrix by it once more
    # at the start; here the first polynomial includes this, so that all coefficients share the normalization.
    shrunk = [_shrunk(triple) for triple in exact[:-1]]
    shrunk[0] = _shrunk(shrunk[0])
    return (*shrunk, exact[-1])


POLAR_EXPRESS_COEFFICIENTS: tuple[Triple, ...] = _with_margins(_POLAR_EXPRESS_EXACT)
"""Polar Express, one triple per iteration, with the paper's safety margin of 1.01; the last one repeats."""

_NAMED_COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    "standard": (STANDARD_COEFFICIENTS,),
    "polar_express": POLAR_EXPRESS_COEFFICIENTS,
}


def resolve_coefficients(coefficients: Coefficients, steps: int) -> tuple[Triple, ...]:
    """The coefficients (a, b, c) of each of ``steps`` iterations.

    Args:
        coefficients: ``"standard"``, ``"polar_express"``, one triple for all iterations, or one triple
            for each.
        steps: number of iterations, at least 1.

    Raises:
        ValueError: unknown name, ``steps`` below 1, something other than triples of numbers, or a
            number of triples other than ``steps``.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 100:
        raise ValueError(f"ns_steps must be a whole number from 1 to 99, not {steps!r}")
    if isinstance(coefficients, str):
        if coefficients not in _NAMED_COEFFICIENTS:
            choices = ", ".join(repr(name) for name in _NAMED_COEFFICIENTS)
            raise ValueError(f"unknown ns_coefficients {coefficients!r}: choose {choices}, or give triples")
        schedule = _NAMED_COEFFICIENTS[coefficients]
        return (schedule + schedule[-1:] * steps)[:steps]

    items = list(coefficients)
    if len(items) == 3 and all(isinstance(item, (int, float)) for item in items):
        return (_as_triple(items),) * steps
    triples = tuple(_as_triple(item) for item in items)
    if len(triples) != steps:
        raise ValueError(
            f"ns_coefficients has {len(triples)} triples for {steps} iterations: give one triple per "
            f"iteration, or set ns_steps={len(triples)}"
        )
    return triples


def _as_triple(item: object) -> Triple:
    if isinstance(item, Sequence) and len(item) == 3 and all(isinstance(x, (int, float)) for x in item):
        a, b, c = item
        return float(a), float(b), float(c)
    raise ValueError(f"ns_coefficients must consist of triples of numbers (a, b, c), not {item!r}")
