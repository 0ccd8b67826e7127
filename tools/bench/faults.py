"""Injects faults into runs: kills, signals, full disks, lack of memory, wrong data; prints one table.

    python tools/bench/faults.py                    # all families except soak; about an hour on two cores
    python tools/bench/faults.py kills storage      # some families
    python tools/bench/faults.py soak --minutes 30

Faults are injected into runs of the debug recipes, in separate processes.
"""

import importlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # for tests.support

from _faults.result import Result
from _harness import Bench, Measured, record_of, table

BENCH = Bench(__doc__, quick="fewer tries of each fault")

FAMILIES = ("kills", "signals", "storage", "numbers", "data", "slowness", "soak")
"""Modules of `_faults`, each with a generator `measure(scratch, quick=..., ...)` of results."""

BENCH.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}")
BENCH.add_argument("--minutes", type=float, default=30.0, help="duration of soak")


def _seconds(name: str) -> Callable[[Result], str]:
    return lambda result: "" if getattr(result, name) is None else f"{getattr(result, name):.1f}"


@BENCH.part("faults")
def _faults(bench: Bench) -> Measured:
    chosen, results = bench.arguments.families or FAMILIES[:-1], []
    if unknown := set(chosen) - set(FAMILIES):
        bench.parser.error(f"no such family: {', '.join(sorted(unknown))}")
    for family in chosen:
        measure = importlib.import_module(f"_faults.{family}").measure
        options = {"minutes": bench.arguments.minutes} if family == "soak" else {"quick": bench.quick}
        with tempfile.TemporaryDirectory(prefix="faults_") as scratch:
            start = time.perf_counter()
            for result in measure(Path(scratch), **options):
                results.append(result)
                seconds = time.perf_counter() - start
                bench.show(f"{family}: {result.fault}: {result.survived} of {result.tried} ({seconds:.0f} s)")
    columns = {
        "family": lambda r: r.family,
        "fault": lambda r: r.fault,
        "tried": lambda r: r.tried,
        "survived": lambda r: r.survived,
        "steps lost": lambda r: "" if r.work_lost is None else r.work_lost,
        "noticed, s": _seconds("notice"),
        "resumed, s": _seconds("resume"),
        "message": lambda r: r.said,
    }
    return Measured([record_of(result) for result in results], [table("Faults", columns, results)])


if __name__ == "__main__":
    BENCH.main()
