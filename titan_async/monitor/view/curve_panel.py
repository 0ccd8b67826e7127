"""The live view's curves of the loss and the learning rate, in Braille characters or in ASCII."""

import math
from functools import lru_cache
from itertools import pairwise

from rich.console import ConsoleOptions, Group
from rich.layout import Layout
from rich.text import Text

from titan_async.monitor.journal import History, Series

__all__ = ["curve", "draw_curves"]

_BRAILLE = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a Braille character, by column and row from the top."""


def draw_curves(steps: int, history: History, options: ConsoleOptions, height: int) -> Layout:
    """Draws the curves side by side, at the options' width.

    Args:
        steps: the last step of training, at the right edge.
        history: of the run's journal.
        options: of the console.
        height: in lines, including the titles; at least 2.
    """
    left = options.max_width * 3 // 5
    loss, rate = history.last("step", "loss"), history.last("step", "learning_rate")
    title = "loss -" if loss is None else f"loss {loss:.4f}"
    if history.counts["validation"]:
        validation = history.last("validation", "loss")
        shown = math.nan if validation is None else validation
        title += f", validation {shown:.4f} at {history.last('validation', 'step'):,}"
    of_loss = _plot(title, history.loss, steps, options.update(width=left - 2), height, "cyan")
    title = "learning rate -" if rate is None else f"learning rate {rate:.2e}"
    options = options.update(width=options.max_width - left)
    of_rate = _plot(title, history.learning_rate, steps, options, height, "magenta", low=0.0)
    layout = Layout()
    layout.split_row(Layout(of_loss, size=left), Layout(of_rate))
    return layout


def _plot(
    title: str,
    series: Series,
    steps: int,
    options: ConsoleOptions,
    height: int,
    colour: str,
    low: float | None = None,
) -> Group:
    """A title, and a curve with its range at the left."""
    points = series.points
    values = [value for _, value in points]
    labels = [""] * (height - 1)
    if values:
        labels[-1], labels[0] = _short(min(values) if low is None else min(low, *values)), _short(max(values))
        if labels[0] == labels[-1]:
            labels[-1] = ""
    margin = max(map(len, labels))
    width = max(options.max_width - margin - 1, 1)
    lines = curve(points, width, height - 1, last_x=steps, low=low, ascii_only=options.ascii_only)
    drawn = [
        Text.assemble((f"{label:>{margin}} ", "dim"), (line, colour), no_wrap=True, overflow="crop")
        for label, line in zip(labels, lines, strict=True)
    ]
    return Group(Text(title, "bold", no_wrap=True, overflow="crop"), *drawn)


def _short(value: float) -> str:
    return f"{value:.3g}" if value == 0 or 0.01 <= abs(value) < 10_000 else f"{value:.1e}"


@lru_cache(maxsize=4)  # a frame is drawn more often than the run logs a step
def curve(
    points: tuple[tuple[float, float], ...],
    width: int,
    height: int,
    *,
    last_x: float | None = None,
    low: float | None = None,
    ascii_only: bool = False,
) -> tuple[str, ...]:
    """A curve as `height` lines of `width` characters; empty without finite points.

    Args:
        points: x and y, by ascending x.
        width: in characters.
        height: in characters.
        last_x: x of the right edge, unless a point is beyond it. Default: that of the last point.
        low: y of the bottom, unless a point is below it. Default: the lowest y.
        ascii_only: draw asterisks.
    """
    points = tuple((x, y) for x, y in points if math.isfinite(y))
    if not points or width < 1 or height < 1:
        return (" " * max(width, 0),) * max(height, 0)
    across, down = (1, 1) if ascii_only else (2, 4)
    columns, rows = width * across, height * down
    left, right = points[0][0], max(points[-1][0], points[-1][0] if last_x is None else last_x)
    bottom, top = min(y for _, y in points), max(y for _, y in points)
    bottom = bottom if low is None else min(low, bottom)
    # The means of the columns, joined by straight lines.
    by_column: dict[int, list[float]] = {}
    for x, y in points:
        column = round((x - left) / (right - left) * (columns - 1)) if right > left else 0
        by_column.setdefault(column, []).append(y)
    places = []
    for column, ys in sorted(by_column.items()):
        fraction = (top - sum(ys) / len(ys)) / (top - bottom) if top > bottom else 0.5
        places.append((column, round(fraction * (rows - 1))))
    dots = {places[0], *(dot for a, b in pairwise(places) for dot in _line(a, b))}
    if ascii_only:
        return tuple("".join("*" if (c, r) in dots else " " for c in range(width)) for r in range(height))
    cells = [[0] * width for _ in range(height)]
    for column, row in dots:
        cells[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
    return tuple("".join(chr(_BRAILLE + bits) if bits else " " for bits in line) for line in cells)


def _line(begin: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots of a line to a dot of larger x."""
    across, down = end[0] - begin[0], end[1] - begin[1]
    count = max(across, abs(down))
    steps = range(count + 1)
    return [(begin[0] + round(i * across / count), begin[1] + round(i * down / count)) for i in steps]
