"""The live view's table of stages, with their last steps as a timeline."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from rich.console import ConsoleOptions
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from titan_async.monitor.kinds import KINDS, Activity
from titan_async.monitor.snapshot import StageRow
from titan_async.monitor.stage_stats import StepStats, mean_of_known
from titan_async.pipelining.recording import FORWARD_KINDS, Kind

__all__ = ["draw_stages", "strip"]

_ACTIVITY = np.array([KINDS[kind].activity for kind in Kind])
_SAMPLES = 16  # per cell

# The colours of plots, except those too dark for a dark terminal; in the order of the legend.
_COLOURS = {
    Activity.FORWARD: KINDS[Kind.FORWARD].colour,
    Activity.BACKWARD: KINDS[Kind.BACKWARD].colour,
    Activity.PAIR: KINDS[Kind.OVERLAP].colour,
    Activity.UPDATE: "#cc79a7",
    Activity.WAIT: "#444444",
}
_LETTERS = {activity: activity.name[0] for activity in Activity} | {Activity.WAIT: "."}


class _Column(NamedTuple):
    title: str
    width: int
    min_width: int
    """Minimum width of a terminal that shows the column."""
    justify: str = "left"


_COLUMNS = (
    _Column("stage", 5, 0),
    _Column("last", 4, 34, "right"),
    _Column("mean", 4, 0, "right"),
    _Column("strip", 0, 24),  # takes the remaining width
    _Column("in flight", 9, 48, "right"),
    _Column("weights", 8, 92, "right"),
    _Column("memory", 10, 74, "right"),
    _Column("now", 12, 60),
    _Column("slowest", 9, 80),
)


def draw_stages(
    rows: Sequence[StageRow], height: int, options: ConsoleOptions, colours: bool, by_slowest: bool
) -> Table:
    """A table of `height` lines, including the titles, at the options' width.

    Args:
        rows: those that do not fit are summarized in one line.
        height: at least 2.
        options: of the console.
        colours: whether the terminal has colours.
        by_slowest: sort stalled stages first, then by decreasing time of computing.
    """
    if by_slowest:
        rows = sorted(rows, key=lambda row: (not row.stalled, -row.busy_seconds, row.stage))
    width = options.max_width
    replicated = any(row.slowest_rank is not None for row in rows)
    columns = [
        each for each in _COLUMNS if each.min_width <= width and (replicated or each.title != "slowest")
    ]
    cells = width - sum(column.width + 1 for column in columns if column.width) - 1
    halves = colours and not options.ascii_only
    steps = _steps_shown(rows, 2 * cells if halves else cells)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for title, column_width, _, justify in columns:
        heading = _legend(rows, cells, steps, colours) if title == "strip" else Text(title)
        table.add_column(heading, width=column_width or cells, no_wrap=True, justify=justify)  # type: ignore[arg-type]
    shown = rows if len(rows) < height else rows[: max(height - 2, 0)]
    for row in shown:
        fields: dict[str, str | Segments] = {
            **_fields(row),
            "strip": _strip(row.steps[-steps:], cells, halves, colours),
        }
        table.add_row(*(fields[each.title] for each in columns), style="bold red" if row.stalled else None)
    if len(shown) < len(rows):
        # A caption spans all columns, and a cell cannot.
        table.caption = _rest(rows[len(shown) :], by_slowest)
        table.caption_justify, table.caption_style = "left", "dim"
    return table


def _steps_shown(rows: Sequence[StageRow], cells: int) -> int:
    """The number of steps for which each microbatch has three cells, from 1 to 4."""
    microbatches = max((row.steps[-1].count(FORWARD_KINDS) for row in rows if row.steps), default=1)
    return min(max(cells // max(3 * microbatches, 1), 1), 4)


def _fields(row: StageRow) -> dict[str, str]:
    detail = f" {row.microbatch}" if row.microbatch >= 0 else ""
    if row.neighbour >= 0:
        detail = f" {'to' if row.doing is Kind.SEND else 'for'} {row.neighbour}"
    used, limit = row.memory / 2**30, row.memory_limit / 2**30
    return {
        "stage": f"{'!' if row.stalled else ' '}{row.stage}",
        "last": _percent(row.utilization),
        "mean": _percent(row.average_utilization),
        "in flight": f"{row.in_flight} of {row.most_in_flight}",
        "weights": f"v{row.version}" if row.version >= 0 else "-",
        # The memory of an accelerator is shown with its total, that of a process without.
        "memory": f"{used:.1f}/{limit:.0f}G" if row.memory_limit else f"{used:.2f} GiB",
        "now": ("" if row.doing is None else KINDS[row.doing].now) + detail,
        "slowest": f"rank {row.slowest_rank}" if row.slowest_rank is not None else "",
    }


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.0%}"


def _rest(rows: Sequence[StageRow], by_slowest: bool) -> str:
    mean = mean_of_known(row.average_utilization for row in rows)
    busy = "" if mean is None else f", {mean:.0%} busy"
    stages = f"{len(rows)} more stage{'s' if len(rows) > 1 else ''}"
    return f" {stages}{busy}" + ("" if by_slowest else "; s sorts by slowest")


def _legend(rows: Sequence[StageRow], cells: int, steps: int, colours: bool) -> Text:
    """The title of the timeline: a legend of its colours or letters."""
    pairs = any(step.count([Kind.OVERLAP]) for row in rows for step in row.steps)
    names = {each: f"{each.name.lower()} " for each in _COLOURS if pairs or each is not Activity.PAIR}
    if not colours:
        names = {each: name.capitalize() if each else ".wait" for each, name in names.items()}
    legend = Text(f"last {steps} steps: " if steps > 1 else "last step: ")
    if len(legend) + sum(map(len, names.values())) > cells:
        legend = Text()
    if sum(map(len, names.values())) > cells:
        names = {each: f"{_LETTERS[each]} " for each in names}
    for each, name in names.items():
        legend.append(name, _COLOURS[each] if each else "dim")
    return legend


@lru_cache(maxsize=64)  # frames are drawn more often than steps end
def _strip(steps: tuple[StepStats, ...], cells: int, halves: bool, colours: bool) -> Segments:
    if halves:
        # Two cells per character: the left half in the foreground colour, the right in the background colour.
        activities = strip(steps, 2 * cells)
        pairs = zip(activities[::2], activities[1::2], strict=True)
        drawn = [Segment("▌", Style(color=_COLOURS[a], bgcolor=_COLOURS[b])) for a, b in pairs]
    else:
        activities = strip(steps, cells)
        drawn = [Segment(_LETTERS[a], Style(color=_COLOURS[a]) if colours else None) for a in activities]
    return Segments(Segment.simplify(drawn))


def strip(steps: Sequence[StepStats], cells: int) -> tuple[Activity, ...]:
    """The most frequent activity in each cell.

    Each cell is sampled 16 times, so that spans shorter than 1/16 of a cell may be missed.

    Args:
        steps: shown one after another, without the time between them.
        cells: number of cells.
    """
    if not steps or cells < 1:
        return ()
    starts = np.array([step.start for step in steps])
    lengths = np.array([step.end - step.start for step in steps])
    bounds = lengths.cumsum()
    # Times of the samples without the time between steps, then by the clock.
    samples = ((np.arange(cells * _SAMPLES) + 0.5) * (bounds[-1] / (cells * _SAMPLES))).astype(np.int64)
    step = np.searchsorted(bounds, samples, side="right").clip(max=len(steps) - 1)
    times = samples - (bounds - lengths)[step] + starts[step]
    # The innermost of nested spans starts last, so it is assigned last.
    sampled = np.zeros(len(times), np.int64)
    records = np.concatenate([step.records for step in steps])
    records = records[np.argsort(records["start"], kind="stable")]
    first, last = np.searchsorted(times, records["start"]), np.searchsorted(times, records["end"])
    for begin, end, activity in zip(first, last, _ACTIVITY[records["kind"]], strict=True):
        sampled[begin:end] = activity
    counts = np.stack([(sampled.reshape(cells, _SAMPLES) == activity).sum(axis=1) for activity in Activity])
    return tuple(Activity(activity) for activity in counts.argmax(axis=0))
