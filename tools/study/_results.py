"""The results file: one line of JSON per run, appended at the end of the run."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from _runs import Run, rates_of, run_key, synchronous

from titan_async.errors import UserError
from titan_async.file_io import atomic_write

__all__ = ["DEFAULT_PATH", "Results", "own_rate", "own_rate_runs", "resolved", "tuned_rate"]

DEFAULT_PATH = Path(__file__).parent / "results.jsonl"


class Results:
    """The results so far, by `run_key`. An incomplete last line is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_key: dict[str, dict[str, Any]] = {}
        self.wallclock: list[dict[str, Any]] = []
        if not path.exists():
            return
        lines = path.read_text(encoding="utf-8").split("\n")
        if lines[-1]:
            lines.pop()
            with atomic_write(path) as partial:
                partial.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        for number, line in enumerate(filter(None, lines), 1):
            try:
                row = json.loads(line)
                if row["kind"] == "wallclock":
                    self.wallclock.append(row)
                else:
                    self.by_key[run_key(Run(**row["run"]))] = row
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{path}, line {number} is not a result of the study ({error!r}): "
                    f"remove it, or name another file."
                ) from error

    def get(self, run: Run) -> dict[str, Any] | None:
        return self.by_key.get(run_key(run))

    def add(self, run: Run, result: dict[str, Any]) -> None:
        row = {"kind": "run", "run": asdict(run), **result}
        self._append(row)
        self.by_key[run_key(run)] = row

    def add_wallclock(self, row: dict[str, Any]) -> None:
        self._append(row)
        self.wallclock.append(row)

    def _append(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def tuned_rate(run: Run, results: Results) -> float:
    """The rate of the grid with the lowest validation loss of synchronous runs, averaged over seeds.

    Only seeds with results for the whole grid count; rates at which one of them diverged are excluded.

    Raises:
        UserError: no seed has results for the whole grid.
    """
    rates = rates_of(run.model, run.optimizer)
    base = replace(synchronous(run), momentum=None)
    complete = []
    for seed in {row["run"]["seed"] for row in results.by_key.values()}:
        found = {rate: results.get(replace(base, lr=rate, seed=seed)) for rate in rates}
        if all(found.values()):
            complete.append(
                {rate: math.inf if row["diverged"] else row["validation"] for rate, row in found.items()}
            )
    if not complete:
        raise UserError(
            f"The rates of {run.optimizer} on the model {run.model} have not been compared in "
            f"{results.path}: run the question first."
        )
    return min(rates, key=lambda rate: sum(by_rate[rate] for by_rate in complete))


def own_rate(run: Run, results: Results) -> float:
    """The rate with the lowest validation loss of the run itself, delay and feedback included, for seed 0.

    Raises:
        UserError: results are missing.
    """
    rates, losses = _own_losses(run, results)
    if None in losses:
        raise UserError(
            f"The rates of {run.optimizer} with a delay of {run.delay} have not been compared in "
            f"{results.path}: run the question first."
        )
    return rates[losses.index(min(losses))]


def own_rate_runs(runs: Iterable[Run], results: Results) -> list[Run]:
    """Runs whose results `own_rate` still lacks, for the runs whose `lr` is "own"."""
    wanted: dict[Run, None] = {}
    for run in runs:
        if run.lr == "own":
            rates, losses = _own_losses(run, results)
            wanted |= {
                replace(run, lr=rate, seed=0): None
                for rate, loss in zip(rates, losses, strict=True)
                if loss is None
            }
    return list(wanted)


def _own_losses(run: Run, results: Results) -> tuple[list[float], list[float | None]]:
    """Ascending rates and their losses, None for missing results.

    Starts with three rates in the middle of the grid, and adds others while the best one is at an end.
    """

    def loss(rate: float) -> float | None:
        row = results.get(replace(run, lr=rate, seed=0))
        return None if row is None else math.inf if row["diverged"] else row["validation"]

    grid = rates_of(run.model, run.optimizer)
    middle = max(0, len(grid) // 2 - 1)
    rates = grid[middle : middle + 3]
    losses = [loss(rate) for rate in rates]
    while None not in losses:
        best = losses.index(min(losses))
        if best == 0:
            rates.insert(0, max((rate for rate in grid if rate < rates[0]), default=rates[0] / 2))
            losses.insert(0, loss(rates[0]))
        elif best == len(rates) - 1:
            rates.append(min((rate for rate in grid if rate > rates[-1]), default=rates[-1] * 2))
            losses.append(loss(rates[-1]))
        else:
            break
    return rates, losses


def resolved(runs: Iterable[Run], results: Results) -> list[Run]:
    """The runs with "tuned" and "own" replaced by rates."""
    choices = {"tuned": tuned_rate, "own": own_rate}
    return [replace(run, lr=choices[run.lr](run, results)) if run.lr in choices else run for run in runs]
