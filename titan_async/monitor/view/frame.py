"""A live view's picture of a run: a whole screen, of any size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.layout import Layout
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from titan_async.monitor.formatting import format_duration
from titan_async.monitor.journal import History, LogLine
from titan_async.monitor.snapshot import Snapshot
from titan_async.monitor.view.curve_panel import draw_curves
from titan_async.monitor.view.stage_table import StageTable, sorted_rows

__all__ = ["Frame", "Shown", "clean"]

_STATUS_STYLES = {
    "running": "green",
    "finished": "green",
    "starting": "cyan",
    "saving": "cyan",
    "validating": "cyan",
    "in its first step": "cyan",
    "stopped": "yellow",
}

_HELP = (
    ("q  p", "quit, and leave the training alone; pause the view, not the training"),
    ("s  ?", "slowest stage first, or in order; close this help"),
    ("last, mean", "share of the last step that the stage computed, and of the last 20"),
    ("strip", "what it did most of the time, cell by cell; update (U) is also what is done with gradients "
     "and weights around it, a pair (P) is a forward and a backward, overlapped"),
    ("in flight", "microbatches that have gone forward and not yet backward, of the most in the last step"),
    ("weights", "updates that the weights in use have seen"),
    ("slowest", "the rank that computes longest, where several hold the stage; the shares are their mean"),
    ("bubble", "share of the time that ranks do not compute; in parentheses the same in simulations of this "
     "schedule and of 1F1B, in which stages take as long as they do here, and nothing else takes time"),
    ("red, !", "a stage that is at one thing for more than 5 s and 5 steps, lets others wait, or is silent"),
    ("Ctrl-C", "where the training was started: it stops after this step and saves; again, at once. "
     "Elsewhere: as q"),
)  # fmt: skip


@dataclass(frozen=True)
class Shown:
    """What the user has chosen, and what the view itself has to say."""

    by_slowest: bool = False
    paused: bool = False
    help: bool = False
    note: str = ""


class Frame:
    """Draws a run, and keeps what has not changed since the last time.

    Args:
        console: on which it is shown.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._colours = console.color_system is not None and not console.no_color
        self._table = StageTable()
        self._kept: dict[str, tuple[object, RenderableType]] = {}

    def render(self, run: Snapshot, history: History, shown: Shown, width: int, height: int) -> Layout:
        """A picture of `width` characters and `height` lines.

        Args:
            run: what is known of it.
            history: what its journal has told.
            shown: what the user has chosen.
            width: at least 1.
            height: at least 1.
        """
        options = self._console.options.update(width=width, height=height)
        figures = _flow(_figures(run, history), width, most=2)
        parts = [(_header(run, width), 1), (_progress(run, options), 1), (Group(*figures), len(figures))]
        room = height - sum(size for _, size in parts) - 1
        if shown.help:
            parts.append((_help(), room))
        else:
            parts += self._body(run, history, shown, options, room)
        rows, left = [], height - 1
        for part, wanted in parts:
            size = min(wanted, left)
            rows += [Layout(part, size=size)] if size > 0 else []
            left -= max(size, 0)
        layout = Layout()
        layout.split_column(*rows, Layout(_footer(shown, width), size=1))
        return layout

    def _body(
        self, run: Snapshot, history: History, shown: Shown, options: ConsoleOptions, room: int
    ) -> list[tuple[RenderableType, int]]:
        width = options.max_width
        stalls = self._stalls(run, width)[: max(room // 4, 1)]
        plots = 0 if room < 15 or width < 30 else min(4 + room // 8, 10)
        log = 0 if room < 9 else 4
        rows = sorted_rows(run.rows, shown.by_slowest)
        table = max(min(1 + len(rows), room - len(stalls) - plots - log), min(room, 2))
        parts: list[tuple[RenderableType, int]] = [
            (self._table.render(rows, table, options, self._colours, shown.by_slowest), table),
            (Group(*stalls), len(stalls)),
        ]
        if plots:
            key = (run.entries, width, plots)
            parts.append(
                (
                    self._keep("plots", key, lambda: draw_curves(run.info.steps, history, options, plots)),
                    plots,
                )
            )
        log = room - table - len(stalls) - plots
        key = (run.entries, width, log)
        parts.append((self._keep("log", key, lambda: self._log(history.lines, width, log)), log))
        return parts

    def _keep(self, name: str, key: object, make: Callable[[], RenderableType]) -> RenderableType:
        known = self._kept.get(name)
        if known is None or known[0] != key:
            known = self._kept[name] = key, make()
        return known[1]

    def _stalls(self, run: Snapshot, width: int) -> list[Text]:
        return [
            line
            for stall in run.stalls
            for line in Text(f"! {stall.text}", "bold red").wrap(self._console, width)
        ]

    def _log(self, lines: Sequence[LogLine], width: int, height: int) -> RenderableType:
        drawn: list[Text] = []
        for line in list(lines)[-height:]:
            text = Text(clean(line.text), no_wrap=True, overflow="crop")
            if line.warns:
                text = Text(f"warning: {text.plain}", "yellow")
            # What deserves attention is shown in full.
            drawn += text.wrap(self._console, width) if line.warns else text.split(allow_blank=True)
        return Group(Rule("log", align="left", style="dim"), *drawn[max(len(drawn) - height + 1, 0) :])


def clean(text: str) -> str:
    """Text as it may be written on a terminal: without escape sequences and other control characters."""
    plain = Text.from_ansi(text.expandtabs(4)).plain
    return "".join(c if c.isprintable() or c == "\n" else "" for c in plain).strip("\n")


def _header(run: Snapshot, width: int) -> Text:
    info = run.info
    copies = len(info.ranks) // max(len(set(info.ranks)), 1)
    what = [info.schedule, _count(info.stages, "stage")] if info.stages > 1 else ["no pipeline"]
    what += [f"{copies} copies"] if copies > 1 else []
    what += [_count(info.microbatches, "microbatch"), info.device]
    left = Text.assemble((clean(info.model), "bold"), "  " + ", ".join(map(clean, what)))
    status = Text(run.status, style=_STATUS_STYLES.get(run.status, "bold red"))
    if run.elapsed is not None:
        status.append(f"  {_clock(run.elapsed)}", "default")
    return _at_both_ends(left, status, width)


def _help() -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(ratio=1)
    for word, meaning in _HELP:
        grid.add_row(word, meaning)
    return grid


def _progress(run: Snapshot, options: ConsoleOptions) -> RenderableType:
    first, steps = run.info.first_step, max(run.info.steps, 1)
    share = min(run.step / steps, 1.0)
    left = "" if run.remaining is None else f"{_clock(run.remaining)} left"
    grid = Table.grid(padding=(0, 1), expand=True)
    begin = f" from {first:,}" if first else ""
    texts = (f"step {run.step:,} of {steps:,}{begin}", f"{share:.0%}", left)
    for width in (len(texts[0]), None, 4, 13):
        grid.add_column(width=width, ratio=None if width else 1, no_wrap=True)
    bar = ProgressBar(total=1.0, completed=share, complete_style="green", finished_style="green")
    grid.add_row(texts[0], bar if options.max_width >= len(texts[0]) + 26 else "", texts[1], texts[2])
    return grid


def _figures(run: Snapshot, history: History) -> list[Text]:
    rate = "-" if history.tokens_per_second is None else f"{history.tokens_per_second:,.0f}"
    mfu = "-" if history.mfu is None else f"{history.mfu:.1%}"
    figures = [Text(f"{rate} tokens/s"), Text(f"MFU {mfu}")]
    if run.bubble is not None:
        figures.append(Text(f"bubble {run.bubble:.1%}"))
        simulated = (("", run.simulated_bubble), ("1F1B ", run.simulated_bubble_of_1f1b))
        if words := [f"{name}{bubble:.1%}" for name, bubble in simulated if bubble is not None]:
            figures[-1].append(f" (simulated: {', '.join(words)})", "dim")
    last = "" if history.checkpoint is None else f", last {history.checkpoint:,}"
    figures.append(Text(_count(history.checkpoints, "checkpoint") + last))
    figures.append(Text(f"{_count(history.skipped, 'update')} skipped", "yellow" if history.skipped else ""))
    figures.append(Text(_count(history.warnings, "warning"), "yellow" if history.warnings else ""))
    return figures


def _flow(items: Sequence[Text], width: int, most: int) -> list[Text]:
    """Items one after another on at most so many lines; those that do not fit are left out."""
    lines: list[Text] = [Text(no_wrap=True)]
    for item in items:
        gap = "  " if len(lines[-1]) else ""
        if lines[-1].cell_len + len(gap) + item.cell_len > width and len(lines[-1]):
            if len(lines) == most:
                break
            lines.append(Text(no_wrap=True))
            gap = ""
        lines[-1].append(gap).append_text(item)
    return lines


def _footer(shown: Shown, width: int) -> Text:
    left = Text("q quit  p pause  s sort by slowest  ? help", "dim")
    notes = [("paused", "reverse")] * shown.paused + [(shown.note, "bold yellow")] * bool(shown.note)
    right = Text("  ").join(Text(text, style) for text, style in notes)
    return _at_both_ends(left, right, width)


def _at_both_ends(left: Text, right: Text, width: int) -> Text:
    """One line, of which the right end is never left out."""
    left.truncate(max(width - right.cell_len - 2, 0), overflow="crop")
    gap = max(width - left.cell_len - right.cell_len, 0)
    line = Text(no_wrap=True, overflow="crop")
    return line.append_text(left).append(" " * gap).append_text(right)


def _count(number: int, what: str) -> str:
    plural = what + ("es" if what.endswith("ch") else "s")
    return f"{number:,} {what if number == 1 else plural}"


def _clock(seconds: int) -> str:
    """1:02, 3:04:05 or 6 d 07:08."""
    hours, minutes = divmod(seconds // 60, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02}:{minutes:02}"
    return format_duration(seconds)
