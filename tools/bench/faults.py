"""What runs do about faults: killed, stopped, starved and lied to, in one table.

    python tools/bench/faults.py                    # everything but the soak; about an hour on two cores
    python tools/bench/faults.py kills storage      # some families
    python tools/bench/faults.py soak --minutes 30

Every fault is done to runs of the debug recipes, in processes of their own.
"""

import argparse
import importlib
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from _faults.result import as_table
from rich.console import Console

FAMILIES = ("kills", "signals", "storage", "numbers", "data", "slowness", "soak")
"""Modules of `_faults`, each with `measure(scratch, quick=..., ...)`, which yields results."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--quick", action="store_true", help="fewer tries of each fault")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long the soak lasts")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    unknown = set(arguments.families) - set(FAMILIES)
    if unknown:
        parser.error(f"no such family: {', '.join(sorted(unknown))}")

    console = Console(width=None if Console().is_terminal else 140)
    results = []
    for family in arguments.families or FAMILIES[:-1]:
        measure = importlib.import_module(f"_faults.{family}").measure
        options = {"minutes": arguments.minutes} if family == "soak" else {"quick": arguments.quick}
        with tempfile.TemporaryDirectory(prefix="faults_") as scratch:
            start = time.perf_counter()
            for result in measure(Path(scratch), **options):
                results.append(result)
                seconds = time.perf_counter() - start
                console.print(
                    f"{family}: {result.fault}: {result.survived} of {result.tried} ({seconds:.0f} s)"
                )
    console.print(as_table(results))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
