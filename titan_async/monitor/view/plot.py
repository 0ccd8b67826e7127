"""Curves of a few characters: in Braille, whose characters have eight dots each, or in ASCII."""

import math
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["curve"]

_BRAILLE = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a Braille character, by column and row from the top."""


def curve(
    points: Sequence[tuple[float, float]],
    width: int,
    height: int,
    *,
    last_x: float | None = None,
    low: float | None = None,
    ascii_only: bool = False,
) -> list[str]:
    """A curve as `height` lines of `width` characters; empty without finite points.

    Args:
        points: x and y, by rising x.
        width: in characters.
        height: in characters.
        last_x: at the right edge, unless a point lies beyond. Default: that of the last point.
        low: at the bottom, unless a point lies below. Default: the lowest y.
        ascii_only: draw with asterisks, one a character.
    """
    points = [(x, y) for x, y in points if math.isfinite(y)]
    if not points or width < 1 or height < 1:
        return [" " * max(width, 0)] * max(height, 0)
    across, down = (1, 1) if ascii_only else (2, 4)
    columns, rows = width * across, height * down
    left, right = points[0][0], max(points[-1][0], points[-1][0] if last_x is None else last_x)
    bottom = min(y for _, y in points)
    bottom, top = bottom if low is None else min(low, bottom), max(y for _, y in points)

    def place(x: float, y: float) -> tuple[int, int]:
        column = round((x - left) / (right - left) * (columns - 1)) if right > left else 0
        share = (top - y) / (top - bottom) if top > bottom else 0.5
        return column, round(share * (rows - 1))

    # One mean a column, which a straight line joins to the next.
    by_column: dict[int, list[float]] = {}
    for x, y in points:
        by_column.setdefault(place(x, y)[0], []).append(y)
    places = [(c, place(left, sum(ys) / len(ys))[1]) for c, ys in sorted(by_column.items())]
    dots = {places[0], *(dot for a, b in pairwise(places) for dot in _line(a, b))}
    if ascii_only:
        return ["".join("*" if (c, r) in dots else " " for c in range(width)) for r in range(height)]
    cells = [[0] * width for _ in range(height)]
    for column, row in dots:
        cells[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
    return ["".join(chr(_BRAILLE + bits) if bits else " " for bits in line) for line in cells]


def _line(begin: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots from one to another, later in x."""
    count = max(end[0] - begin[0], abs(end[1] - begin[1]))
    return [
        (
            begin[0] + round(i * (end[0] - begin[0]) / count),
            begin[1] + round(i * (end[1] - begin[1]) / count),
        )
        for i in range(count + 1)
    ]
