"""Question 8 of the study: losses of synchronous schedules and of Async2BW after equal time.

    python tools/study/wallclock.py                     # all settings, 25 s a run, on two idle cores
    python tools/study/wallclock.py --setting pp4-padded pp4-padded-m8 --budget 120 --seeds 0 1 2 3 4

One process per rank trains its stages. First the steps of all schedules are timed alternately; each run then
has as many steps as fit into the budget, with a warm-up and a cosine decay over them. Batches are the same
for all schedules. If stages are padded by sleeping, only the timed steps are: without padding, a run has the
same losses in a third of the time. Each run is written to the results file when it ends, and the same command
resumes from there.
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

# Before torch is imported; the workers inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from _model import MODELS, Decoder
from _pipeline_run import SCHEDULES, PipelineRun, train_rank
from _pool import Pool
from _results import DEFAULT_PATH, Results
from _tables import wallclock_cells
from _training import evaluate, versions
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from titan_async.errors import UserError

__all__ = ["SETTINGS", "Measurement", "Setting", "Timing", "joined_weights", "main", "measure", "timings"]

LAYER_SECONDS = 0.008
"""Padded duration of the forward of a microbatch through one layer: four processes on two cores rarely need
longer."""

PEAK_RATES = {"muon": 1e-2, "adamw": 4e-3}
"""Learning rates by optimizer."""

_CURVE_POINTS = 40
_LEAST_STEPS = 10
_ROUNDS, _WARM_UP_STEPS, _TIMED_STEPS = 5, 3, 20
"""For timing a schedule's steps."""

_PATIENCE = 10.0
"""The timeout of a run as a multiple of its budget: cores may be busy."""


@dataclass(frozen=True)
class Setting:
    """A pipeline on which schedules are compared."""

    stages: int
    """Ranks; some schedules have two stages on each."""
    padded: bool
    """Whether all layers are padded to the same duration by sleeping."""
    microbatches: int = 4

    def forward_s(self, model: str) -> float:
        """Minimum duration of a rank's forward of a microbatch."""
        return LAYER_SECONDS * MODELS[model].layers / self.stages if self.padded else 0.0


SETTINGS = {
    "pp2": Setting(stages=2, padded=False),
    "pp2-padded": Setting(stages=2, padded=True),
    "pp4-padded": Setting(stages=4, padded=True),
    "pp4-padded-m8": Setting(stages=4, padded=True, microbatches=8),
}
_SEQUENCES = 3
"""Sequences per microbatch."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The settings of a line of the results."""

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

    def training(self, steps: int, padded: bool) -> PipelineRun:
        setting = SETTINGS[self.setting]
        return PipelineRun(
            schedule=self.schedule,
            steps=steps,
            seed=self.seed,
            optimizer=self.optimizer,
            lr=self.lr,
            model=self.model,
            sequences=_SEQUENCES * setting.microbatches,
            microbatches=setting.microbatches,
            forward_s=setting.forward_s(self.model) if padded else 0.0,
        )


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Step time and utilization of a schedule in a setting."""

    step_s: float
    utilization: float
    """Fraction of the time spent in forwards and backwards, averaged over ranks."""
    late_share: float
    """Fraction of forwards and backwards that took longer than their padded duration."""


def measurement_of(row: dict[str, Any]) -> Measurement:
    return Measurement(**{field.name: row[field.name] for field in fields(Measurement)})


def measure(pool: Pool, measurement: Measurement, timing: Timing) -> dict[str, Any]:
    """Trains as many steps as fit into the budget.

    Returns:
        The line of the results: the fields of `measurement`; "steps"; "step_s", "seconds" of all steps,
        "utilization" and "late_share" (None without padding), from `timing` if stages are padded, otherwise
        from this run; "curve": pairs of seconds and training loss, means over equal parts of the run;
        "validation_loss" and "test_loss" at its end; "forward_s": padded duration of a rank's forwards, or
        None; "versions"; "started", in UTC. Losses are in nats per byte.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    steps = round(measurement.budget_s / timing.step_s)
    padded = SETTINGS[measurement.setting].padded
    run = measurement.training(steps, padded=False)
    ranks = pool.run(measurement.stages, train_rank, run, timeout=_PATIENCE * (60 + measurement.budget_s))
    shape = MODELS[run.model]
    model = Decoder(shape)
    model.load_state_dict(joined_weights(ranks))
    last = _of_last_stage(ranks)
    times = last["times"]
    if padded:
        times = timing.step_s * np.arange(1, steps + 1)
    else:
        timing = _timing(max(rank["seconds"] for rank in ranks) / steps, [ranks])
    curve = [np.array_split(values, min(_CURVE_POINTS, steps)) for values in (times, last["losses"])]
    return {
        "kind": "wallclock",
        **asdict(measurement),
        "steps": steps,
        "seconds": round(steps * timing.step_s, 3),
        "step_s": round(timing.step_s, 5),
        "curve": [
            [round(float(time.mean()), 3), round(float(loss.mean()), 4)]
            for time, loss in zip(*curve, strict=True)
        ],
        "validation_loss": round(evaluate(model, "validation", shape.length), 5),
        "test_loss": round(evaluate(model, "test", shape.length), 5),
        "utilization": round(timing.utilization, 4),
        "forward_s": SETTINGS[measurement.setting].forward_s(run.model) or None,
        "late_share": round(timing.late_share, 4) if padded else None,
        "versions": versions(),
        "started": started,
    }


def _of_last_stage(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return next(rank for rank in ranks if rank["losses"])


def _timing(step_s: float, rounds: Sequence[Sequence[dict[str, Any]]]) -> Timing:
    """The timing of steps of `step_s` seconds; `rounds` has the results of all ranks, run by run."""
    every = [rank for ranks in rounds for rank in ranks]
    return Timing(
        step_s=step_s,
        utilization=statistics.fmean(sum(rank["computing"].values()) / rank["seconds"] for rank in every),
        late_share=sum(rank["late"] for rank in every) / sum(rank["passes"] for rank in every),
    )


def joined_weights(ranks: Iterable[dict[str, Any]]) -> dict[str, Tensor]:
    """The state dict of the whole decoder, from the results of `train_rank` on all ranks."""
    return {name: value for rank in ranks for name, value in rank["weights"].items()}


def timings(pool: Pool, measurements: Sequence[Measurement]) -> dict[str, Timing]:
    """Times the steps of all schedules alternately.

    Raises:
        UserError: too few steps fit into the budget.
    """
    one_of_each = {measurement.schedule: measurement for measurement in measurements}
    steps = _WARM_UP_STEPS + _TIMED_STEPS
    rounds: dict[str, list[list[dict[str, Any]]]] = defaultdict(list)
    for _ in range(_ROUNDS):
        for schedule, measurement in one_of_each.items():
            run = measurement.training(steps, padded=True)
            rounds[schedule].append(pool.run(measurement.stages, train_rank, run))
    found = {}
    for schedule, each in rounds.items():
        times = [_of_last_stage(ranks)["times"] for ranks in each]
        seconds = [(of_round[-1] - of_round[_WARM_UP_STEPS - 1]) / _TIMED_STEPS for of_round in times]
        found[schedule] = _timing(statistics.median(seconds), each)
    budget = measurements[0].budget_s
    for schedule, timing in found.items():
        if (count := round(budget / timing.step_s)) < _LEAST_STEPS:
            raise UserError(f"In {budget:g} s {schedule} has only {count} steps: give a larger --budget.")
    return found


def run_missing(measurements: Sequence[Measurement], results: Results, console: Console) -> None:
    """Measures everything that the results lack, setting by setting, and adds each when it ends."""
    done = {measurement_of(row) for row in results.wallclock}
    missing: dict[str, list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        if measurement not in done:
            missing[measurement.setting].append(measurement)
    for setting, of_setting in missing.items():
        with Pool([SETTINGS[setting].stages]) as pool:
            console.print(f"{setting}: timing the steps of {len(of_setting)} runs")
            timed = timings(pool, of_setting)
            for measurement in of_setting:
                row = measure(pool, measurement, timed[measurement.schedule])
                results.add_wallclock(row)
                console.print(
                    f"{setting}, {measurement.schedule}, seed {measurement.seed}: {row['steps']} steps in "
                    f"{row['seconds']:.1f} s, validation loss {row['validation_loss']:.4f}"
                )


def table_of(rows: Iterable[dict[str, Any]]) -> Table:
    """Means over the seeds, with 95 % intervals of the losses."""
    table = Table(box=SIMPLE_HEAD, caption="Losses in nats per byte. Late: took longer than its padding.")
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
    console = Console(width=132)
    try:
        if not arguments.results.parent.is_dir():
            raise UserError(
                f"There is no folder {arguments.results.parent}: create it, or give other --results."
            )
        results = Results(arguments.results)
        run_missing(measurements, results, console)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"Interrupted; the same command resumes from {arguments.results}.", file=sys.stderr)
        return 130
    console.print(table_of(row for row in results.wallclock if measurement_of(row) in measurements))
    return 0


if __name__ == "__main__":
    sys.exit(main())
