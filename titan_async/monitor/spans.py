"""The spans of all ranks of a run, read from its ring files and limited to common steps."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from titan_async.errors import UserError
from titan_async.monitor.events import BURST, CAPACITY, RankReader
from titan_async.monitor.run_folder import EVENTS_FOLDER, RunInfo, RunShape, read_info, runs_in
from titan_async.pipelining.actions import in_flight
from titan_async.pipelining.recording import Kind

__all__ = ["RankSpans", "RunSpans", "find_run", "load_spans", "select_steps", "split_pairs"]

_BETWEEN_STEPS = (Kind.SAVE, Kind.VALIDATE)


@dataclass(frozen=True)
class RankSpans:
    """The spans of one rank."""

    rank: int
    stages: tuple[int, ...]
    replica: int
    """Index of the data-parallel replica of the pipeline."""
    records: npt.NDArray[np.void]
    """`RECORD`s in the order in which the spans ended."""

    def of_kind(self, *kinds: Kind) -> npt.NDArray[np.void]:
        """The records of these kinds."""
        return self.records[np.isin(self.records["kind"], kinds)]


@dataclass(frozen=True)
class RunSpans:
    """The spans of a run's ranks."""

    info: RunInfo
    ranks: list[RankSpans]
    """Ranks that have records."""
    steps: range
    """Training steps that are complete on all of them; may be empty."""

    @property
    def missing(self) -> list[int]:
        """Ranks without records."""
        found = {spans.rank for spans in self.ranks}
        return [rank for rank in range(len(self.info.ranks)) if rank not in found]


def find_run(run_dir: str | Path, run_id: str | None = None) -> Path:
    """The folder of events of a run in a `dump_folder`: the latest, or the one named `run_id`.

    Raises:
        UserError: if there is no such run.
    """
    folders = runs_in(run_dir)
    if not Path(run_dir).is_dir():
        raise UserError(f"{run_dir} is not a folder: give the dump_folder of a run")
    if not folders:
        raise UserError(
            f"{run_dir} has no {EVENTS_FOLDER} of a run: give the dump_folder of a run that recorded them"
        )
    if run_id is None:
        return folders[-1]
    for folder in folders:
        if folder.name == run_id:
            return folder
    names = ", ".join(folder.name for folder in folders)
    raise UserError(f"{run_dir} has no run {run_id}: there are {names}")


def load_spans(folder: Path) -> RunSpans:
    """Loads all spans in a run's files.

    Raises:
        UserError: if `run.json` cannot be read.
    """
    info = read_info(folder)
    replicas: Counter[tuple[int, ...]] = Counter()
    ranks, steps = [], []
    for rank, stages in enumerate(info.ranks):
        reader = RankReader(folder, rank)
        records = reader.new_records()
        if len(records):
            state = reader.state()
            overwritten = state is None or state.count > CAPACITY - BURST
            ranks.append(RankSpans(rank, stages, replicas[stages], records))
            steps.append(_complete_steps(records, overwritten))
        replicas[stages] += 1
    first = max((each.start for each in steps), default=0)
    stop = min((each.stop for each in steps), default=0)
    return RunSpans(info, ranks, range(first, max(first, stop)))


def _complete_steps(records: npt.NDArray[np.void], overwritten: bool) -> range:
    batches = records["batch"][records["kind"] == Kind.STEP]
    # Spans of a step precede it, so that the first step after overwritten records is incomplete.
    batches = batches[overwritten:]
    gaps = np.flatnonzero(np.diff(batches) != 1)
    if len(gaps):
        batches = batches[gaps[-1] + 2 :]
    return range(int(batches[0]), int(batches[-1]) + 1) if len(batches) else range(0)


def select_steps(run: RunSpans, steps: range, *, include_following: bool = False) -> RunSpans:
    """Selects the spans of each rank from the start of the first step to the end of the last one.

    Args:
        run: a run with these steps.
        steps: at least one.
        include_following: include a save and a validation between the last step and the next one.

    Raises:
        UserError: if the files lack one of the steps.
    """
    if not run.steps:
        raise UserError(
            f"run {run.info.run_id} has no step that all its ranks have finished: "
            "wait for its first steps, or give another run with --run"
        )
    if steps.start < run.steps.start or steps.stop > run.steps.stop:
        raise UserError(
            f"--steps is {_format_steps(steps)}, but the files of run {run.info.run_id} have "
            f"{_format_steps(run.steps)}: choose among these"
        )
    ranks = []
    for spans in run.ranks:
        of_steps = np.flatnonzero(spans.records["kind"] == Kind.STEP)
        first, last = (
            of_steps[spans.records["batch"][of_steps] == step][0] for step in (steps[0], steps[-1])
        )
        stop = last + 1
        while (
            include_following and stop < len(spans.records) and spans.records["kind"][stop] in _BETWEEN_STEPS
        ):
            stop += 1
        ended = spans.records[:stop]
        ranks.append(replace(spans, records=ended[ended["start"] >= spans.records["start"][first]]))
    return RunSpans(run.info, ranks, steps)


def split_pairs(
    records: npt.NDArray[np.void], shape: RunShape
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
    """Replaces each overlapped pair by a FORWARD and a BACKWARD with the same times.

    Args:
        records: `RECORD`s of one rank in order.
        shape: of its run.

    Returns:
        The records, and for each of them 1 for the forward of a pair, 2 for the backward, 0 otherwise. The
        version of the backward is that of its batch's forwards, or -1 without these.
    """
    pairs = records["kind"] == Kind.OVERLAP
    split, halves = np.repeat(records, 1 + pairs), np.repeat(pairs.astype(np.int64), 1 + pairs)
    if not pairs.any():
        return split, halves
    split["kind"][halves == 1] = Kind.FORWARD
    halves[np.cumsum(1 + pairs)[pairs] - 1] = 2
    forwards, backwards = split[(split["kind"] == Kind.FORWARD) & (halves < 2)], split[halves == 2]
    held = np.array([in_flight(stage, shape.stages, shape.lookahead, True) for stage in range(shape.stages)])
    number = backwards["batch"].astype(np.int64) * shape.microbatches + backwards["microbatch"]
    batch, microbatch = np.divmod(number - held[backwards["stage"]], shape.microbatches)
    version_of = dict(zip(forwards["batch"].tolist(), forwards["version"].tolist(), strict=True))
    backwards["kind"], backwards["batch"], backwards["microbatch"] = Kind.BACKWARD, batch, microbatch
    backwards["version"] = [version_of.get(each, -1) for each in batch.tolist()]
    split[halves == 2] = backwards
    return split, halves


def _format_steps(steps: range) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]}-{steps[-1]}"
