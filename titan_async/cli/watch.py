"""`titan-async watch RUN_DIR [flags]`."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from titan_async.cli.command_line import VerbParser, integer
from titan_async.errors import UserError

__all__ = ["run"]

_PARSER = VerbParser(
    "watch",
    "RUN_DIR",
    """\
Show a run during training or afterwards: activity and utilization of each stage, loss, learning rate,
throughput, and which stage waits for which. RUN_DIR is its dump_folder, on this machine or on a shared disk.
Training is not affected. When the output is not a terminal, log lines are printed until the run ends. If a
run is starting, the command waits for it.

keys: q quits, p pauses, s sorts by slowest stage, ? explains the view""",
    examples=("watch outputs", "watch outputs --once --width 120"),
)
_PARSER.option("--run", "run to show, from RUN_DIR/events (default: the latest)", metavar="RUN_ID")
_PARSER.option("--once", "print the view once and exit", action="store_true")
_PARSER.option("--svg", "write the view once as SVG", metavar="FILE")
_PARSER.option(
    "--width",
    "width in characters (default: the terminal's, or 100)",
    metavar="N",
    type=integer(1, 1000),
)
_PARSER.option(
    "--height", "height in lines (default: the terminal's, or 30)", metavar="N", type=integer(1, 1000)
)
_PARSER.option(
    "--following",
    "wait for the run that process PID starts in the folder, and end with it",
    metavar="PID",
    type=integer(),
)

_PERIOD = 0.25
_SIZE = (100, 30)


def run(argv: Sequence[str]) -> int:
    """Shows a run; returns the exit status.

    Raises:
        UserError: an option is wrong, or the folder contains no run.
    """
    line = _PARSER.parse(argv)
    [run_dir], run_id, once, svg, pid = line.operands, line.run, line.once, line.svg, line.following
    if pid is not None and (run_id or once or svg):
        raise UserError("--following waits for a run to start: omit --run, --once and --svg")
    size = line.width, line.height

    from titan_async.monitor.spans import find_run

    if pid is None and run_id is None:
        _wait_for_start(run_dir)
    if once or svg is not None:
        _picture(find_run(run_dir, run_id), svg, *size)
        return 0

    from titan_async.monitor.processes import Launched

    source = find_run(run_dir, run_id) if pid is None else Launched(run_dir, pid)
    # A terminal that lacks a character shows a question mark.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    if not sys.stdout.isatty() or os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        from titan_async.monitor.view.watch import print_lines

        return print_lines(sys.stdout, source)

    from rich.console import Console

    from titan_async.monitor.view.watch import watch

    return watch(Console(), source)


def _wait_for_start(run_dir: str) -> None:
    """If a run is starting in the folder, waits until it has written events or ended."""
    from titan_async.monitor.processes import is_starting

    if is_starting(run_dir):
        print(f"a run is starting in {run_dir}; Ctrl-C does not stop it", file=sys.stderr, flush=True)
    while is_starting(run_dir):
        time.sleep(_PERIOD)


def _picture(folder: Path, svg: str | None, width: int | None, height: int | None) -> None:
    from rich.console import Console

    from titan_async.monitor.view.watch import print_frame

    if svg is not None:
        console = Console(
            record=True, file=io.StringIO(), width=width or _SIZE[0], height=height or _SIZE[1],
            force_terminal=True, color_system="truecolor", no_color=False,
        )  # fmt: skip
        print_frame(console, folder)

        from titan_async.file_io import write_output

        with write_output(Path(svg), "--svg") as partial:
            drawn = console.export_svg(title="titan-async watch")
            # Without web fonts, which a viewer would fetch from the network.
            partial.write_text(re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL), encoding="utf-8")
        return
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    if not sys.stdout.isatty():
        width, height = width or _SIZE[0], height or _SIZE[1]
    print_frame(Console(width=width, height=height), folder)
