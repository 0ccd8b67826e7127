"""Gantt charts of pipelines: a row for each rank, a box for each span, white for idle time."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from titan_async.monitor.kinds import KINDS
from titan_async.pipelining.recording import Kind

__all__ = ["Box", "Chart", "Mark", "draw_charts", "tint_of"]

_HEIGHT = 0.86
_FONT_RANGE = (4.5, 7.0)  # points
_DIGIT_WIDTH = 0.75  # with spacing, in font sizes


@dataclass(frozen=True)
class Box:
    """One span in a chart."""

    row: int
    """From 0, at the top."""
    start: float
    """In the unit of the axis."""
    end: float
    kind: Kind
    label: str = ""
    """Shown if it fits."""
    tint: float = 0.0
    """Mixes the kind's colour with white, up to 1, or with black, down to -1."""
    half: int = 0
    """For an overlapped pair: 1 is the upper half of the row, 2 the lower half; 0 is the whole row."""

    @property
    def middle(self) -> float:
        """Vertical centre, in rows."""
        return self.row + (0, -_HEIGHT / 4, _HEIGHT / 4)[self.half]

    @property
    def colour(self) -> str:
        """As #rrggbb."""
        return _mixed(KINDS[self.kind].colour, "#ffffff" if self.tint > 0 else "#000000", abs(self.tint))


def _mixed(colour: str, other: str, fraction: float) -> str:
    """`colour` mixed with the given fraction of `other`."""
    pairs = zip(_rgb(colour), _rgb(other), strict=True)
    return "#" + "".join(f"{round((1 - fraction) * one + fraction * two):02x}" for one, two in pairs)


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def tint_of(batch: int, of_rank: int) -> float:
    """The tint of a computation, which distinguishes consecutive batches and the stages of a rank.

    Args:
        batch: number of the batch.
        of_rank: index of the stage on its rank.
    """
    return (0.45 if batch % 2 else 0.0) - 0.3 * of_rank


class Mark(NamedTuple):
    """A vertical line across a row."""

    row: int
    at: float
    """In the unit of the axis."""
    name: str = ""
    """Text above it."""


@dataclass(frozen=True)
class Chart:
    """The content of one chart."""

    title: str
    rows: Sequence[str]
    """Names, from the top."""
    boxes: Sequence[Box]
    """Later ones are drawn over earlier ones."""
    marks: Sequence[Mark] = ()


def draw_charts(
    figure: Figure | SubFigure, charts: Sequence[Chart], x_label: str, until: float
) -> list[Axes]:
    """Draws stacked charts with a common axis from 0 to `until` and a legend; returns their axes."""
    heights = [len(chart.rows) for chart in charts]
    panels = list(figure.subplots(len(charts), squeeze=False, sharex=True, height_ratios=heights)[:, 0])
    panels[-1].set(xlim=(0, until), xlabel=x_label)
    for panel, chart in zip(panels, charts, strict=True):
        panel.set_title(chart.title, pad=12 if chart.marks else None)
        panel.set_ylim(len(chart.rows) - 0.5, -0.5)
        panel.set_yticks(range(len(chart.rows)), chart.rows)
        panel.tick_params(axis="y", length=0)
        panel.spines["left"].set_visible(False)
    _draw_legend(figure, {box.kind for chart in charts for box in chart.boxes})
    # Gives the axes their final size, which determines the labels that fit.
    root = figure.figure
    assert root is not None
    root.draw_without_rendering()
    for panel, chart in zip(panels, charts, strict=True):
        _draw_boxes(panel, chart.boxes)
        _write_labels(panel, chart.boxes)
        _draw_marks(panel, chart.marks)
    return panels


def _draw_marks(axes: Axes, marks: Sequence[Mark]) -> None:
    for row, at, name in marks:
        axes.plot([at, at], [row - 0.5, row + 0.5], color="black", linewidth=0.8)
        if name:
            axes.annotate(name, (at, row - 0.5), xytext=(1, 2), textcoords="offset points", size=6)


def _draw_boxes(axes: Axes, boxes: Sequence[Box]) -> None:
    # All boxes of a colour are one path: with a patch for each, an SVG would be twice as large.
    of_colour: dict[str, list[Box]] = defaultdict(list)
    for box in boxes:
        of_colour[box.colour].append(box)
    for colour, same in of_colour.items():
        path = Path.make_compound_path(*map(_outline, same))
        axes.add_patch(PathPatch(path, facecolor=colour, edgecolor="white", linewidth=0.3))


def _outline(box: Box) -> Path:
    height = _HEIGHT / 2 if box.half else _HEIGHT
    top, bottom = box.middle - height / 2, box.middle + height / 2
    corners = [(box.start, top), (box.end, top), (box.end, bottom), (box.start, bottom)]
    return Path([*corners, corners[0]], closed=True)


def _write_labels(axes: Axes, boxes: Sequence[Box]) -> None:
    low, high = axes.get_xlim()
    points = axes.get_window_extent().width * 72 / axes.figure.dpi / (high - low)  # of a unit of the axis
    labelled = [box for box in boxes if box.label]
    if not labelled:
        return
    # One font size for all labels, such that four of five fit.
    fitting = sorted((box.end - box.start) * points / (_DIGIT_WIDTH * len(box.label)) for box in labelled)
    size = min(max(fitting[len(fitting) // 5], _FONT_RANGE[0]), _FONT_RANGE[1])
    for box in labelled:
        if (box.end - box.start) * points >= _DIGIT_WIDTH * size * len(box.label):
            axes.text(
                (box.start + box.end) / 2, box.middle, box.label, size=round(size, 1),
                ha="center", va="center_baseline", clip_on=True,
                color="white" if _is_dark(box.colour) else "black",
            )  # fmt: skip


def _is_dark(colour: str) -> bool:
    red, green, blue = _rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue < 120


def _draw_legend(figure: Figure | SubFigure, kinds: set[Kind]) -> None:
    handles = [Patch(facecolor=KINDS[kind].colour, label=KINDS[kind].name) for kind in sorted(kinds)]
    columns = min(len(handles), 5)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=7)
