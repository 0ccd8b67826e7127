"""Compares Async2BW with torch's schedules: utilization, throughput, memory, overhead. Run by hand:

    python tools/bench/schedule.py [--only sleeping,jitter,compute,memory,overhead] [--json results.json]

Everything is measured in one run, in the same processes, the schedules by turns; medians of the
repetitions. It takes about eight minutes on two idle cores.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# In the workers too, which inherit it: one thread each, before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import compute
import memory
import overhead
import sleeping
import torch
from _pool import Pool
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import titan_async

PARTS = ["sleeping", "jitter", "compute", "memory", "overhead"]


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    repeats: int
    quick: bool
    """The smallest form of each part, which shows that it works and no more."""

    def shapes(self, full: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(2, 3)] if self.quick else full


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _sleeping(pool: Pool, extent: Extent) -> tuple[list[Any], Table]:
    shapes = extent.shapes(sleeping.SHAPES)
    results = sleeping.measure_sleeping(pool, shapes, extent.repeats, 1 if extent.quick else None)
    table = Table(
        title="Utilization, stages that sleep 20 ms forward and 40 ms backward, gradient clipped each step"
    )
    for heading in ["schedule", *(f"{ranks} ranks, m={m}" for ranks, m in shapes)]:
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    for name in dict.fromkeys(result.schedule for result in results):
        table.add_row(name, *(_number(r.median, ".3f") for r in results if r.schedule == name))
    return results, table


def _jitter(pool: Pool, extent: Extent) -> tuple[list[Any], Table]:
    shapes = extent.shapes(sleeping.JITTER_SHAPES)
    results = sleeping.measure_jitter(pool, shapes, extent.repeats, 1 if extent.quick else None)
    table = Table("schedule", "ranks", "m", "lookahead", "utilization", title="The same with +-30 % jitter")
    for r in results:
        table.add_row(
            r.schedule, str(r.ranks), str(r.microbatches), _number(r.lookahead, "d"), _number(r.median, ".3f")
        )
    return results, table


def _compute(pool: Pool, extent: Extent) -> tuple[list[Any], Table]:
    if extent.quick:
        results = compute.measure_compute(pool, [2], 1, compute.Model(2, 32, 16), steps=1)
    else:
        results = compute.measure_compute(pool, [2, 4, 8], extent.repeats, compute.Model())
    table = Table(
        "schedule", "m", "microbatches/s", "of 1F1B", "utilization",
        title=f"Throughput of a transformer on {compute.RANKS} ranks of one thread",
    )  # fmt: skip
    reference = {r.microbatches: r.rate for r in results if r.schedule == "1F1B"}
    for r in results:
        ratio = r.rate / reference[r.microbatches]
        table.add_row(
            r.schedule, str(r.microbatches), f"{r.rate:.2f}", f"{ratio:.2f}", f"{r.utilization:.3f}"
        )
    return results, table


def _memory(pool: Pool, extent: Extent) -> tuple[list[Any], Table]:
    results = memory.measure_memory(pool, extent.shapes([(4, 4), (4, 8)]), extent.repeats)
    parts = ["parameters", "second version", "gradients", "messages", "activations"]
    table = Table(title="Peak MiB of a stage, without optimizer state", box=SIMPLE_HEAD)
    for heading in ["schedule", "m", "lookahead", "stage", *parts, "peak", "of 1F1B", "predicted", "error"]:
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    reference = {(r.microbatches, r.stage): r.measured for r in results if r.schedule == "1F1B"}
    for r in results:
        sizes = [*(r.parts.get(part, 0) for part in parts), r.measured]
        table.add_row(
            r.schedule,
            str(r.microbatches),
            _number(r.lookahead, "d"),
            str(r.stage),
            *(f"{size / 2**20:.2f}" for size in sizes),
            f"{r.measured / reference[r.microbatches, r.stage]:.2f}",
            f"{r.predicted / 2**20:.2f}",
            f"{100 * r.error:+.1f} %",
        )
    return results, table


def _overhead(pool: Pool, extent: Extent) -> tuple[list[Any], Table]:
    results = overhead.measure_overhead(pool, extent.repeats, steps=2 if extent.quick else 10)
    table = Table(
        "schedule", "stage", "ms a pair", "of a 60 ms pair",
        title=f"CPU time in step() outside of forward and backward, {results[0].parameters} parameters",
    )  # fmt: skip
    for r in results:
        share = r.median / overhead.PAIR_SECONDS
        table.add_row(r.schedule, str(r.stage), f"{1e3 * r.median:.3f}", f"{100 * share:.2f} %")
    return results, table


MEASURE: dict[str, Callable[[Pool, Extent], tuple[list[Any], Table]]] = {
    "sleeping": _sleeping,
    "jitter": _jitter,
    "compute": _compute,
    "memory": _memory,
    "overhead": _overhead,
}
SIZES = {"sleeping": [2, 4, 8], "jitter": [4], "compute": [2], "memory": [4], "overhead": [2]}
"""Numbers of ranks that a part runs pipelines of."""


def _record(result: Any) -> dict[str, Any]:
    """A result's fields and its properties, which are the medians."""
    names = [name for name, value in vars(type(result)).items() if isinstance(value, property)]
    return {**asdict(result), **{name: getattr(result, name) for name in names}}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, separated by commas")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of each case (default: 5)")
    parser.add_argument("--json", type=Path, help="file for every repetition and median")
    parser.add_argument("--quick", action="store_true", help="each part in its smallest form, once")
    arguments = parser.parse_args()
    arguments.only = arguments.only.split(",")
    unknown = sorted(set(arguments.only) - set(PARTS))
    if unknown:
        parser.error(f"--only {','.join(unknown)}: the parts are {', '.join(PARTS)}")
    return arguments


def main() -> None:
    arguments = _arguments()
    extent = Extent(1 if arguments.quick else arguments.repeats, arguments.quick)
    sizes = [2] if arguments.quick else sorted({size for part in arguments.only for size in SIZES[part]})
    record: dict[str, Any] = {
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "titan_async": titan_async.__version__},
        "machine": {"cores": os.cpu_count(), "architecture": platform.machine(),
                    "load_before": os.getloadavg()},
        "repeats": extent.repeats,
        "seconds": {},
        "parts": {},
    }  # fmt: skip
    console = Console(width=max(Console().width, 140))  # also into a file
    start = time.monotonic()
    with Pool(sizes) as pool:
        for part in arguments.only:
            part_start = time.monotonic()
            results, table = MEASURE[part](pool, extent)
            console.print(table)
            record["seconds"][part] = time.monotonic() - part_start
            record["parts"][part] = [_record(result) for result in results]
    console.print(
        f"{time.monotonic() - start:.0f} s, load average before {record['machine']['load_before'][0]:.1f}"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
