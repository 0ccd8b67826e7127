"""Compares titan_async.optim.Muon with other implementations of Muon, on CPU under gloo. Run by hand:

    python tools/bench/muon.py [--only aspects,notes,dense,moe] [--ranks 1,2,4] [--json results.json]

    aspects  one process: two matrices of 512 rows, and 1, 2, 4, 8 times as many columns
    notes    24 matrices (512, 512) and 12 (512, 2048)
    dense    layers of a dense model of 360M parameters
    moe      layers of a mixture of experts: matrices, and stacks of experts

The columns: time of a step on the slowest rank; megabytes (10^6) that a rank sends, see _muon_traffic.py;
megabytes of tensors that a step holds at its peak beyond what it finds, and that are kept from step to step,
of the rank with the most (StorageTracker); relative error of the first update against the polar factor, which
is mostly that of the coefficients, and against the same iterations in float64, which is that of rounding.

Everything is measured in one run, in the same processes of one thread each, on the same parameters and
gradients, the implementations by turns; medians of the repetitions, of which the slow have fewer. Parameters
are float32, plain tensors on one rank and DTensors on more. What is not installed is left out. For GPUs there
is tools/bench/muon_cuda.py.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

# In the workers too, which inherit it: one thread each, before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from _muon_competitors import ALL, COMPETITORS, Competitor
from _muon_measure import Profile, clear, load, prepare, profile, timed_step
from _muon_workloads import Case, Matrix, cases, workload
from _pool import Pool
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import titan_async

SLOW, REPETITIONS_OF_SLOW = 3, 3
"""What takes three times as long as the fastest is timed three times at most."""
WRONG = 0.2
"""Relative error, of which rounding to bfloat16 causes a tenth at most."""
REFERENCE, OURS = "torch.optim.Muon", "ours"


@dataclass
class Result:
    """One implementation in one case."""

    case: Case
    name: str
    ours: bool
    refusal: str | None
    profiles: list[Profile]
    """Of each rank."""
    profile_seconds: float
    """Building it, and its first two steps, observed."""
    seconds: list[float] = field(default_factory=list)
    """Of a step on the slowest rank, by repetition."""

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def sent(self) -> float:
        """Bytes a rank and step, the mean of the ranks."""
        return statistics.mean(p.sent for p in self.profiles)

    @property
    def extra(self) -> int:
        """Bytes, of the rank with the most."""
        return max(p.extra for p in self.profiles)

    @property
    def kept(self) -> int:
        """Bytes, of the rank with the most."""
        return max(p.kept for p in self.profiles)

    @property
    def errors(self) -> tuple[float, float]:
        """Against the polar factor and against the iterations in float64: the shape with the largest."""
        values = self.profiles[0].errors.values()
        return max(v[0] for v in values), max(v[1] for v in values)

    @property
    def is_wrong(self) -> bool:
        """Whether the update is something else than the iterations on each matrix would give."""
        return not self.refusal and not self.errors[1] < WRONG


def measure(
    pool: Pool, case: Case, matrices: list[Matrix], competitors: list[Competitor], extent: argparse.Namespace
) -> list[Result]:
    """All competitors on one case, by turns."""
    pool.run(case.ranks, prepare, case, matrices, extent.compile)
    results = []
    for competitor in competitors:
        start = time.monotonic()
        try:
            profiles = pool.run(case.ranks, profile, competitor.name)
        except RuntimeError as error:  # one rank has failed, and the others wait for it
            raise RuntimeError(f"{competitor.name} ({case}): {error}") from None
        refusal = next((p.refusal for p in profiles if p.refusal), None)
        results.append(
            Result(case, competitor.name, competitor.ours, refusal, profiles, time.monotonic() - start)
        )
    running = [result for result in results if not result.refusal]
    for repetition in range(extent.repetitions):
        if repetition == REPETITIONS_OF_SLOW:
            limit = SLOW * min(result.median or 0 for result in running)
            running = [result for result in running if (result.median or 0) < limit]
        for result in running:
            result.seconds.append(max(pool.run(case.ranks, timed_step, result.name)))
    pool.run(case.ranks, clear)
    return results


def _ratio(result: Result, other: Result | None) -> str:
    if other is None or other.median is None or result.median is None:
        return "-"
    return f"{result.median / other.median:.2f}"


def _short(text: str | None, length: int = 80) -> str:
    text = text or ""
    return text if len(text) <= length else text[: length - 3] + "..."


def _note(competitor: Competitor, result: Result, compiled: bool) -> str:
    notes = [competitor.note] if competitor.note else []
    if competitor.compiles and not compiled:
        notes.append("not compiled")
    if result.is_wrong:
        notes.append("WRONG: does not orthogonalize each matrix")
    return ", ".join(notes)


def table_of(case: Case, matrices: list[Matrix], results: list[Result], compiled: bool) -> Table:
    """One row an implementation."""
    numel = sum(torch.Size(matrix.shape).numel() for matrix in matrices)
    table = Table(title=f"{case}: {len(matrices)} parameters, {numel / 1e6:.1f} M numbers", box=SIMPLE_HEAD)
    for heading in ["Muon", "ms a step", "of torch", "of the fastest other", "sent MB", "extra MB", "kept MB",
                    "error: polar", "float64", "note"]:  # fmt: skip
        table.add_column(heading, justify="left" if heading in ("Muon", "note") else "right")
    others = [r for r in results if not (r.ours or r.is_wrong) and r.median is not None]
    fastest = min(others, key=lambda result: result.median or 0, default=None)
    reference = next((result for result in others if result.name == REFERENCE), None)
    for result in results:
        competitor = next(c for c in COMPETITORS if c.name == result.name)
        if result.median is None:
            table.add_row(result.name, *["-"] * 8, f"refuses: {_short(result.refusal)}")
            continue
        table.add_row(
            result.name,
            f"{1e3 * result.median:.1f}",
            _ratio(result, reference),
            _ratio(result, fastest),
            *(f"{size / 1e6:.2f}" for size in (result.sent, result.extra, result.kept)),
            f"{result.errors[0]:.3f}",
            f"{result.errors[1]:.4f}",
            _note(competitor, result, compiled),
        )
    return table


def feedback_share(results: list[Result]) -> dict[str, float]:
    """What error feedback adds to a step, as a part of it: the median over the repetitions."""
    seconds = {result.name: result.seconds for result in results}
    plain = seconds.get(OURS)
    if not plain:
        return {}
    return {
        name: statistics.median(
            with_it / without - 1 for with_it, without in zip(values, plain, strict=False)
        )
        for name, values in seconds.items()
        if "eedback" in name and values
    }


def _record(result: Result) -> dict[str, Any]:
    record = asdict(result)
    if not result.refusal:
        for name in ("median", "sent", "extra", "kept", "is_wrong"):
            record[name] = getattr(result, name)
    return record


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__,
                "titan_async": titan_async.__version__}  # fmt: skip
    for package in sorted({c.package for c in COMPETITORS} - set(versions)):
        try:
            versions[package] = metadata.version(package.replace("_", "-"))
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _names(text: str, known: tuple[Any, ...], kind: type, parser: argparse.ArgumentParser, flag: str) -> list:
    try:
        chosen = [kind(item) for item in text.split(",")]
    except ValueError:
        chosen = [text]
    if unknown := [item for item in chosen if item not in known]:
        parser.error(f"{flag} {unknown[0]}: choose from {', '.join(map(str, known))}")
    return chosen


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(ALL), help="parts to run, separated by commas")
    parser.add_argument("--ranks", help="numbers of processes (default: 1,2,4)")
    parser.add_argument("--layers", type=int, default=1, help="layers of the models (default: 1)")
    parser.add_argument("--repetitions", type=int, default=5, help="timed steps of each (default: 5)")
    parser.add_argument(
        "--compile", action="store_true", help="let the others compile what they want to, which takes minutes"
    )
    parser.add_argument("--json", type=Path, help="file for every repetition and median")
    parser.add_argument("--quick", action="store_true", help="tiny matrices on 1 and 2 ranks, one repetition")
    arguments = parser.parse_args()
    arguments.only = _names(arguments.only, ALL, str, parser, "--only")
    ranks = arguments.ranks or ("1,2" if arguments.quick else "1,2,4")
    arguments.ranks = _names(ranks, (1, 2, 4), int, parser, "--ranks")
    if arguments.quick:
        arguments.repetitions = 1
    return arguments


def main() -> None:
    arguments = _arguments()
    record: dict[str, Any] = {
        "versions": _versions(),
        "machine": {"cores": os.cpu_count(), "architecture": platform.machine(),
                    "load_before": os.getloadavg()},
        "repetitions": arguments.repetitions,
        "layers": arguments.layers,
        "compiled": arguments.compile,
        "seconds": {},
        "feedback_share": {},
        "results": [],
    }  # fmt: skip
    console = Console(width=max(Console().width, 200))  # also into a file
    missing = [c.name for c in COMPETITORS if not c.installed]
    start = time.monotonic()
    with Pool(sorted({1, *arguments.ranks})) as pool:
        pool.run(max(arguments.ranks), load)
        for part in arguments.only:
            competitors = [c for c in COMPETITORS if part in c.parts and c.installed]
            for case in cases(part, arguments.ranks):
                case_start = time.monotonic()
                matrices = workload(case.workload, arguments.layers, arguments.quick)
                results = measure(pool, case, matrices, competitors, arguments)
                console.print(table_of(case, matrices, results, arguments.compile))
                shares = feedback_share(results)
                for name, share in shares.items():
                    console.print(f"  {name}: {100 * share:+.1f} % of a step\n")
                record["seconds"][str(case)] = time.monotonic() - case_start
                record["feedback_share"][str(case)] = shares
                record["results"] += [_record(result) for result in results]
    console.print(f"not installed: {', '.join(missing) or 'none is missing'}")
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
