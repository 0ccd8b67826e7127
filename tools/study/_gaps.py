"""Losses and gaps of runs over seeds, with their 95 % intervals."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from _results import Results, own_rate, tuned_rate
from _runs import Run, synchronous

from titan_async.errors import UserError

__all__ = ["Interval", "Losses", "interval"]

_T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Two-sided quantiles of Student's t by the number of values."""


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its 95 % interval, which is NaN for a single value."""

    mean: float
    half: float
    count: int = 0
    """Number of values."""

    def shown(self, signed: bool = False) -> str:
        mean = f"{self.mean:+.3f}" if signed else f"{self.mean:.3f}"
        return mean if math.isnan(self.half) else f"{mean} ± {self.half:.3f}"


def interval(values: Sequence[float]) -> Interval:
    """The 95 % interval of the mean of at most ten values, by Student's t."""
    count = len(values)
    half = _T_95[count] * statistics.stdev(values) / math.sqrt(count) if count > 1 else math.nan
    return Interval(statistics.fmean(values), half, count)


class Losses:
    """Losses and gaps of runs over their seeds; None for runs that were not measured or that diverged."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._seeds: dict[Run, dict[int, dict[str, Any]]] = defaultdict(dict)
        for row in results.by_key.values():
            run = Run(**row["run"])
            self._seeds[replace(run, seed=0)][run.seed] = row

    def rows(self, run: Run) -> dict[int, dict[str, Any]]:
        """The results of a run by seed; "tuned" and "own" are looked up."""
        if isinstance(run.lr, str):
            rate = self.rate(run)
            if rate is None:
                return {}
            run = replace(run, lr=rate)
        return self._seeds.get(replace(run, seed=0), {})

    def wallclock(self, budget_s: float) -> list[dict[str, Any]]:
        """The results of question 8 for runs of `budget_s` seconds."""
        return [row for row in self._results.wallclock if row["budget_s"] == budget_s]

    def rate(self, run: Run) -> float | None:
        """The learning rate of a run whose `lr` is "tuned" or "own"; None if it was not compared."""
        try:
            return (own_rate if run.lr == "own" else tuned_rate)(run, self._results)
        except UserError:
            return None

    def loss(self, run: Run, key: str = "test") -> Interval | None:
        """The mean of a loss over seeds; None if a seed diverged."""
        rows = self.rows(run).values()
        if not rows or any(row["diverged"] for row in rows):
            return None
        return interval([row[key] for row in rows])

    def diverged(self, run: Run) -> int:
        """How many seeds did."""
        return sum(row["diverged"] for row in self.rows(run).values())

    def gap(self, run: Run, key: str = "test", over: Run | None = None) -> Interval | None:
        """Difference to the synchronous run of the same optimizer, rate and momentum, paired by seed."""
        rows, base = self.rows(run), self.rows(over or synchronous(run))
        seeds = sorted(rows.keys() & base.keys())
        if not seeds or any(rows[seed]["diverged"] or base[seed]["diverged"] for seed in seeds):
            return None
        return interval([rows[seed][key] - base[seed]["test"] for seed in seeds])

    def changed(self, run: Run, key: str) -> Interval | None:
        """Difference of another loss to that of the test split; None if it was not measured."""
        rows = [row for row in self.rows(run).values() if key in row and not row["diverged"]]
        return interval([row[key] - row["test"] for row in rows]) if rows else None

    def shown_gap(self, run: Run, key: str = "test", over: Run | None = None) -> str:
        """A cell of a table."""
        found = self.gap(run, key, over)
        if found is not None:
            return found.shown(signed=True)
        count, of = self.diverged(run), len(self.rows(run))
        return f"{count} of {of} diverged" if count else "-"
