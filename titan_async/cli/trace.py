"""`titan-async trace RUN_DIR`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from titan_async.cli.command_line import parse
from titan_async.cli.steps import step_range
from titan_async.errors import UserError

__all__ = ["run"]

_STEPS = 100

_HELP = f"""\
usage: titan-async trace RUN_DIR [flags]

Write what the ranks of a run did, span by span, as a file for https://ui.perfetto.dev (open it there; it is
not uploaded) or chrome://tracing: a track for each stage, arrows from each send to its receive, the versions
of the weights, the microbatches in flight. RUN_DIR is the run's dump_folder; the run may be going on.

flags:
  --steps A-B     or one step, A, or from A on, A- (default: the latest {_STEPS}; files hold some thousand)
  --run RUN_ID    of RUN_DIR/events (default: the latest)
  --out FILE      .json or .json.gz (default: trace.json in the run's folder of events)
  -h, --help      this text

examples:
  titan-async trace outputs/debug
  titan-async trace outputs/debug --steps 1-20 --out first.json.gz
"""


def run(argv: Sequence[str]) -> int:
    """Writes a trace or prints help; returns the exit status.

    Raises:
        UserError: a flag is wrong, there is no such run or step, or the file cannot be written.
    """
    if "-h" in argv or "--help" in argv:
        print(_HELP, end="")
        return 0
    line = parse("trace", argv, ("steps", "run", "out"))
    if len(line.words) != 1:
        raise UserError("titan-async trace needs one RUN_DIR, the dump_folder of a run")
    out = line.value("out")
    if out is not None and not re.search(r"\.json(\.gz)?$", out):
        raise UserError(f"--out is {out}: its name must end in .json or .json.gz")

    from titan_async.monitor.spans import find_run, load_spans, select_steps
    from titan_async.monitor.trace import write_trace

    folder = find_run(line.words[0], line.value("run"))
    loaded = load_spans(folder)
    steps = step_range(line.value("steps"), loaded.steps, _STEPS)
    spans = select_steps(loaded, steps, include_following=True)
    path = Path(out) if out is not None else folder / "trace.json"
    lost = write_trace(path, spans)
    if loaded.missing:
        print(f"no spans of ranks {', '.join(map(str, loaded.missing))}: left out", file=sys.stderr)
    if lost:
        print(f"{lost} arrows are left out: the clocks of the hosts differ", file=sys.stderr)
    print(
        f"{path}: steps {spans.steps[0]} to {spans.steps[-1]} of run {spans.info.run_id}; "
        "open it in https://ui.perfetto.dev"
    )
    return 0
