"""Whether several stages per rank would make Async2BW faster, by simulation and exact search.

    python tools/bench/interleaving.py [--only pace,jitter,limits,balance] [--json results.json]

Nothing is timed, so the results are the same on every machine. It takes about a minute. docs/interleaving.md
has the results.
"""

import statistics
from dataclasses import dataclass
from functools import cache
from typing import Any

from _greedy import greedy_programs
from _harness import Bench, Measured, record_of, table
from _layout import Layout, least_peak, most_utilization
from _periodic import find_order
from _placements import slowest_rank

from titan_async.pipelining.programs import async_programs
from titan_async.pipelining.simulation import COMPUTE, Run, Task, Timing, simulate

BENCH = Bench(__doc__, quick="only the smallest shape")

SHAPES = [(2, 2), (4, 4), (4, 8), (8, 8), (8, 16)]
"""Ranks and microbatches."""
LATENCIES = [0.0, 0.005, 0.02, 0.05]
"""Of a message, relative to a rank's forward and backward of a microbatch."""
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
    """Per microbatch."""
    utilization: float
    peak: float
    """Activations on the rank with the most; those of a microbatch on all stages of a rank count 1."""


@dataclass(frozen=True)
class Limit:
    """Bounds for all orders of a placement."""

    ranks: int
    microbatches: int
    placement: str
    latency: float
    utilization: float
    peak: float
    """Lower bound at full utilization."""


@dataclass(frozen=True)
class Balance:
    """The slowest rank of each placement; unit: one layer."""

    model: str
    layers: int
    head: float
    ranks: int
    even: float
    """All ranks equal, which may not be possible with whole layers."""
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
    """The order that keeps all ranks busy with the fewest activations; otherwise the fastest greedy one."""
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
    """The compared orders: those of Async2BW, and the best found for each placement."""
    schedules: dict[str, tuple[Layout, list[list[Task]]]] = {}
    for lookahead in sorted({0, min(ranks - 1, microbatches - ranks)}):
        # Without updates, like the orders of the searches.
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


def _shapes(bench: Bench) -> list[tuple[int, int]]:
    return QUICK_SHAPES if bench.quick else SHAPES


def _by_latency(title: str, results: list[Any], **more: Any) -> Measured:
    """A row for each placement at a shape, with utilization and peak at every latency."""
    found = {(r.ranks, r.microbatches, r.placement, r.latency): r for r in results}

    def cell(row: Any, latency: float) -> str:
        at = found[row.ranks, row.microbatches, row.placement, latency]
        return f"{at.utilization:.3f}  {at.peak:g}"

    columns = {
        "ranks": lambda row: row.ranks,
        "m": lambda row: row.microbatches,
        "stages per rank": lambda row: row.placement,
        **more,
        **{f"latency {x:.1%}": lambda row, x=x: cell(row, x) for x in LATENCIES},
    }
    rows = [row for row in results if row.latency == LATENCIES[0]]
    return Measured([record_of(result) for result in results], [table(title, columns, rows)])


@BENCH.part("pace")
def _pace(bench: Bench) -> Measured:
    results = [pace for shape in _shapes(bench) for x in LATENCIES for pace in _measure(shape, x, 0.0)]
    title = "Utilization, and activations on the rank with the most"
    return _by_latency(title, results, messages=lambda row: row.messages)


@BENCH.part("jitter")
def _jitter(bench: Bench) -> Measured:
    results = [pace for shape in _shapes(bench) for pace in _measure(shape, JITTER_LATENCY, JITTER)]
    columns = {
        "ranks": lambda pace: pace.ranks,
        "m": lambda pace: pace.microbatches,
        "stages per rank": lambda pace: pace.placement,
        "utilization": lambda pace: f"{pace.utilization:.3f}",
        "activations": lambda pace: f"{pace.peak:g}",
    }
    title = f"The same with jitter of {JITTER:.0%} at latency {JITTER_LATENCY:.1%}, {SEEDS} seeds"
    return Measured([record_of(result) for result in results], [table(title, columns, results)])


@BENCH.part("limits")
def _limits(bench: Bench) -> Measured:
    results = [
        Limit(
            ranks,
            microbatches,
            name,
            latency,
            most_utilization(layout, latency, microbatches),
            least_peak(layout, latency),
        )
        for ranks, microbatches in _shapes(bench)
        for name, layout in {"1": Layout(ranks), **_placements(ranks)}.items()
        for latency in LATENCIES
    ]
    title = "For any order: utilization at most (m in flight), activations at least (at utilization 1)"
    return _by_latency(title, results)


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


@BENCH.part("balance")
def _balance(bench: Bench) -> Measured:
    ranks_tried = sorted({ranks for ranks, _ in QUICK_SHAPES}) if bench.quick else range(2, 9)
    results = []
    for name, layers, head in _models():
        for ranks in ranks_tried:
            cost = {"first": _EMBEDDING, "last": head}
            one = slowest_rank("one stage", layers, ranks, **cost)
            # One stage per rank is a looped placement whose second stages are empty.
            looped = slowest_rank("looped", layers, ranks, **cost, at_most=one)
            v = slowest_rank("V", layers, ranks, **cost)
            even = (sum(layers) + head + _EMBEDDING) / ranks
            results.append(
                Balance(name, len(layers), head / 100, ranks, *(x / 100 for x in (even, one, looped, v)))
            )
    models: dict[tuple[str, int, float], list[Balance]] = {}
    for result in results:
        models.setdefault((result.model, result.layers, result.head), []).append(result)
    columns = {
        "model": lambda rows: rows[0].model,
        "layers": lambda rows: rows[0].layers,
        "head": lambda rows: f"{rows[0].head:g}",
        "gain of looped": lambda rows: _extent([row.one_stage / row.looped - 1 for row in rows]),
        "gain of V": lambda rows: _extent([row.one_stage / row.v_shaped - 1 for row in rows]),
        "over 1 % at": lambda rows: ", ".join(
            f"{row.ranks} ranks ({row.one_stage:g} to {row.looped:g}, even {row.even:.2f})"
            for row in rows
            if row.one_stage / row.looped - 1 > 0.01
        ),
    }
    title = "Speed of the slowest rank relative to one stage per rank, over all numbers of ranks"
    return Measured([record_of(result) for result in results], [table(title, columns, models.values())])


def _extent(gains: list[float]) -> str:
    return f"{min(gains):+.1%} to {max(gains):+.1%}" if min(gains) != max(gains) else f"{gains[0]:+.1%}"


if __name__ == "__main__":
    BENCH.main()
