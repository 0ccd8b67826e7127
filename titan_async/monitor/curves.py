"""Losses from journals and utilization from summaries, by step.

A run that resumes from a checkpoint replaces later steps of earlier runs, so that the runs of a folder form
one curve: that of the current weights.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from titan_async.monitor.events import RankReader, utilization_of
from titan_async.monitor.journal import JournalReader
from titan_async.monitor.run_folder import RunInfo, read_info, runs_in

__all__ = ["Curve", "Utilization", "gap", "read_losses", "read_utilization", "smoothed"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Values at ascending steps."""

    steps: npt.NDArray[np.int64]
    values: Floats
    """NaN where a value was not finite."""

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class Utilization:
    """Utilization of a pipeline's ranks in intervals of steps, the mean over data-parallel replicas."""

    stages: list[tuple[int, ...]]
    """Stages of each rank of the pipeline."""
    first_steps: npt.NDArray[np.int64]
    """The first step of each interval; `last_steps` has the last one."""
    last_steps: npt.NDArray[np.int64]
    busy: Floats
    """[ranks of the pipeline, intervals]: fraction of the steps' time, from 0 to 1."""

    @property
    def mean(self) -> float:
        """The mean over ranks and steps."""
        weights = self.last_steps - self.first_steps + 1
        return float(np.average(self.busy.mean(axis=0), weights=weights))


def read_losses(run_dir: str | Path) -> tuple[Curve, Curve]:
    """Training and validation losses, in nats per token, of all runs in a `dump_folder`.

    Raises:
        UserError: if a run's `run.json` cannot be read.
    """
    found: dict[str, dict[int, float]] = {"step": {}, "validation": {}}
    for folder in runs_in(run_dir):
        first = read_info(folder).first_step
        entries = [entry for entry in JournalReader(folder).new_entries() if entry["kind"] in found]
        if not entries:
            continue
        for kind, losses in found.items():
            found[kind] = {step: loss for step, loss in losses.items() if step <= first}
        for entry in entries:
            loss = entry["loss"]
            found[entry["kind"]][int(entry["step"])] = float("nan") if loss is None else float(loss)
    training, validation = (_curve(losses) for losses in found.values())
    return training, validation


def _curve(values: dict[int, float]) -> Curve:
    steps = sorted(values)
    return Curve(np.array(steps, np.int64), np.array([values[step] for step in steps], np.float64))


def gap(curve: Curve, base: Curve) -> Curve:
    """The difference of a curve to `base`, at those of its steps that `base` covers.

    `base` is interpolated linearly between its steps.

    Examples:
        >>> base = Curve(np.array([0, 10]), np.array([5.0, 4.0]))
        >>> above = gap(Curve(np.array([0, 5, 10, 15]), np.array([5.5, 4.75, 4.0, 3.0])), base)
        >>> above.steps.tolist(), above.values.tolist()
        ([0, 5, 10], [0.5, 0.25, 0.0])
    """
    if not len(base):
        return Curve(base.steps, base.values)
    common = (curve.steps >= base.steps[0]) & (curve.steps <= base.steps[-1])
    steps = curve.steps[common]
    return Curve(steps, curve.values[common] - np.interp(steps, base.steps, base.values))


def smoothed(curve: Curve, points: int) -> Curve:
    """The running mean over an odd number of points; NaNs are ignored."""
    known = ~np.isnan(curve.values)
    sums = np.convolve(np.where(known, curve.values, 0.0), np.ones(points), "valid")
    counts = np.convolve(known, np.ones(points), "valid")
    half = points // 2
    with np.errstate(invalid="ignore"):
        return Curve(curve.steps[half : len(curve) - half], sums / counts)


def read_utilization(run_dir: str | Path) -> Utilization | None:
    """Utilization of the pipeline in all runs of a `dump_folder`; None if there are no summaries.

    Runs whose number of stages differs from the latest run's are left out.

    Raises:
        UserError: if a run's `run.json` cannot be read.
    """
    of_interval: dict[tuple[int, int], Floats] = {}
    stages: list[tuple[int, ...]] = []
    for folder in runs_in(run_dir):
        info = read_info(folder)
        found = _of_run(info, folder)
        if not found:
            continue
        known = of_interval if sorted(set(info.ranks)) == stages else {}
        stages = sorted(set(info.ranks))
        of_interval = {(a, b): busy for (a, b), busy in known.items() if b <= info.first_step} | found
    if not of_interval:
        return None
    intervals = sorted(of_interval)
    return Utilization(
        stages,
        np.array([first for first, _ in intervals], np.int64),
        np.array([last for _, last in intervals], np.int64),
        np.stack([of_interval[interval] for interval in intervals], axis=1),
    )


def _of_run(info: RunInfo, folder: Path) -> dict[tuple[int, int], Floats]:
    """For each interval that all ranks have recorded, the utilization of each rank of the pipeline."""
    pipeline = sorted(set(info.ranks))
    fractions: dict[tuple[int, int], list[list[float]]] = {}
    for rank, stages in enumerate(info.ranks):
        rows = RankReader(folder, rank).summaries()
        borders = np.flatnonzero(np.diff(rows["first_step"])) + 1
        for same in np.split(rows, borders) if len(rows) else []:
            interval = int(same["first_step"][0]), int(same["last_step"][0])
            known = fractions.setdefault(interval, [[] for _ in pipeline])
            known[pipeline.index(stages)].append(sum(utilization_of(same).values()))
    return {
        interval: np.array([np.mean(replicas) for replicas in known])
        for interval, known in fractions.items()
        if all(known)
    }
