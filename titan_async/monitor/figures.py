"""Plots of runs: losses, timelines of a few steps, and utilization.

Each function draws its arguments into a figure or subfigure and reads no files. matplotlib is required, a
display is not.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import PercentFormatter

from titan_async.file_io import write_output
from titan_async.monitor.curves import Curve, Utilization, gap, smoothed
from titan_async.monitor.formatting import name_stages
from titan_async.monitor.gantt import Box, Chart, Mark, draw_charts, tint_of
from titan_async.monitor.spans import RunSpans, split_pairs
from titan_async.pipelining.recording import COMPUTE_KINDS, Kind

__all__ = ["draw_losses", "draw_timelines", "draw_utilizations", "save", "style"]

_RUN_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999933")
_MAX_UNSMOOTHED = 50  # points
_MAX_NAMED = 8  # ranks in a legend


@contextmanager
def style() -> Iterator[None]:
    """The matplotlib settings of all plots: small fonts, text as text, and reproducible files."""
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "titan_async",
        "text.parse_math": False,  # labels are names of folders
        "font.sans-serif": ["DejaVu Sans", "Arial"],  # the whole default list would be in each text
        "font.size": 8,
        "axes.titlesize": 8,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "savefig.dpi": 200,
    }
    with matplotlib.rc_context(settings):
        yield


def save(figure: Figure, path: Path) -> None:
    """Writes a figure in the format of the file name's suffix.

    Raises:
        UserError: if it cannot be written.
    """
    suffix = path.suffix[1:]
    with write_output(path, "--out") as partial:
        figure.savefig(partial, format=suffix, metadata={"Date": None} if suffix == "svg" else None)


def draw_losses(figure: Figure | SubFigure, runs: Sequence[tuple[str, Curve, Curve]]) -> None:
    """Draws losses over steps; with several runs, an inset shows the difference of each to the first.

    A curve of many points is drawn thin, with its running mean on top.

    Args:
        figure: to draw into.
        runs: label, training losses and validation losses of each.
    """
    axes = figure.subplots()
    for (label, training, validation), colour in zip(runs, _colours(len(runs)), strict=True):
        _draw_curve(axes, training, colour, label)
        if len(validation):
            axes.plot(
                validation.steps, validation.values, "o", color=colour, markersize=4,
                markeredgecolor="white", markeredgewidth=0.6, zorder=4,
            )  # fmt: skip
    if any(len(validation) for *_, validation in runs):
        axes.plot([], [], "o", color="grey", markersize=4, label="validation")
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.grid(alpha=0.25, linewidth=0.5)
    handles, labels = axes.get_legend_handles_labels()
    columns = min(len(labels), 3)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=7)
    if len(runs) > 1:
        # The upper right is free, since losses decrease.
        _draw_gaps(axes.inset_axes((0.56, 0.54, 0.43, 0.4)), runs)


def _colours(count: int) -> list[str]:
    return list(islice(cycle(_RUN_COLOURS), count))


def _draw_curve(axes: Axes, curve: Curve, colour: str, label: str) -> Curve:
    """Draws a curve and returns the one that is drawn thick."""
    if len(curve) > _MAX_UNSMOOTHED:
        axes.plot(curve.steps, curve.values, color=colour, linewidth=0.4, alpha=0.35)
        curve = smoothed(curve, len(curve) // _MAX_UNSMOOTHED // 2 * 2 + 5)
    axes.plot(curve.steps, curve.values, color=colour, linewidth=1.2, label=label)
    return curve


def _draw_gaps(axes: Axes, runs: Sequence[tuple[str, Curve, Curve]]) -> None:
    base_label, base, base_validation = runs[0]
    axes.axhline(0, color=_RUN_COLOURS[0], linewidth=0.8)
    shown = [np.zeros(1)]
    for (label, training, validation), colour in zip(runs[1:], _colours(len(runs))[1:], strict=True):
        drawn = _draw_curve(axes, gap(training, base), colour, label)
        # The range is set without the first steps, in which losses fall steeply.
        shown.append(drawn.values[len(drawn) // 5 :])
        if len(validation) and len(base_validation):
            points = gap(validation, base_validation)
            axes.plot(
                points.steps, points.values, "o", color=colour, markersize=3,
                markeredgecolor="white", markeredgewidth=0.5,
            )  # fmt: skip
            shown.append(points.values)
    values = np.concatenate(shown)
    low, high = np.nanmin(values), np.nanmax(values)
    margin = 0.15 * (high - low) or 0.01
    axes.set_ylim(low - margin, high + margin)
    axes.set_title(f"loss above {base_label}", fontsize=7)
    axes.tick_params(labelsize=6)
    axes.grid(alpha=0.25, linewidth=0.5)


def draw_timelines(figure: Figure | SubFigure, runs: Sequence[tuple[str, RunSpans]]) -> None:
    """Draws a few steps of each run as a Gantt chart with a row for each rank of its first pipeline.

    All charts have the same scale; a line marks the start of a step. The forward of an overlapped pair is the
    upper half of a box, the backward the lower half.

    Args:
        figure: to draw into.
        runs: label and spans of each.
    """
    charts = [_chart(label, run) for label, run in runs]
    until = max(box.end for chart in charts for box in chart.boxes)
    draw_charts(figure, charts, "seconds", until)


def _chart(label: str, run: RunSpans) -> Chart:
    """The chart of the first pipeline that has records, with its ranks in the order of their stages."""
    first = min(spans.replica for spans in run.ranks)
    pipeline = sorted((s for s in run.ranks if s.replica == first), key=lambda spans: spans.stages)
    origin = min(int(spans.records["start"].min()) for spans in pipeline)
    boxes, marks = [], []
    for row, spans in enumerate(pipeline):
        records, halves = split_pairs(spans.records, run.info)
        for i in np.argsort(records["depth"], kind="stable"):
            record = records[i]
            kind = Kind(record["kind"])
            start, end = ((int(record[name]) - origin) / 1e9 for name in ("start", "end"))
            if kind == Kind.STEP:
                marks.append(Mark(row, start, "" if row else f"step {record['batch']}"))
                continue
            number, tint = "", 0.0
            if kind in COMPUTE_KINDS:
                number = str(record["microbatch"])
                tint = tint_of(int(record["batch"]), spans.stages.index(record["stage"]))
            boxes.append(Box(row, start, end, kind, number, tint, int(halves[i])))
    steps = f"steps {run.steps[0]} to {run.steps[-1]}" if len(run.steps) > 1 else f"step {run.steps[0]}"
    several = "; later stages of a rank are darker" if len(run.ranks[0].stages) > 1 else ""
    return Chart(f"{label}: {steps}{several}", [name_stages(s.stages) for s in pipeline], boxes, marks)


def draw_utilizations(figure: Figure | SubFigure, runs: Sequence[tuple[str, Utilization]]) -> None:
    """Draws the utilization of each rank of a pipeline over steps, and their mean.

    Args:
        figure: to draw into.
        runs: label and utilization of each.
    """
    panels = figure.subplots(len(runs), squeeze=False, sharex=True)[:, 0]
    for panel, (label, run) in zip(panels, runs, strict=True):
        shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(run.stages)))
        for stages, busy, shade in zip(run.stages, run.busy, shades, strict=True):
            named = len(run.stages) <= _MAX_NAMED or stages in (run.stages[0], run.stages[-1])
            name = name_stages(stages) if named else None
            _draw_intervals(panel, run, busy, color=shade, linewidth=0.9, label=name)
        _draw_intervals(panel, run, run.busy.mean(axis=0), color="black", linewidth=1.8, label="mean")
        panel.set_ylim(0, 1)
        panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        panel.set_ylabel("busy")
        panel.set_title(f"{label}: {run.mean:.1%}")
        panel.grid(alpha=0.25, linewidth=0.5)
        panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=7)
    panels[-1].set_xlabel("step")


def _draw_intervals(axes: Axes, run: Utilization, values: np.ndarray, **look: object) -> None:
    """A horizontal line from each interval's first training step to its last one."""
    edges = np.stack([run.first_steps - 1, run.last_steps], axis=1).ravel()
    axes.plot(edges, np.repeat(values, 2), **look)  # type: ignore[arg-type]
