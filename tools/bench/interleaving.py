"""Whether several stages a rank would help Async2BW, by simulation and exact search. Run by hand:

    python tools/bench/interleaving.py [--only pace,jitter,limits,balance] [--json results.json]

Nothing is timed, so that the numbers are the same on every machine. It takes about a minute.
docs/interleaving.md says what came out.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from _greedy import greedy_programs
from _layout import Layout, least_peak, most_utilization
from _periodic import find_order
from _placements import slowest_rank
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from titan_async.pipelining.programs import async_programs
from titan_async.pipelining.simulation import COMPUTE, Run, Task, Timing, simulate

SHAPES = [(2, 2), (4, 4), (4, 8), (8, 8), (8, 16)]
"""Ranks and microbatches."""
LATENCIES = [0.0, 0.005, 0.02, 0.05]
"""Of a message, as parts of a rank's forward and backward of a microbatch."""
JITTER, JITTER_LATENCY, SEEDS = 0.3, 0.005, 5

QUICK_SHAPES = [(2, 4)]

_BATCHES = 12


@dataclass(frozen=True)
class Pace:
    """One placement at one shape."""

    ranks: int
    microbatches: int
    placement: str
    latency: float
    jitter: float
    messages: int
    """A microbatch."""
    utilization: float
    peak: float
    """Activations on the rank that holds the most; those of a microbatch on a whole rank count 1."""


@dataclass(frozen=True)
class Limit:
    """What no order of a placement can exceed."""

    ranks: int
    microbatches: int
    placement: str
    latency: float
    utilization: float
    peak: float
    """No order at full utilization holds less."""


@dataclass(frozen=True)
class Balance:
    """The slowest rank of each placement; unit: one layer."""

    model: str
    layers: int
    head: float
    ranks: int
    even: float
    """All ranks alike, which whole layers may not allow."""
    one_stage: float
    looped: float
    v_shaped: float


def _placements(ranks: int) -> dict[str, Layout]:
    return {
        "2 looped": Layout(ranks, 2),
        "2 in a V": Layout(ranks, 2, v_shaped=True),
        "4 looped": Layout(ranks, 4),
    }


@cache
def _best_programs(layout: Layout, latency: float, microbatches: int) -> list[list[Task]]:
    """The order that keeps all ranks busy with the least activations; or else the fastest greedy one."""
    order = find_order(layout, latency, microbatches)
    if order is not None:
        return order.programs(microbatches, _BATCHES)
    timing = layout.timing(latency)

    def merit(programs: list[list[Task]]) -> tuple[float, float]:
        run = simulate(programs, timing)
        return round(run.utilization, 3), -_peak(layout, run)

    fewest = max(1, microbatches // 2)
    return max(
        (greedy_programs(layout, timing, microbatches, _BATCHES, n) for n in range(fewest, microbatches + 1)),
        key=merit,
    )


def _schedules(ranks: int, microbatches: int, latency: float) -> dict[str, tuple[Layout, list[list[Task]]]]:
    """The orders that are compared: those of Async2BW, and the best found for each placement."""
    schedules: dict[str, tuple[Layout, list[list[Task]]]] = {}
    for lookahead in sorted({0, min(ranks - 1, microbatches - ranks)}):
        # Without updates, which the orders that are looked for do not have either.
        programs = [
            [task for task in tasks if task.kind in COMPUTE]
            for tasks in async_programs(ranks, microbatches, _BATCHES, lookahead)
        ]
        schedules[f"1, lookahead {lookahead}"] = Layout(ranks), programs
    for name, layout in _placements(ranks).items():
        schedules[name] = layout, _best_programs(layout, latency, microbatches)
    return schedules


def _peak(layout: Layout, run: Run) -> float:
    return max(run.peak_in_flight([1 / layout.per_rank] * layout.stages))


def _measure(shape: tuple[int, int], latency: float, jitter: float) -> list[Pace]:
    results = []
    for name, (layout, programs) in _schedules(*shape, latency).items():
        seeds = range(SEEDS if jitter else 1)
        timings: list[Timing] = [layout.timing(latency, jitter, seed) for seed in seeds]
        runs = [simulate(programs, timing) for timing in timings]
        utilization = statistics.mean(run.utilization for run in runs)
        results.append(
            Pace(*shape, name, latency, jitter, layout.messages, utilization, _peak(layout, runs[0]))
        )
    return results


def _pace(shapes: list[tuple[int, int]]) -> tuple[list[Pace], Table]:
    table = Table(title="Utilization, and activations on the rank that holds the most", box=SIMPLE_HEAD)
    for heading in ["ranks", "m", "stages a rank", "messages", *(f"latency {x:.1%}" for x in LATENCIES)]:
        table.add_column(heading)
    results = []
    for shape in shapes:
        columns = [{pace.placement: pace for pace in _measure(shape, x, 0.0)} for x in LATENCIES]
        results += [pace for column in columns for pace in column.values()]
        for name, any_pace in columns[0].items():
            cells = [f"{column[name].utilization:.3f}  {column[name].peak:g}" for column in columns]
            table.add_row(*map(str, shape), name, str(any_pace.messages), *cells)
    return results, table


def _jitter(shapes: list[tuple[int, int]]) -> tuple[list[Pace], Table]:
    table = Table(
        "ranks", "m", "stages a rank", "utilization", "activations", box=SIMPLE_HEAD,
        title=f"The same with jitter of {JITTER:.0%} at latency {JITTER_LATENCY:.1%}, {SEEDS} seeds",
    )  # fmt: skip
    results = [pace for shape in shapes for pace in _measure(shape, JITTER_LATENCY, JITTER)]
    for pace in results:
        table.add_row(
            str(pace.ranks),
            str(pace.microbatches),
            pace.placement,
            f"{pace.utilization:.3f}",
            f"{pace.peak:g}",
        )
    return results, table


def _limits(shapes: list[tuple[int, int]]) -> tuple[list[Limit], Table]:
    table = Table(
        title="For any order: utilization at most (m on their way), activations at least (at utilization 1)",
        box=SIMPLE_HEAD,
    )
    for heading in ["ranks", "m", "stages a rank", *(f"latency {x:.1%}" for x in LATENCIES)]:
        table.add_column(heading)
    results = []
    for ranks, microbatches in shapes:
        for name, layout in {"1": Layout(ranks), **_placements(ranks)}.items():
            row = [
                Limit(
                    ranks,
                    microbatches,
                    name,
                    latency,
                    most_utilization(layout, latency, microbatches),
                    least_peak(layout, latency),
                )
                for latency in LATENCIES
            ]
            results += row
            cells = [f"{limit.utilization:.3f}  {limit.peak:g}" for limit in row]
            table.add_row(str(ranks), str(microbatches), name, *cells)
    return results, table


_EMBEDDING = 1
"""Cost of an embedding in hundredths of a layer."""


def _models() -> list[tuple[str, list[int], int]]:
    """Name, cost of each layer, and of the head, in hundredths of a layer."""
    equal = [
        ("equal layers", [100] * layers, head)
        for layers in (12, 16, 24, 32, 48)
        for head in (50, 100, 200, 400)
    ]
    hybrid = [100, 100, 100, 200]
    return [
        *equal,
        ("3 dense (0.4), then MoE", [40] * 3 + [100] * 24, 100),
        ("3 dense (0.4), then MoE", [40] * 3 + [100] * 58, 100),
        ("3 to 1 hybrid (1, 2)", hybrid * 6, 100),
        ("3 to 1 hybrid (1, 2)", hybrid * 12, 100),
        ("cheap half, dear half (1, 1.5)", [100] * 16 + [150] * 16, 100),
    ]


def _balance(shapes: list[tuple[int, int]]) -> tuple[list[Balance], Table]:
    ranks_tried = range(2, 9) if shapes == SHAPES else sorted({ranks for ranks, _ in shapes})
    results = []
    for name, layers, head in _models():
        for ranks in ranks_tried:
            cost = {"first": _EMBEDDING, "last": head}
            one = slowest_rank("one stage", layers, ranks, **cost)
            # One stage a rank is a looped placement whose second stages are empty.
            looped = slowest_rank("looped", layers, ranks, **cost, at_most=one)
            v = slowest_rank("V", layers, ranks, **cost)
            even = (sum(layers) + head + _EMBEDDING) / ranks
            results.append(
                Balance(name, len(layers), head / 100, ranks, *(x / 100 for x in (even, one, looped, v)))
            )
    return results, _balance_table(results)


def _balance_table(results: list[Balance]) -> Table:
    """A row for each model; gains are how much faster the slowest rank gets."""
    models: dict[tuple[str, int, float], list[Balance]] = {}
    for result in results:
        models.setdefault((result.model, result.layers, result.head), []).append(result)
    table = Table(title="Slowest rank against one stage a rank, for every number of ranks", box=SIMPLE_HEAD)
    for heading in ["model", "layers", "head", "gain of looped", "gain of V", "over 1 % at"]:
        table.add_column(heading)
    for (name, layers, head), rows in models.items():
        looped = [row.one_stage / row.looped - 1 for row in rows]
        v_shaped = [row.one_stage / row.v_shaped - 1 for row in rows]
        where = [
            f"{row.ranks} ranks ({row.one_stage:g} to {row.looped:g}, even {row.even:.2f})"
            for row, gain in zip(rows, looped, strict=True)
            if gain > 0.01
        ]
        table.add_row(name, str(layers), f"{head:g}", _extent(looped), _extent(v_shaped), ", ".join(where))
    return table


def _extent(gains: list[float]) -> str:
    return f"{min(gains):+.1%} to {max(gains):+.1%}" if min(gains) != max(gains) else f"{gains[0]:+.1%}"


PARTS: dict[str, Callable[[list[tuple[int, int]]], tuple[list, Table]]] = {
    "pace": _pace,
    "jitter": _jitter,
    "limits": _limits,
    "balance": _balance,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, separated by commas")
    parser.add_argument("--json", type=Path, help="file for every number")
    parser.add_argument("--quick", action="store_true", help="the smallest shape alone")
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"--only {','.join(unknown)}: the parts are {', '.join(PARTS)}")
    console = Console(width=max(Console().width, 140))  # also into a file
    record = {}
    for part in parts:
        results, table = PARTS[part](QUICK_SHAPES if arguments.quick else SHAPES)
        console.print(table)
        record[part] = [asdict(result) for result in results]
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
