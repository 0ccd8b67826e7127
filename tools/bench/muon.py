"""Compares titan_async.optim.Muon with other implementations of Muon, on CPU under gloo.

    python tools/bench/muon.py [--only aspects,notes,dense,moe] [--ranks 1,2,4] [--json results.json]

    aspects  one process: two matrices of 512 rows, and 1, 2, 4, 8 times as many columns
    notes    24 matrices (512, 512) and 12 (512, 2048)
    dense    layers of a dense model of 360M parameters
    moe      layers of a mixture of experts: matrices, and stacks of experts

The columns: time of a step on the slowest rank; megabytes (10^6) that a rank sends, see _muon_traffic.py;
peak megabytes of tensors that a step allocates, and megabytes kept between steps, on the rank with the most
(StorageTracker); relative error of the first update against the polar factor, mostly due to the coefficients,
and against the same iterations in float64, due to rounding.

All implementations are measured alternately in one run, in the same processes of one thread each, on the same
parameters and gradients; medians of the repetitions, of which slow implementations have fewer. Parameters are
float32: plain tensors on one rank, DTensors on several. Packages that are not installed are left out. For
GPUs, use tools/bench/muon_cuda.py.
"""

import statistics
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from _harness import Bench, Measured, comma_separated, median, record_of, table
from _muon_competitors import ALL, COMPETITORS
from _muon_measure import Profile, clear, load, prepare, profile, timed_step
from _muon_workloads import Case, Matrix, cases, workload

BENCH = Bench(
    __doc__,
    repeats=5,
    quick="tiny matrices on 1 and 2 ranks, one repetition",
    packages=sorted({c.package for c in COMPETITORS} - {"torch", "titan_async"}),
    width=200,
)
BENCH.add_argument(
    "--ranks", type=comma_separated((1, 2, 4), int), help="numbers of processes (default: 1,2,4)"
)
BENCH.add_argument("--layers", type=int, default=1, help="layers of the models (default: 1)")
BENCH.add_argument(
    "--compile", action="store_true", help="enable torch.compile in other implementations; takes minutes"
)

SLOW, REPEATS_OF_SLOW = 3, 3
"""An implementation that takes three times as long as the fastest has at most three repetitions."""
WRONG = 0.2
"""Relative error; rounding to bfloat16 causes at most a tenth of it."""
REFERENCE, OURS = "torch.optim.Muon", "ours"


@dataclass
class Result:
    """One implementation in one case."""

    case: Case
    name: str
    ours: bool
    refusal: str | None
    profiles: list[Profile]
    """By rank."""
    profile_seconds: float
    """Seconds to build it and to profile its first two steps."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of a step on the slowest rank, by repetition."""

    @property
    def median(self) -> float | None:
        return median(self.seconds)

    @property
    def sent(self) -> float:
        """Bytes per rank and step, averaged over ranks."""
        return statistics.mean(p.sent for p in self.profiles)

    @property
    def extra(self) -> int:
        """Bytes on the rank with the most."""
        return max(p.extra for p in self.profiles)

    @property
    def kept(self) -> int:
        """Bytes on the rank with the most."""
        return max(p.kept for p in self.profiles)

    @property
    def errors(self) -> tuple[float, float]:
        """Largest error of a shape against the polar factor, and against the iterations in float64."""
        values = self.profiles[0].errors.values()
        return max(v[0] for v in values), max(v[1] for v in values)

    @property
    def is_wrong(self) -> bool:
        """Whether the update differs from the result of the iterations on each matrix."""
        return not self.refusal and not self.errors[1] < WRONG


def measure(bench: Bench, case: Case, matrices: list[Matrix], part: str) -> list[Result]:
    """Measures all competitors of a part on one case, alternately."""
    pool = bench.pool
    pool.run(case.ranks, prepare, case, matrices, bench.arguments.compile)
    results = []
    for competitor in (c for c in COMPETITORS if part in c.parts and c.installed):
        start = time.monotonic()
        try:
            profiles = pool.run(case.ranks, profile, competitor.name)
        except RuntimeError as error:  # one rank failed, and the others wait for it
            raise RuntimeError(f"{competitor.name} ({case}): {error}") from None
        refusal = next((p.refusal for p in profiles if p.refusal), None)
        results.append(
            Result(case, competitor.name, competitor.ours, refusal, profiles, time.monotonic() - start)
        )
    running = [result for result in results if not result.refusal]
    for repetition in range(bench.repeats):
        if repetition == REPEATS_OF_SLOW:
            limit = SLOW * min(result.median or 0 for result in running)
            running = [result for result in running if (result.median or 0) < limit]
        for result in running:
            result.seconds.append(max(pool.run(case.ranks, timed_step, result.name)))
    pool.run(case.ranks, clear)
    return results


def _ratio(result: Result, other: Result | None) -> str | None:
    if other is None or other.median is None or result.median is None:
        return None
    return f"{result.median / other.median:.2f}"


def _note(result: Result, compiled: bool) -> str:
    if result.refusal:
        text = f"refuses: {result.refusal}"
        return text if len(text) <= 89 else f"{text[:86]}..."
    competitor = next(c for c in COMPETITORS if c.name == result.name)
    notes = [competitor.note] if competitor.note else []
    if competitor.compiles and not compiled:
        notes.append("not compiled")
    if result.is_wrong:
        notes.append("WRONG: does not orthogonalize each matrix")
    return ", ".join(notes)


def table_of(case: Case, matrices: list[Matrix], results: list[Result], compiled: bool) -> Any:
    """A table with one row per implementation."""
    others = [r for r in results if not (r.ours or r.is_wrong) and r.median is not None]
    fastest = min(others, key=lambda result: result.median or 0, default=None)
    reference = next((result for result in others if result.name == REFERENCE), None)
    figures = {
        "ms per step": lambda r: f"{1e3 * r.median:.1f}",
        "/ torch": lambda r: _ratio(r, reference),
        "/ fastest other": lambda r: _ratio(r, fastest),
        "sent MB": lambda r: f"{r.sent / 1e6:.2f}",
        "extra MB": lambda r: f"{r.extra / 1e6:.2f}",
        "kept MB": lambda r: f"{r.kept / 1e6:.2f}",
        "error: polar": lambda r: f"{r.errors[0]:.3f}",
        "float64": lambda r: f"{r.errors[1]:.4f}",
    }
    columns = {
        "Muon": lambda r: r.name,
        **{
            heading: lambda r, figure=figure: None if r.median is None else figure(r)
            for heading, figure in figures.items()
        },
        "note": lambda r: _note(r, compiled),
    }
    numel = sum(torch.Size(matrix.shape).numel() for matrix in matrices)
    return table(f"{case}: {len(matrices)} parameters, {numel / 1e6:.1f} M numbers", columns, results)


def feedback_share(results: list[Result]) -> dict[str, float]:
    """Relative overhead of error feedback in a step, median over the repetitions."""
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


def _ranks(bench: Bench) -> list[int]:
    return bench.arguments.ranks or ([1, 2] if bench.quick else [1, 2, 4])


def _measured(bench: Bench, part: str) -> Measured:
    bench.pool.run(bench.pool.ranks, load)
    record: dict[str, Any] = {"results": [], "feedback_share": {}, "case_seconds": {}}
    for case in cases(part, _ranks(bench)):
        start = time.monotonic()
        matrices = workload(case.workload, bench.arguments.layers, bench.quick)
        results = measure(bench, case, matrices, part)
        shares = feedback_share(results)
        bench.show(table_of(case, matrices, results, bench.arguments.compile))
        bench.show(*(f"  {name}: {100 * share:+.1f} % of a step\n" for name, share in shares.items()))
        record["case_seconds"][str(case)] = time.monotonic() - start
        record["feedback_share"][str(case)] = shares
        record["results"] += [asdict(r) if r.refusal else record_of(r) for r in results]
    missing = [c.name for c in COMPETITORS if not c.installed and part in c.parts]
    bench.show(f"not installed: {', '.join(missing) or 'none'}")
    return Measured(record)


for _part in ALL:
    BENCH.part(_part, lambda bench: {1, *_ranks(bench)})(partial(_measured, part=_part))


if __name__ == "__main__":
    BENCH.main()
