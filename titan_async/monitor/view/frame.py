"""The live view's frame: a full screen of any size."""

from collections.abc import Sequence
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
from titan_async.monitor.view.stage_table import draw_stages

__all__ = ["ViewOptions", "clean", "render_frame"]

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
    ("q  p", "quit the view; pause the view. Training continues"),
    ("s  ?", "sort by slowest stage, or by index; close this help"),
    ("last, mean", "fraction of the last step, and of the last 20 steps, in which the stage computed"),
    ("strip", "the main activity in each cell; update (U) includes work on gradients and weights around it, "
     "pair (P) is an overlapped forward and backward"),
    ("in flight", "microbatches between their forward and their backward, of the peak in the last step"),
    ("weights", "version: the number of updates applied to the weights in use"),
    ("slowest", "the rank with the most compute time, if several hold the stage; fractions are their mean"),
    ("bubble", "fraction of the time in which ranks do not compute; in parentheses: simulated for this "
     "schedule and for 1F1B with the stages' measured times, without other costs"),
    ("red, !", "a stage whose current span exceeds 5 s and 5 steps, or whose rank has sent no heartbeat"),
    ("Ctrl-C", "in the terminal of the training: stop after this step and save; a second one stops "
     "immediately. Elsewhere: same as q"),
)  # fmt: skip


@dataclass(frozen=True)
class ViewOptions:
    """Options that keys toggle, and a note in the last line."""

    by_slowest: bool = False
    paused: bool = False
    help: bool = False
    note: str = ""


def render_frame(
    console: Console, run: Snapshot, history: History, shown: ViewOptions, width: int, height: int
) -> Layout:
    """Renders a run in `width` characters and `height` lines.

    Args:
        console: the console that prints the frame.
        run: its state.
        history: of its journal.
        shown: the options.
        width: at least 1.
        height: at least 1.
    """
    options = console.options.update(width=width, height=height)
    metrics = _flow(_metrics(run, history), width, max_lines=2)
    sections: list[tuple[RenderableType, int]] = [
        (_header(run, width), 1),
        (_progress(run, options), 1),
        (Group(*metrics), len(metrics)),
    ]
    left = height - 1
    room = left - sum(size for _, size in sections)
    sections += [(_help(), room)] if shown.help else _body(console, run, history, shown, options, room)
    rows = []
    for section, wanted in sections:
        if (size := min(wanted, left)) > 0:
            rows.append(Layout(section, size=size))
            left -= size
    layout = Layout()
    layout.split_column(*rows, Layout(_footer(shown, width), size=1))
    return layout


def _body(
    console: Console, run: Snapshot, history: History, shown: ViewOptions, options: ConsoleOptions, room: int
) -> list[tuple[RenderableType, int]]:
    """Stages, stalls, curves and log, each with its number of lines."""
    width = options.max_width
    warnings = [Text(f"! {stall.text}", "bold red") for stall in run.stalls]
    stalls = [line for text in warnings for line in text.wrap(console, width)][: max(room // 4, 1)]
    plots = 0 if room < 15 or width < 30 else min(4 + room // 8, 10)
    least_log = 0 if room < 9 else 4
    table = max(min(1 + len(run.rows), room - len(stalls) - plots - least_log), min(room, 2))
    log = room - table - len(stalls) - plots
    colours = console.color_system is not None and not console.no_color
    sections: list[tuple[RenderableType, int]] = [
        (draw_stages(run.rows, table, options, colours, shown.by_slowest), table),
        (Group(*stalls), len(stalls)),
    ]
    if plots:
        sections.append((draw_curves(run.info.steps, history, options, plots), plots))
    return [*sections, (_log(console, history.lines, width, log), log)]


def _log(console: Console, lines: Sequence[LogLine], width: int, height: int) -> RenderableType:
    drawn: list[Text] = []
    for line in list(lines)[-height:]:
        text = Text(clean(line.text), no_wrap=True, overflow="crop")
        if line.is_warning:
            # Warnings are shown in full.
            drawn += Text(f"warning: {text.plain}", "yellow").wrap(console, width)
        else:
            drawn += text.split(allow_blank=True)
    return Group(Rule("log", align="left", style="dim"), *drawn[max(len(drawn) - height + 1, 0) :])


def clean(text: str) -> str:
    """Removes escape sequences and other control characters from text for a terminal."""
    plain = Text.from_ansi(text.expandtabs(4)).plain
    return "".join(c if c.isprintable() or c == "\n" else "" for c in plain).strip("\n")


def _header(run: Snapshot, width: int) -> Text:
    info = run.info
    replicas = len(info.ranks) // max(len(set(info.ranks)), 1)
    what = [info.schedule, _count(info.stages, "stage")] if info.stages > 1 else ["no pipeline"]
    if run.is_synchronous:
        what[0] += f" (synchronous up to step {info.synchronous_steps:,})"
    what += [f"{replicas} replicas"] if replicas > 1 else []
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
    fraction = min(run.step / steps, 1.0)
    left = "" if run.remaining is None else f"{_clock(run.remaining)} left"
    grid = Table.grid(padding=(0, 1), expand=True)
    begin = f" from {first:,}" if first else ""
    texts = (f"step {run.step:,} of {steps:,}{begin}", f"{fraction:.0%}", left)
    for width in (len(texts[0]), None, 4, 13):
        grid.add_column(width=width, ratio=None if width else 1, no_wrap=True)
    bar = ProgressBar(total=1.0, completed=fraction, complete_style="green", finished_style="green")
    grid.add_row(texts[0], bar if options.max_width >= len(texts[0]) + 26 else "", texts[1], texts[2])
    return grid


def _metrics(run: Snapshot, history: History) -> list[Text]:
    rate, mfu = history.last("step", "tokens_per_second"), history.last("step", "mfu")
    skipped, saved = int(history.last("step", "skipped") or 0), history.last("checkpoint", "step")
    warnings = history.counts["warning"]
    metrics = [
        Text("- tokens/s" if rate is None else f"{rate:,.0f} tokens/s"),
        Text("MFU -" if mfu is None else f"MFU {mfu:.1%}"),
    ]
    if run.bubble is not None:
        metrics.append(Text(f"bubble {run.bubble:.1%}"))
        simulated = (("", run.simulated_bubble), ("1F1B ", run.simulated_bubble_of_1f1b))
        if known := [f"{name}{bubble:.1%}" for name, bubble in simulated if bubble is not None]:
            metrics[-1].append(f" (simulated: {', '.join(known)})", "dim")
    last = "" if saved is None else f", last {saved:,}"
    return [
        *metrics,
        Text(_count(history.counts["checkpoint"], "checkpoint") + last),
        Text(f"{_count(skipped, 'update')} skipped", "yellow" if skipped else ""),
        Text(_count(warnings, "warning"), "yellow" if warnings else ""),
    ]


def _flow(items: Sequence[Text], width: int, max_lines: int) -> list[Text]:
    """Wraps items to at most `max_lines` lines; items that do not fit are left out."""
    lines: list[Text] = [Text(no_wrap=True)]
    for item in items:
        gap = "  " if len(lines[-1]) else ""
        if lines[-1].cell_len + len(gap) + item.cell_len > width and len(lines[-1]):
            if len(lines) == max_lines:
                break
            lines.append(Text(no_wrap=True))
            gap = ""
        lines[-1].append(gap).append_text(item)
    return lines


def _footer(shown: ViewOptions, width: int) -> Text:
    left = Text("q quit  p pause  s sort by slowest  ? help", "dim")
    notes = [("paused", "reverse")] * shown.paused + [(shown.note, "bold yellow")] * bool(shown.note)
    right = Text("  ").join(Text(text, style) for text, style in notes)
    return _at_both_ends(left, right, width)


def _at_both_ends(left: Text, right: Text, width: int) -> Text:
    """A line with texts at both ends; if it is too short, the left one is cropped."""
    left.truncate(max(width - right.cell_len - 2, 0), overflow="crop")
    gap = max(width - left.cell_len - right.cell_len, 0)
    line = Text(no_wrap=True, overflow="crop")
    return line.append_text(left).append(" " * gap).append_text(right)


def _count(number: int, what: str) -> str:
    plural = what + ("es" if what.endswith("ch") else "s")
    return f"{number:,} {what if number == 1 else plural}"


def _clock(seconds: int) -> str:
    """Formats seconds as 1:02, 3:04:05 or 6 d 07:08."""
    hours, minutes = divmod(seconds // 60, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02}:{minutes:02}"
    return format_duration(seconds)
