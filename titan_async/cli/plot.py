"""`titan-async plot RUN_DIR [RUN_DIR ...]`."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from titan_async.cli.command_line import VerbParser, step_range
from titan_async.errors import UserError

__all__ = ["run"]

_STEPS = 3
_FORMATS = ("png", "svg")
_WIDTH = 7.2  # inches, the text width of a page

_PARSER = VerbParser(
    "plot",
    "RUN_DIR [RUN_DIR ...]",
    """\
Draw or compare runs: loss.png shows the losses, and an inset their differences to the first run;
timeline.png the spans of each stage in a few steps; utilization.png the utilization of each stage. A RUN_DIR
is the dump_folder of a run, which may still be training; a run and those that resumed it are one curve.""",
    examples=(
        "plot outputs/debug",
        "plot outputs/debug outputs/sync --labels Async2BW,1F1B --out compared.svg",
    ),
)
_PARSER.option(
    "--out",
    "a folder for the files (default: plots in the first RUN_DIR), or one file for all three, whose name "
    "ends in .png or .svg",
    metavar="PATH",
    type=Path,
)
_PARSER.option("--format", "image format (default: png)", choices=_FORMATS)
_PARSER.option(
    "--labels", "names of the runs (default: their folders, and schedules if these differ)", metavar="A,B"
)
_PARSER.option(
    "--steps", f"steps of the timeline: A-B, A or A- (default: the latest {_STEPS})", metavar="A-B"
)


def run(argv: Sequence[str]) -> int:
    """Draws pictures; returns the exit status.

    Raises:
        UserError: an option is wrong, there is no such run or step, or a file cannot be written.
    """
    line = _PARSER.parse(argv)
    form, out = line.format or "png", line.out or Path(line.operands[0], "plots")
    if re.fullmatch(r"\.[A-Za-z]{2,4}", out.suffix) and out.suffix[1:] not in _FORMATS:
        raise UserError(f"--out is {out}: name a folder, or a file that ends in .png or .svg")
    if out.suffix[1:] in _FORMATS and line.format not in (None, out.suffix[1:]):
        raise UserError(f"--out {out} is not {form}: leave out one of --out and --format")
    _draw(line.operands, _given_labels(line.labels, len(line.operands)), line.steps, out, form)
    return 0


def _given_labels(text: str | None, runs: int) -> list[str] | None:
    if text is None:
        return None
    if not text.isprintable():
        raise UserError(f"--labels is {text}, which has control characters: use printable characters")
    labels = [label.strip() for label in text.split(",")]
    if len(labels) != runs:
        raise UserError(
            f"--labels names {len(labels)} runs, but there are {runs}: give one label for each, with commas "
            "between them"
        )
    return labels


class _Picture(NamedTuple):
    """A plot, and the runs that have records for it."""

    name: str
    draw: Callable[..., None]
    runs: list[Any]
    """Tuples of the label and the records, for `draw`."""
    height: float
    """In inches."""


def _draw(run_dirs: list[str], labels: list[str] | None, steps: str | None, out: Path, form: str) -> None:
    from matplotlib.figure import Figure

    from titan_async.monitor.figures import save, style

    pictures = _pictures(run_dirs, labels, steps)
    with style():
        drawn: dict[Path, Figure] = {}
        if out.suffix[1:] in _FORMATS:
            heights = [picture.height for picture in pictures]
            drawn[out] = Figure((_WIDTH, sum(heights)), layout="constrained")
            parts = drawn[out].subfigures(len(pictures), squeeze=False, height_ratios=heights)[:, 0]
            for part, picture in zip(parts, pictures, strict=True):
                picture.draw(part, picture.runs)
        else:
            for picture in pictures:
                figure = Figure((_WIDTH, picture.height), layout="constrained")
                picture.draw(figure, picture.runs)
                drawn[out / f"{picture.name}.{form}"] = figure
        for path, figure in drawn.items():
            save(figure, path)
            print(path)


def _pictures(run_dirs: list[str], labels: list[str] | None, steps: str | None) -> list[_Picture]:
    """Returns the pictures of runs with records, and prints on stderr which runs lack records."""
    from titan_async.monitor.curves import read_losses, read_utilization
    from titan_async.monitor.figures import draw_losses, draw_timelines, draw_utilizations
    from titan_async.monitor.spans import find_run, load_spans, select_steps

    loaded = [load_spans(find_run(run_dir)) for run_dir in run_dirs]
    names = labels or _labels(run_dirs, [run.info.schedule for run in loaded])
    losses = [(name, *read_losses(run_dir)) for name, run_dir in zip(names, run_dirs, strict=True)]
    losses = [(name, training, validation) for name, training, validation in losses if len(training)]
    timelines = [
        (name, select_steps(run, step_range(steps, run.steps, _STEPS)))
        for name, run in zip(names, loaded, strict=True)
        if run.steps
    ]
    utilizations = [(name, read_utilization(run_dir)) for name, run_dir in zip(names, run_dirs, strict=True)]
    utilizations = [(name, found) for name, found in utilizations if found is not None]
    rows = sum(len(set(run.info.ranks)) for _, run in timelines)
    pictures = [
        _Picture("loss", draw_losses, losses, 3.5),
        _Picture("timeline", draw_timelines, timelines, 0.9 + 0.45 * len(timelines) + 0.22 * rows),
        _Picture("utilization", draw_utilizations, utilizations, 0.5 + 1.3 * len(utilizations)),
    ]
    for picture in pictures:
        lacking = [name for name in names if name not in [run[0] for run in picture.runs]]
        if lacking:
            print(f"no {picture.name} of {', '.join(lacking)}: it is not recorded", file=sys.stderr)
    pictures = [picture for picture in pictures if picture.runs]
    if not pictures:
        raise UserError(f"no records yet in {', '.join(run_dirs)}: wait for the first steps")
    return pictures


def _labels(run_dirs: Sequence[str], schedules: Sequence[str]) -> list[str]:
    """Names of folders, or paths if names are equal, with schedules if these differ."""
    names = [Path(run_dir).resolve().name for run_dir in run_dirs]
    counts = Counter(names)
    names = [run_dir if counts[name] > 1 else name for run_dir, name in zip(run_dirs, names, strict=True)]
    if len(set(schedules)) == 1:
        return names
    return [
        name if schedule in name else f"{name} ({schedule})"
        for name, schedule in zip(names, schedules, strict=True)
    ]
