"""`titan-async trace RUN_DIR`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from titan_async.cli.command_line import VerbParser, step_range
from titan_async.errors import UserError

__all__ = ["run"]

_STEPS = 100

_PARSER = VerbParser(
    "trace",
    "RUN_DIR",
    """\
Write the recorded spans of a run's ranks as a file for https://ui.perfetto.dev (open it there; it is not
uploaded) or chrome://tracing: a track for each stage, arrows from each send to its receive, the weight
versions, the microbatches in flight. RUN_DIR is the dump_folder of the run, which may still be training.""",
    examples=("trace outputs/debug", "trace outputs/debug --steps 1-20 --out first.json.gz"),
)
_PARSER.option(
    "--steps",
    f"steps A-B, A or A- (default: the latest {_STEPS}; files contain a few thousand)",
    metavar="A-B",
)
_PARSER.option("--run", "run to export, from RUN_DIR/events (default: the latest)", metavar="RUN_ID")
_PARSER.option(
    "--out",
    "output file, .json or .json.gz (default: trace.json in the run's folder of events)",
    metavar="FILE",
)


def run(argv: Sequence[str]) -> int:
    """Writes a trace; returns the exit status.

    Raises:
        UserError: an option is wrong, there is no such run or step, or the file cannot be written.
    """
    line = _PARSER.parse(argv)
    if line.out is not None and not re.search(r"\.json(\.gz)?$", line.out):
        raise UserError(f"--out is {line.out}: its name must end in .json or .json.gz")

    from titan_async.monitor.spans import find_run, load_spans, select_steps
    from titan_async.monitor.trace import write_trace

    folder = find_run(line.operands[0], line.run)
    loaded = load_spans(folder)
    steps = step_range(line.steps, loaded.steps, _STEPS)
    spans = select_steps(loaded, steps, include_following=True)
    path = Path(line.out) if line.out is not None else folder / "trace.json"
    lost = write_trace(path, spans)
    if loaded.missing:
        print(f"ranks without spans are omitted: {', '.join(map(str, loaded.missing))}", file=sys.stderr)
    if lost:
        print(f"{lost} arrows are omitted: the clocks of the hosts differ", file=sys.stderr)
    print(
        f"{path}: steps {spans.steps[0]} to {spans.steps[-1]} of run {spans.info.run_id}; "
        "open it in https://ui.perfetto.dev"
    )
    return 0
