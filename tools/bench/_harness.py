"""The common parts of all benchmarks: flags, parts, worker processes, tables, JSON, exit status.

A benchmark creates a `Bench`, adds functions that measure with `Bench.part`, and calls `Bench.main`. rich is
imported only to print tables: tools/gpu runs some benchmarks with only torch installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Inherited by all processes that a benchmark starts.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from _pool import Pool

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Bench", "Measured", "comma_separated", "median", "record_of", "table"]


@dataclass(frozen=True)
class Measured:
    """The result of a part."""

    record: Any
    """For the JSON file."""
    tables: Sequence[Table | str] = ()
    missed: str = ""
    """The bound that was missed; the exit status is then 1."""


Part = Callable[["Bench"], Measured]


class Bench:
    """A benchmark's flags and parts. `arguments`, `quick`, `repeats` and `pool` are set when a part runs.

    Args:
        doc: the description that --help prints.
        repeats: default of --repeats; None for a benchmark without this flag.
        quick: help of --quick; None for a benchmark without this flag.
        quick_repeats: default of --repeats with --quick.
        packages: distributions whose versions are recorded, in addition to torch.
        width: minimum number of columns of the output.
    """

    pool: Pool

    def __init__(
        self,
        doc: str,
        *,
        repeats: int | None = None,
        quick: str | None = None,
        quick_repeats: int = 1,
        packages: Iterable[str] = (),
        width: int = 140,
    ) -> None:
        self.parser = argparse.ArgumentParser(
            description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        self.add_argument = self.parser.add_argument
        self.add_argument("--json", type=Path, help="file for every number")
        if repeats is not None:
            text = f"repetitions of each case (default: {repeats})"
            self.add_argument("--repeats", "--repetitions", type=int, help=text)
        if quick is not None:
            self.add_argument("--quick", action="store_true", help=quick)
        self._default_repeats = repeats, quick_repeats
        self._packages, self._width = tuple(packages), width
        self._parts: dict[str, tuple[Part, Callable[[Bench], Iterable[int]]]] = {}

    def part(
        self, name: str, ranks: Callable[[Bench], Iterable[int]] = lambda bench: ()
    ) -> Callable[[Part], Part]:
        """Decorates a function that measures; `ranks` returns the group sizes that it uses in `pool`."""

        def add(function: Part) -> Part:
            self._parts[name] = function, ranks
            return function

        return add

    def main(self) -> None:
        """Runs the selected parts, prints and records their results, and exits."""
        try:
            sys.exit(self._run())
        except KeyboardInterrupt:
            sys.exit(130)

    def show(self, *shown: Table | str) -> None:
        """Prints tables and lines."""
        for each in shown:
            if isinstance(each, str):
                print(each)
            else:
                from rich.console import Console

                Console(width=max(Console().width, self._width)).print(each)
        sys.stdout.flush()

    def _run(self) -> int:
        if len(self._parts) > 1:
            self.add_argument(
                "--only", type=comma_separated(self._parts), default=list(self._parts), metavar="PART,...",
                help=f"of {', '.join(self._parts)}",
            )  # fmt: skip
        self.arguments = self.parser.parse_args()
        flags = dict(vars(self.arguments))
        self.quick = flags.pop("quick", False)
        repeats, quick_repeats = self._default_repeats
        self.repeats = flags.pop("repeats", None) or (quick_repeats if self.quick else repeats) or 1
        path, chosen = flags.pop("json"), flags.pop("only", list(self._parts))
        torch.set_num_threads(1)
        load, start = os.getloadavg(), time.monotonic()
        record: dict[str, Any] = {
            "versions": _versions(self._packages),
            "machine": {"cores": os.cpu_count(), "architecture": platform.machine(), "load_before": load},
            "repeats": self.repeats,
            "flags": {
                name: str(value) if isinstance(value, Path) else value for name, value in flags.items()
            },
            "seconds": {},
            "parts": {},
        }
        missed = []
        sizes = sorted({size for name in chosen for size in self._parts[name][1](self)})
        with Pool(sizes) if sizes else contextlib.nullcontext() as self.pool:  # type: ignore[assignment]
            for name in chosen:
                part_start = time.monotonic()
                measured = self._parts[name][0](self)
                self.show(*measured.tables)
                record["seconds"][name] = time.monotonic() - part_start
                record["parts"][name] = measured.record
                missed += filter(None, [measured.missed])
        self.show(f"{time.monotonic() - start:.0f} s, load average before {load[0]:.1f}", *missed)
        if path:
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return 1 if missed else 0


def _versions(packages: Iterable[str]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "titan_async", *packages):
        try:
            found[package] = metadata.version(package.replace("_", "-"))
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def comma_separated(known: Iterable[Any], kind: Callable[[str], Any] = str) -> Callable[[str], list[Any]]:
    """The type of a flag with a comma-separated list of values of `known`."""

    def parse(text: str) -> list[Any]:
        found = [kind(item) for item in text.split(",")]
        if unknown := [item for item in found if item not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]}: choose from {', '.join(map(str, known))}")
        return found

    return parse


def median(values: Sequence[float]) -> float | None:
    """The median; None for no values."""
    return statistics.median(values) if values else None


def record_of(result: Any) -> dict[str, Any]:
    """A dataclass's fields and its properties, such as medians."""
    names = [name for name, value in vars(type(result)).items() if isinstance(value, property)]
    return {**asdict(result), **{name: getattr(result, name) for name in names}}


def table(title: str, columns: Mapping[str, Callable[[Any], object]], rows: Iterable[Any]) -> Table:
    """A table of `rows`: each column maps a row to its cell; None is shown as "-"."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = [["-" if (cell := of(row)) is None else str(cell) for of in columns.values()] for row in rows]
    shown = Table(title=title, box=SIMPLE_HEAD)
    for index, heading in enumerate(columns):
        is_numeric = all(set(line[index]) <= set("0123456789.,:+- %") for line in made)
        shown.add_column(heading, justify="right" if is_numeric else "left")
    for line in made:
        shown.add_row(*line)
    return shown
