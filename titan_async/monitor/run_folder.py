"""The runs in a `dump_folder`, and their descriptions in `run.json`."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from titan_async.errors import UserError
from titan_async.file_io import read_json, write_json

__all__ = [
    "EVENTS_FOLDER",
    "RunInfo",
    "RunShape",
    "events_folder",
    "read_format",
    "read_info",
    "runs_in",
    "write_info",
]

EVENTS_FOLDER = "events"
"""The folder of events in the `dump_folder` of a run."""

_INFO = "run.json"
_FORMATS = (1, 2, 3)
"""Formats of event files, oldest first; the last one is written. Format 2 added garbage collection, format 3
added overlapped pairs."""


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """The configuration of a run, as far as views need it."""

    model: str
    """Name and flavor."""
    first_step: int
    """Steps done before: 0, or the step of the checkpoint from which the run resumes."""
    steps: int
    """The last step of training."""
    log_every: int
    """Steps between two entries of the journal."""
    schedule: str
    microbatches: int
    """Per batch of each pipeline."""
    lookahead: int
    overlap: bool
    """Whether forwards and backwards are computed in overlapped pairs."""
    stages: int
    tokens_per_step: int
    synchronous_steps: int = 0
    """Steps at the start of training without delay, under Async2BW."""


@dataclass(frozen=True, kw_only=True)
class RunInfo(RunShape):
    """The description of a run in `run.json`, with `"format": 3`."""

    run_id: str
    started: float
    """Seconds since the epoch."""
    host: str
    pid: int
    """The process of rank 0, on `host`."""
    ranks: tuple[tuple[int, ...], ...]
    """Indices of the stages of each rank, of all data-parallel replicas of the pipeline."""
    device: str
    """"cpu", or the name of the accelerator."""
    versions: dict[str, str]
    """Versions of torch and other packages."""


def events_folder(run_dir: str | Path, run_id: str) -> Path:
    """The folder in which a run writes its events."""
    return Path(run_dir) / EVENTS_FOLDER / run_id


def write_info(folder: Path, info: RunInfo) -> None:
    """Writes `run.json` atomically. Several nodes may do so on a shared file system."""
    write_json(folder / _INFO, {"format": _FORMATS[-1]} | asdict(info), shared=True)


def read_info(folder: Path) -> RunInfo:
    """Read `run.json`.

    Raises:
        UserError: if it is missing, or of an unknown format.
    """
    path = folder / _INFO
    try:
        # Formats 1 and 2 lack `overlap`; older runs without a synchronous start lack the other.
        record: Any = {"overlap": False, "synchronous_steps": 0} | read_json(path)
        if record["format"] not in _FORMATS:
            known = f"{_FORMATS[0]} to {_FORMATS[-1]}"
            raise ValueError(f"its format is {record['format']}, but this version reads {known}")
        values = {field.name: _of_type(record[field.name], field.type) for field in fields(RunInfo)}
        values["ranks"] = tuple(tuple(map(int, stages)) for stages in values["ranks"])
    except FileNotFoundError:
        raise UserError(f"{folder} has no {_INFO}: give the folder of a run that has started") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}): use the version that wrote it") from None
    return RunInfo(**values)


def read_format(folder: Path) -> int:
    """The format of a run's files; the current one if `run.json` names none."""
    try:
        found = read_json(folder / _INFO)["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return _FORMATS[-1]
    return found if found in _FORMATS else _FORMATS[-1]


def _of_type(value: Any, wanted: Any) -> Any:
    types = {str: str, int: int, float: int | float, bool: bool}
    if not isinstance(value, types.get(wanted, object)):
        raise ValueError(f"{value!r} is not of type {wanted.__name__}")
    return value


def runs_in(run_dir: str | Path) -> list[Path]:
    """The folders of events of all runs in a `dump_folder`, oldest first."""
    return sorted(path.parent for path in Path(run_dir).glob(f"{EVENTS_FOLDER}/*/{_INFO}"))
