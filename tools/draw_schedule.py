"""Draws schedules below each other on one time axis, from the list of actions of each rank.

    python tools/draw_schedule.py 1F1B ZBVZeroBubble Async2BW --pp 4 --microbatches 8 --out schedules.svg

Nothing is measured: a forward of one microbatch through all layers of a rank takes 1, a backward the value of
--backward, and each half of a split backward half of that. If a rank has two stages, each takes half as long.
With --overlap Async2BW runs overlapped pairs, drawn with the forward above the backward; a pair takes the sum
of both. Batches alternate between two shades. All schedules are drawn until the slowest has finished its
batches; the utilization in the titles is that of the steady state.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from titan_async.config.suggestions import unknown_name
from titan_async.errors import UserError
from titan_async.monitor.figures import save, style
from titan_async.monitor.gantt import Box, Chart, draw_charts, tint_of
from titan_async.pipelining.actions import min_microbatches
from titan_async.pipelining.programs import ONE_STAGE, V_SHAPED, schedule_programs, stages_of_ranks
from titan_async.pipelining.recording import Kind
from titan_async.pipelining.simulation import COMPUTE, Run, Timing, simulate

SCHEDULES = (*ONE_STAGE, "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *V_SHAPED)

KINDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.BACKWARD_INPUT, "W": Kind.BACKWARD_WEIGHT}

STEADY_BATCHES = 8  # of the simulation for the utilization


def simulated(schedule: str, arguments: argparse.Namespace, batches: int) -> Run:
    """Simulates some batches of a schedule.

    Raises:
        UserError: the schedule is unknown, or does not support the numbers.
    """
    if schedule not in SCHEDULES:
        raise UserError(unknown_name("the schedule", schedule, SCHEDULES))
    ranks, microbatches, lookahead = arguments.pp, arguments.microbatches, arguments.lookahead
    overlap = arguments.overlap and schedule == "Async2BW"
    least = min_microbatches(ranks, lookahead, overlap)
    if schedule == "Async2BW" and microbatches < least:
        raise UserError(
            f"Async2BW on {ranks} stages{f' and a lookahead of {lookahead}' if lookahead else ''}"
            f"{' with overlapped pairs' if overlap else ''} needs at least {least} microbatches, not "
            f"{microbatches}: raise --microbatches"
        )
    try:
        programs = schedule_programs(schedule, ranks, microbatches, batches, lookahead, overlap=overlap)
    except ValueError as error:
        raise UserError(f"{schedule} does not support these numbers: {error}") from None
    stages = stages_of_ranks(schedule, ranks)
    total = sum(map(len, stages))
    share = ranks / total
    timing = Timing([share] * total, [share * arguments.backward] * total, latency=arguments.latency)
    return simulate(programs, timing)


def boxes_of(run: Run) -> list[Box]:
    """The boxes of a simulation, with a row for each rank."""
    boxes = []
    for rank, spans in enumerate(run.timelines):
        first = min(span.task.stage for span in spans)
        for task, start, end in spans:
            for half, (kind, stage, batch, microbatch, _) in enumerate(task.halves, 1):
                if kind in COMPUTE:
                    tint = tint_of(batch, int(stage != first))
                    half = half if task.overlapped else 0
                    boxes.append(Box(rank, start, end, KINDS[kind], str(microbatch), tint, half))
    return boxes


def draw(figure: Figure, schedules: Sequence[str], arguments: argparse.Namespace) -> None:
    """Draws a chart for each schedule, until the slowest has finished its batches."""
    runs = [simulated(schedule, arguments, arguments.batches) for schedule in schedules]
    until = max(run.makespan for run in runs)
    rows = [f"rank {rank}" for rank in range(arguments.pp)]
    charts = []
    for schedule, run in zip(schedules, runs, strict=True):
        boxes = [box for box in boxes_of(_extended(schedule, arguments, run, until)) if box.start < until]
        charts.append(Chart(title_of(schedule, arguments), rows, boxes))
    draw_charts(figure, charts, "time, forwards of a microbatch", until)


def _extended(schedule: str, arguments: argparse.Namespace, run: Run, until: float) -> Run:
    """A simulation with enough batches not to end before `until`."""
    batches = arguments.batches
    if run.makespan == until:
        return run
    while run.makespan < until:
        batches += 1
        run = simulated(schedule, arguments, batches)
    return simulated(schedule, arguments, batches + 1)  # Async2BW drains in the last batch


def title_of(schedule: str, arguments: argparse.Namespace) -> str:
    """The title of a chart, with the utilization in the steady state."""
    several = "" if schedule in ONE_STAGE else ", two stages per rank, the second darker"
    busy = simulated(schedule, arguments, STEADY_BATCHES).utilization
    if arguments.overlap and schedule == "Async2BW":
        several = ", overlapped pairs"
    return f"{schedule}, {arguments.microbatches} microbatches{several}: busy {busy:.1%} of the time"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("schedules", nargs="+", metavar="SCHEDULE", help=", ".join(SCHEDULES))
    parser.add_argument("--pp", type=_positive, default=4, help="ranks of the pipeline (default: 4)")
    parser.add_argument("--microbatches", type=_positive, default=8, help="per batch (default: 8)")
    parser.add_argument("--batches", type=_positive, default=3, help="of the slowest schedule (default: 3)")
    parser.add_argument("--lookahead", type=_from_zero, default=0, help="of Async2BW (default: 0)")
    parser.add_argument("--overlap", action="store_true", help="overlapped pairs in Async2BW")
    parser.add_argument("--backward", type=_time, default=2.0, help="time of a backward (default: 2)")
    parser.add_argument("--latency", type=_time, default=0.0, help="time of a message (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("schedules.svg"), help="a .svg or .png file")
    arguments = parser.parse_args(argv)
    if arguments.out.suffix not in (".svg", ".png"):
        parser.error(f"--out is {arguments.out}: its name must end in .svg or .png")
    return arguments


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _from_zero(text: str) -> int:
    return _positive(f"{int(text) + 1}") - 1


def _time(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError
    return number


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        with style():
            height = 0.6 + len(arguments.schedules) * (0.5 + 0.24 * arguments.pp)
            figure = Figure((9.5, height), layout="constrained")
            draw(figure, arguments.schedules, arguments)
            save(figure, arguments.out)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
