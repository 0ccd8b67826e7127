"""Question 8 of the study: the same seconds for 1F1B and for Async2BW, and the losses at their end.

    python tools/study/wallclock.py                     # three settings, 13 minutes on two idle cores
    python tools/study/wallclock.py --setting pp2       # one of them

A process trains each stage. The steps of every schedule are timed first; each run then has as many as fit
into the budget, and its learning rate follows these: warm-up, and a cosine that ends with the budget. Batches
are the same for all schedules. Each run is written to the results file when it ends, and the same command
goes on from there.
"""

import argparse
import math
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# In the workers too, which inherit it: one thread each, before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).parents[1] / "bench"))

import numpy as np
from _model import MODELS, Decoder
from _pipeline_run import SCHEDULES, PipelineRun, train_stage
from _pool import Pool
from _results import DEFAULT_PATH, Results
from _tables import wallclock_cells
from _training import evaluate, versions
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from titan_async.errors import UserError

__all__ = ["SETTINGS", "Measurement", "Setting", "joined_weights", "main", "measure", "steps_in_budget"]

LAYER_SECONDS = 0.008
"""The forward of a microbatch through one layer where stages are padded: rarely less than what four processes
need on two cores."""

PEAK_RATES = {"muon": 1e-2, "adamw": 4e-3}
"""Learning rates by optimizer."""

_CURVE_POINTS = 40
_LEAST_STEPS = 10
_ROUNDS, _WARM_UP_STEPS, _TIMED_STEPS = 5, 3, 20
"""Of timing a schedule's steps."""


@dataclass(frozen=True)
class Setting:
    """A pipeline on which schedules are compared."""

    stages: int
    padded: bool
    """Whether every layer lasts the same, by sleeping, or as long as it computes."""

    def forward_s(self, model: str) -> float:
        """The least duration of a stage's forward of a microbatch."""
        return LAYER_SECONDS * MODELS[model].layers / self.stages if self.padded else 0.0


SETTINGS = {
    "pp2": Setting(stages=2, padded=False),
    "pp2-padded": Setting(stages=2, padded=True),
    "pp4-padded": Setting(stages=4, padded=True),
}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a line of the results is about."""

    setting: str
    schedule: str
    seed: int
    optimizer: str
    lr: float
    budget_s: float
    model: str = "dense"

    @property
    def stages(self) -> int:
        return SETTINGS[self.setting].stages

    def training(self, steps: int) -> PipelineRun:
        return PipelineRun(
            schedule=self.schedule,
            steps=steps,
            seed=self.seed,
            optimizer=self.optimizer,
            lr=self.lr,
            model=self.model,
            forward_s=SETTINGS[self.setting].forward_s(self.model),
        )


def measurement_of(row: dict[str, Any]) -> Measurement:
    return Measurement(**{field.name: row[field.name] for field in fields(Measurement)})


def measure(pool: Pool, measurement: Measurement, steps: int) -> dict[str, Any]:
    """Train that many steps.

    Returns:
        The line of the results: the fields of `measurement`; "steps", "seconds", and "step_s" in their mean;
        "curve", pairs of seconds and training loss, means over equal parts of the run; "validation_loss" and
        "test_loss" at its end; "utilization", the share of the time spent in forwards and backwards, in the
        mean over stages; "forward_s" to which a stage's forwards were padded, and "late_share", the share of
        forwards and backwards that took longer than their padding (both None in a setting without);
        "versions"; "started", in UTC. Losses are in nats a byte.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    run = measurement.training(steps)
    stages = pool.run(measurement.stages, train_stage, run, timeout=120 + 4 * measurement.budget_s)
    shape = MODELS[run.model]
    model = Decoder(shape)
    model.load_state_dict(joined_weights(stages))
    seconds = max(stage["seconds"] for stage in stages)
    times, losses = (
        np.array_split(stages[-1][name], min(_CURVE_POINTS, steps)) for name in ("times", "losses")
    )
    computing = statistics.fmean(sum(stage["computing"].values()) for stage in stages)
    late = sum(stage["late"] for stage in stages) / sum(stage["passes"] for stage in stages)
    return {
        "kind": "wallclock",
        **asdict(measurement),
        "steps": steps,
        "seconds": round(seconds, 3),
        "step_s": round(seconds / steps, 5),
        "curve": [
            [round(float(time.mean()), 3), round(float(loss.mean()), 4)]
            for time, loss in zip(times, losses, strict=True)
        ],
        "validation_loss": round(evaluate(model, "validation", shape.length), 5),
        "test_loss": round(evaluate(model, "test", shape.length), 5),
        "utilization": round(computing / seconds, 4),
        "forward_s": run.forward_s or None,
        "late_share": round(late, 4) if run.forward_s else None,
        "versions": versions(),
        "started": started,
    }


def joined_weights(stages: Iterable[dict[str, Any]]) -> dict[str, Tensor]:
    """The state dict of the whole decoder, from what `train_stage` returned on all stages."""
    return {name: value for stage in stages for name, value in stage["weights"].items()}


def steps_in_budget(pool: Pool, measurements: Sequence[Measurement]) -> dict[str, int]:
    """How many steps of each schedule fit; the schedules are timed by turns."""
    one_of_each = {measurement.schedule: measurement for measurement in measurements}
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(_ROUNDS):
        for schedule, measurement in one_of_each.items():
            run = measurement.training(_WARM_UP_STEPS + _TIMED_STEPS)
            times = pool.run(measurement.stages, train_stage, run)[-1]["times"]
            seconds[schedule].append((times[-1] - times[_WARM_UP_STEPS - 1]) / _TIMED_STEPS)
    budget = measurements[0].budget_s
    steps = {schedule: round(budget / statistics.median(each)) for schedule, each in seconds.items()}
    for schedule, count in steps.items():
        if count < _LEAST_STEPS:
            raise UserError(
                f"In {budget:g} s {schedule} makes {count} steps, too few to learn: give a larger --budget."
            )
    return steps


def run_missing(measurements: Sequence[Measurement], results: Results, console: Console) -> None:
    """Measure what the results lack, setting by setting, and add each to them when it ends."""
    there = {measurement_of(row) for row in results.wallclock}
    missing: dict[str, list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        if measurement not in there:
            missing[measurement.setting].append(measurement)
    for setting, of_setting in missing.items():
        with Pool([SETTINGS[setting].stages]) as pool:
            console.print(f"{setting}: timing the steps of {len(of_setting)} runs")
            steps = steps_in_budget(pool, of_setting)
            for measurement in of_setting:
                row = measure(pool, measurement, steps[measurement.schedule])
                results.add_wallclock(row)
                console.print(
                    f"{setting}, {measurement.schedule}, seed {measurement.seed}: {row['steps']} steps in "
                    f"{row['seconds']:.1f} s, validation loss {row['validation_loss']:.4f}"
                )


def table_of(rows: Iterable[dict[str, Any]]) -> Table:
    """Means over the seeds, with 95 % intervals of the losses."""
    table = Table(box=SIMPLE_HEAD, caption="Losses in nats a byte. Late: took longer than its padding.")
    headings, cells = wallclock_cells(rows)
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    for row in cells:
        table.add_row(*row)
    return table


def _positive(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError
    return value


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rates = ", ".join(f"{rate:g} of {name}" for name, rate in PEAK_RATES.items())
    parser.add_argument("--setting", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="default: all")
    parser.add_argument("--budget", type=_positive, default=25.0, help="seconds of a run; default 25")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--optimizer", choices=PEAK_RATES, default="muon", help="default: muon")
    parser.add_argument("--lr", type=_positive, help=f"peak learning rate; default: {rates}")
    dense = [name for name, shape in MODELS.items() if not shape.experts]
    parser.add_argument("--model", choices=dense, default="dense", help="default: dense")
    parser.add_argument(
        "--results", type=Path, default=DEFAULT_PATH, help="default: tools/study/results.jsonl"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = _parse(argv)
    measurements = [
        Measurement(
            setting=setting,
            schedule=schedule,
            seed=seed,
            optimizer=arguments.optimizer,
            lr=arguments.lr or PEAK_RATES[arguments.optimizer],
            budget_s=arguments.budget,
            model=arguments.model,
        )
        for setting in dict.fromkeys(arguments.setting)
        for seed in dict.fromkeys(arguments.seeds)
        for schedule in SCHEDULES
    ]
    console = Console(width=110)
    try:
        if not arguments.results.parent.is_dir():
            raise UserError(
                f"There is no folder {arguments.results.parent}: make it, or give other --results."
            )
        results = Results(arguments.results)
        run_missing(measurements, results, console)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"Interrupted; the same command goes on from {arguments.results}.", file=sys.stderr)
        return 130
    console.print(table_of(row for row in results.wallclock if measurement_of(row) in measurements))
    return 0


if __name__ == "__main__":
    sys.exit(main())
