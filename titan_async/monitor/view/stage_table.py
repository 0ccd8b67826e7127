"""The rows of a live view that show stages."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from titan_async.monitor.kinds import KINDS, Activity
from titan_async.monitor.snapshot import StageRow
from titan_async.monitor.view.strip import strip
from titan_async.pipelining.recording import FORWARD_KINDS, Kind

__all__ = ["StageTable", "sorted_rows"]

# Those of other pictures where they can be told from a dark screen.
_STRIP_COLOURS = {
    Activity.WAIT: "#444444",
    Activity.FORWARD: KINDS[Kind.FORWARD].colour,
    Activity.BACKWARD: KINDS[Kind.BACKWARD].colour,
    Activity.UPDATE: "#cc79a7",
    Activity.PAIR: KINDS[Kind.OVERLAP].colour,
}
_ORDER = (Activity.FORWARD, Activity.BACKWARD, Activity.PAIR, Activity.UPDATE, Activity.WAIT)
_LETTERS = {doing: doing.name[0] for doing in Activity} | {Activity.WAIT: "."}


@dataclass(frozen=True)
class _Column:
    title: str
    width: int
    least: int
    """The width of the terminal from which on there is room for it."""


_COLUMNS = (
    _Column("stage", 5, 0),
    _Column("last", 4, 34),
    _Column("mean", 4, 0),
    _Column("strip", 0, 24),  # takes what the others leave
    _Column("in flight", 9, 48),
    _Column("weights", 8, 92),
    _Column("memory", 10, 74),
    _Column("now", 12, 60),
    _Column("slowest", 9, 80),
)


class StageTable:
    """Draws stages, and keeps what has not changed since the last time."""

    def __init__(self) -> None:
        self._strips: dict[int, tuple[tuple[object, ...], _Strip]] = {}

    def render(
        self, rows: Sequence[StageRow], height: int, options: ConsoleOptions, colours: bool, by_slowest: bool
    ) -> Table:
        """A table of `height` lines, the titles included, at the options' width.

        Args:
            rows: in the order in which they are shown; those that do not fit are summed up.
            height: at least 2.
            options: of the console.
            colours: whether there are any.
            by_slowest: whether the slowest come first.
        """
        width = options.max_width
        copies = any(row.slowest_rank is not None for row in rows)
        columns = [
            column for column in _COLUMNS if column.least <= width and (copies or column.title != "slowest")
        ]
        cells = width - sum(column.width + 1 for column in columns if column.width) - 1
        halves = colours and not options.ascii_only
        steps = _steps_shown(rows, 2 * cells if halves else cells)
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for column in columns:
            title = _legend(rows, cells, steps, colours) if column.title == "strip" else Text(column.title)
            right = column.title in ("last", "mean", "in flight", "weights", "memory")
            table.add_column(
                title, width=column.width or cells, no_wrap=True, justify="right" if right else "left"
            )
        shown = rows if len(rows) < height else rows[: max(height - 2, 0)]
        for row in shown:
            fields = _fields(row)
            table.add_row(
                *(
                    self._strip(row, cells, steps, halves, colours)
                    if column.title == "strip"
                    else fields[column.title]
                    for column in columns
                ),
                style="bold red" if row.stalled else None,
            )
        if len(shown) < len(rows):
            # Written over the whole width, which no cell of a table can be.
            table.caption = _rest(rows[len(shown) :], by_slowest)
            table.caption_justify, table.caption_style = "left", "dim"
        return table

    def _strip(self, row: StageRow, cells: int, steps: int, halves: bool, colours: bool) -> "_Strip":
        key = (row.step, row.slowest_rank, cells, steps, halves, colours)
        known = self._strips.get(row.stage)
        if known is None or known[0] != key:
            doing = strip(row.spans[-steps:], 2 * cells if halves else cells)
            segments = _in_halves(doing) if halves else _in_letters(doing, colours)
            known = self._strips[row.stage] = key, _Strip(_joined(segments), cells)
        return known[1]


def sorted_rows(rows: Sequence[StageRow], by_slowest: bool) -> list[StageRow]:
    """In their order, or first those that are stalled, then those that compute longest."""
    if not by_slowest:
        return list(rows)
    return sorted(rows, key=lambda row: (not row.stalled, -row.busy_seconds, row.stage))


def _steps_shown(rows: Sequence[StageRow], looks: int) -> int:
    """The most steps of which single forwards and backwards can be seen, which take three cells."""
    last = [row.spans[-1].records["kind"] for row in rows if row.spans]
    microbatches = max((int(np.isin(kinds, FORWARD_KINDS).sum()) for kinds in last), default=1)
    return min(max(looks // max(3 * microbatches, 1), 1), 4)


def _fields(row: StageRow) -> dict[str, Text | str]:
    mark = "!" if row.stalled else " "
    does = KINDS[row.doing].now if row.doing is not None else ""
    return {
        "stage": f"{mark}{row.stage}",
        "last": _share(row.utilization),
        "mean": _share(row.average_utilization),
        "in flight": f"{row.in_flight} of {row.most_in_flight}",
        "weights": f"v{row.version}" if row.version >= 0 else "-",
        "memory": _memory(row),
        "now": does + _of_what(row),
        "slowest": f"rank {row.slowest_rank}" if row.slowest_rank is not None else "",
    }


def _of_what(row: StageRow) -> str:
    """Of which microbatch, or for or to which stage."""
    if row.neighbour >= 0:
        return f" {'to' if row.doing is Kind.SEND else 'for'} {row.neighbour}"
    return f" {row.microbatch}" if row.microbatch >= 0 else ""


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _memory(row: StageRow) -> str:
    """Of an accelerator with what there is, in GiB; of a process alone."""
    used = row.memory / 2**30
    if not row.memory_limit:
        return f"{used:.2f} GiB"
    return f"{used:.1f}/{row.memory_limit / 2**30:.0f}G"


def _rest(rows: Sequence[StageRow], by_slowest: bool) -> str:
    shares = [share for row in rows if (share := row.average_utilization) is not None]
    mean = f", {sum(shares) / len(shares):.0%} busy" if shares else ""
    stages = f"{len(rows)} more stage{'s' if len(rows) > 1 else ''}"
    return f" {stages}{mean}" + ("" if by_slowest else "; s sorts by slowest")


def _legend(rows: Sequence[StageRow], cells: int, steps: int, colours: bool) -> Text:
    """The strip's title, which says what its colours or letters mean."""
    pairs = any(Kind.OVERLAP in span.records["kind"] for row in rows for span in row.spans)
    names = {doing: f"{doing.name.lower()} " for doing in _ORDER if pairs or doing is not Activity.PAIR}
    if not colours:
        names = {doing: name.capitalize() if doing else ".wait" for doing, name in names.items()}
    legend = Text(f"last {steps} steps: " if steps > 1 else "last step: ")
    if len(legend) + sum(map(len, names.values())) > cells:
        legend = Text()
    if sum(map(len, names.values())) > cells:
        names = {doing: f"{_LETTERS[doing]} " for doing in names}
    for doing, name in names.items():
        legend.append(name, Style(color=_STRIP_COLOURS[doing]) if doing else Style(dim=True))
    return legend


def _in_halves(doing: Sequence[Activity]) -> list[Segment]:
    """Two cells a character: its left half in the foreground's colour, the right one in the background's."""
    return [
        Segment("▌", Style(color=_STRIP_COLOURS[left], bgcolor=_STRIP_COLOURS[right]))
        for left, right in zip(doing[::2], doing[1::2], strict=True)
    ]


def _in_letters(doing: Sequence[Activity], colours: bool) -> list[Segment]:
    return [Segment(_LETTERS[each], Style(color=_STRIP_COLOURS[each]) if colours else None) for each in doing]


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    """One segment where several of the same style follow each other."""
    return list(Segment.simplify(segments))


@dataclass(frozen=True)
class _Strip:
    """Cells that are drawn already."""

    segments: list[Segment]
    width: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.segments

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self.width, self.width)
