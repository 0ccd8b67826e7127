"""Compares what the planner predicts with what is measured here. Run by hand:

    python tools/bench/planner.py [--only time,memory,rates] [--json results.json]

"time": steps of every schedule with stages that sleep 20 ms forward and 40 ms backward, as in schedule.py,
against the simulation of the same.

"memory": the most bytes of live tensors that ranks of the debug recipes hold in four steps, against the plan.

"rates": processor time of forwards, backwards and steps of the debug recipes, against plans that
were made with a calibration of this machine, as by titan-async calibrate.

Each part is measured in one run. They take four minutes each on two idle cores.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

# In the workers too, which inherit it: one thread each, before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import _planned_memory
import _planned_rates
import _planned_time
from _pool import Pool
from rich.console import Console
from rich.table import Table


def _time(quick: bool) -> tuple[dict[str, Any], list[Table]]:
    shapes = [(2, 3)] if quick else _planned_time.SHAPES
    with Pool(sorted({1, 2, *(ranks for ranks, _ in shapes)})) as pool:
        overheads = _planned_time.measure_overheads(pool, repeats=1 if quick else 5)
        steps = _planned_time.compare(pool, shapes, overheads, repeats=1 if quick else 5)
    costs = Table("what", "milliseconds", title="Measured once, with one and two ranks")
    for name, seconds in asdict(overheads).items():
        costs.add_row(name.replace("_", " "), f"{1e3 * seconds:.2f}")
    table = Table(title="Milliseconds of a step: measured, predicted, error")
    for heading in ["schedule", *(f"{ranks} ranks, m={m}" for ranks, m in shapes)]:
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    for name in dict.fromkeys(step.schedule for step in steps):
        cells = [
            "-" if s.measured is None else f"{1e3 * s.measured:.0f}  {1e3 * s.predicted:.0f}  {s.error:+.1%}"
            for s in steps
            if s.schedule == name
        ]
        table.add_row(name, *cells)
    record = {"overheads": asdict(overheads), "steps": [{**asdict(s), "error": s.error} for s in steps]}
    return record, [costs, table]


def _memory(quick: bool) -> tuple[dict[str, Any], list[Table]]:
    peaks = _planned_memory.compare(_planned_memory.CASES[: 1 if quick else None])
    table = Table("recipe", "ranks", "flags", "stage", "measured MB", "planned MB", "error", "fullest during",
                  title="Live tensors of a rank at its fullest")  # fmt: skip
    for p in peaks:
        flags = " ".join(flag.rpartition(".")[2] for flag in p.case.flags)
        flags += " (loss in chunks)" * p.case.in_chunks
        table.add_row(p.case.recipe, str(p.case.ranks), flags, str(p.pp_rank), f"{p.measured / 1e6:.2f}",
                      f"{p.predicted / 1e6:.2f}", f"{p.error:+.1%}", p.moment)  # fmt: skip
    worst = max(abs(p.error) for p in peaks)
    table.caption = f"largest error {worst:.1%}"
    return {"peaks": [{**asdict(p), "error": p.error} for p in peaks]}, [table]


def _rates(quick: bool) -> tuple[dict[str, Any], list[Table]]:
    found = _planned_rates.compare(_planned_rates.CASES[: 1 if quick else None], repeats=1 if quick else 3)
    table = Table("recipe", "stages", "flags", "what", "measured ms", "planned ms", "error",
                  title="Processor time with a calibration of this machine")  # fmt: skip
    for s in found:
        flags = " ".join(s.case.flags[1::2])
        table.add_row(s.case.recipe, str(s.case.stages), flags, s.what, f"{1e3 * s.measured:.1f}",
                      f"{1e3 * s.predicted:.1f}", f"{s.error:+.0%}")  # fmt: skip
    return {"seconds": [{**asdict(s), "error": s.error} for s in found]}, [table]


PARTS: dict[str, Callable[[bool], tuple[dict[str, Any], list[Table]]]] = {
    "time": _time,
    "memory": _memory,
    "rates": _rates,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, separated by commas")
    parser.add_argument("--json", type=Path, help="file for every number")
    parser.add_argument("--quick", action="store_true", help="each part in its smallest form, once")
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"--only {','.join(unknown)}: the parts are {', '.join(PARTS)}")
    console, start = Console(width=max(Console().width, 140)), time.monotonic()  # also into a file
    record: dict[str, Any] = {"load_before": os.getloadavg()}
    for part in parts:
        record[part], tables = PARTS[part](arguments.quick)
        for table in tables:
            console.print(table)
    load = record["load_before"][0]
    console.print(f"{time.monotonic() - start:.0f} s, load average before {load:.1f}, {os.cpu_count()} cores")
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
