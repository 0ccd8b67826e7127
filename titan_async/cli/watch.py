"""`titan-async watch RUN_DIR [flags]`."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from titan_async.cli.command_line import parse
from titan_async.errors import UserError

__all__ = ["run"]

_HELP = """\
usage: titan-async watch RUN_DIR [flags]

Show a run while it trains, or after the fact: what each stage does and how busy it is, loss, learning rate,
speed, and who waits for whom. RUN_DIR is its dump_folder, on this machine or on a shared disk. The training
is not touched. Without a terminal it prints what the run says, line by line, until the run ends. Where a run
is about to begin, it waits for it.

keys: q quits, p pauses, s sorts by slowest stage, ? explains what is shown

flags:
  --run RUN_ID            one of several runs in the folder (default: the latest), as in RUN_DIR/events
  --once                  print one picture and exit
  --svg FILE              write one picture as SVG
  --width N, --height N   characters and lines of a picture (default: the terminal's, or 100 and 30)
  --following PID         wait for the run that process PID starts in the folder, and end with it
  -h, --help              this text

examples:
  titan-async watch outputs
  titan-async watch outputs --once --width 120
"""

_PERIOD = 0.25
_SIZE = (100, 30)
_LARGEST = 1000


_FLAGS = ("run", "svg", "width", "height", "following")


def run(argv: Sequence[str]) -> int:
    """Shows a run, or prints help; returns the exit status.

    Raises:
        UserError: a flag is wrong, or the folder holds no run.
    """
    if "-h" in argv or "--help" in argv:
        print(_HELP, end="")
        return 0
    line = parse("watch", argv, _FLAGS, switches=("once",))
    if len(line.words) != 1:
        raise UserError("titan-async watch needs one RUN_DIR, the dump_folder of a run")
    run_dir, run_id, once = line.words[0], line.value("run"), "once" in line.values
    svg, pid = line.value("svg"), line.whole("following", None)
    if pid is not None and (run_id or once or svg):
        raise UserError("--following waits for a run to begin: leave out --run, --once and --svg")
    size = line.whole("width", None, most=_LARGEST), line.whole("height", None, most=_LARGEST)

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
    """Waits for the events of a run that starts in the folder, as long as there are none and it goes on."""
    from titan_async.monitor.processes import is_starting

    if is_starting(run_dir):
        print(f"a run starts in {run_dir}; Ctrl-C leaves it alone", file=sys.stderr, flush=True)
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
            # Without the fonts, which whoever looks at it would fetch from the network.
            partial.write_text(re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL), encoding="utf-8")
        return
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    if not sys.stdout.isatty():
        width, height = width or _SIZE[0], height or _SIZE[1]
    print_frame(Console(width=width, height=height), folder)
