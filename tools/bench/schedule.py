"""Compares Async2BW with torch's schedules: utilization, throughput, memory, overhead.

    python tools/bench/schedule.py [--only sleeping,jitter,compute,memory,overhead] [--json results.json]

All schedules are measured alternately in one run, in the same processes; medians of the repetitions. It takes
about eight minutes on two idle cores.
"""

from typing import Any

import compute
import memory
import overhead
import sleeping
from _harness import Bench, Measured, record_of, table

BENCH = Bench(__doc__, repeats=5, quick="the smallest case of each part, once")


def _shapes(bench: Bench, full: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(2, 3)] if bench.quick else full


def _measured(results: list[Any], *tables: Any) -> Measured:
    return Measured([record_of(result) for result in results], tables)


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


@BENCH.part("sleeping", lambda bench: {ranks for ranks, _ in _shapes(bench, sleeping.SHAPES)})
def _sleeping(bench: Bench) -> Measured:
    shapes = _shapes(bench, sleeping.SHAPES)
    results = sleeping.measure_sleeping(bench.pool, shapes, bench.repeats, 1 if bench.quick else None)
    medians = {(r.schedule, r.ranks, r.microbatches): _share(r.median) for r in results}
    title = "Utilization, stages that sleep 20 ms forward and 40 ms backward, gradient clipped each step"
    columns = {
        f"{ranks} ranks, m={m}": lambda name, shape=(ranks, m): medians[name, *shape] for ranks, m in shapes
    }
    schedules = dict.fromkeys(result.schedule for result in results)
    return _measured(results, table(title, {"schedule": str, **columns}, schedules))


@BENCH.part("jitter", lambda bench: {ranks for ranks, _ in _shapes(bench, sleeping.JITTER_SHAPES)})
def _jitter(bench: Bench) -> Measured:
    shapes = _shapes(bench, sleeping.JITTER_SHAPES)
    results = sleeping.measure_jitter(bench.pool, shapes, bench.repeats, 1 if bench.quick else None)
    columns = {
        "schedule": lambda r: r.schedule,
        "ranks": lambda r: r.ranks,
        "m": lambda r: r.microbatches,
        "lookahead": lambda r: r.lookahead,
        "utilization": lambda r: _share(r.median),
    }
    return _measured(results, table("The same with +-30 % jitter", columns, results))


@BENCH.part("compute", lambda bench: [compute.RANKS])
def _compute(bench: Bench) -> Measured:
    if bench.quick:
        results = compute.measure_compute(bench.pool, [2], 1, compute.Model(2, 32, 16), steps=1)
    else:
        results = compute.measure_compute(bench.pool, [2, 4, 8], bench.repeats, compute.Model())
    reference = {r.microbatches: r.rate for r in results if r.schedule == "1F1B"}
    columns = {
        "schedule": lambda r: r.schedule,
        "m": lambda r: r.microbatches,
        "microbatches/s": lambda r: f"{r.rate:.2f}",
        "/ 1F1B": lambda r: f"{r.rate / reference[r.microbatches]:.2f}",
        "utilization": lambda r: _share(r.utilization),
    }
    title = f"Throughput of a transformer on {compute.RANKS} ranks of one thread"
    return _measured(results, table(title, columns, results))


@BENCH.part("memory", lambda bench: {ranks for ranks, _ in _shapes(bench, memory.SHAPES)})
def _memory(bench: Bench) -> Measured:
    results = memory.measure_memory(bench.pool, _shapes(bench, memory.SHAPES), bench.repeats)
    reference = {(r.microbatches, r.stage): r.measured for r in results if r.schedule == "1F1B"}
    kinds = ["parameters", "second version", "gradients", "messages", "activations"]
    columns = {
        "schedule": lambda r: r.schedule,
        "m": lambda r: r.microbatches,
        "lookahead": lambda r: r.lookahead,
        "stage": lambda r: r.stage,
        **{kind: lambda r, kind=kind: f"{r.parts.get(kind, 0) / 2**20:.2f}" for kind in kinds},
        "peak": lambda r: f"{r.measured / 2**20:.2f}",
        "/ 1F1B": lambda r: f"{r.measured / reference[r.microbatches, r.stage]:.2f}",
        "predicted": lambda r: f"{r.predicted / 2**20:.2f}",
        "error": lambda r: f"{100 * r.error:+.1f} %",
    }
    return _measured(results, table("Peak MiB of a stage, without optimizer state", columns, results))


@BENCH.part("overhead", lambda bench: [overhead.RANKS])
def _overhead(bench: Bench) -> Measured:
    results = overhead.measure_overhead(bench.pool, bench.repeats, steps=2 if bench.quick else 10)
    columns = {
        "schedule": lambda r: r.schedule,
        "stage": lambda r: r.stage,
        "ms per pair": lambda r: f"{1e3 * r.median:.3f}",
        "relative to 60 ms": lambda r: f"{100 * r.median / overhead.PAIR_SECONDS:.2f} %",
    }
    title = f"CPU time in step() outside of forward and backward, {results[0].parameters} parameters"
    return _measured(results, table(title, columns, results))


if __name__ == "__main__":
    BENCH.main()
