"""Which runs a folder holds, and what each of them is."""

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
"""In the `dump_folder` of a run."""

_INFO = "run.json"
_FORMATS = (1, 2, 3)
"""Of the files of events, oldest first; the last is written. Format 2 added garbage collection, format 3
overlapped pairs."""


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """What a run sets out to do."""

    model: str
    """Name and flavor."""
    first_step: int
    """Steps that were done before: 0, or that of the checkpoint from which the run goes on."""
    steps: int
    """The step that it is to reach."""
    log_every: int
    """Steps from one entry of the journal to the next."""
    schedule: str
    microbatches: int
    """In a batch, of each pipeline."""
    lookahead: int
    overlap: bool
    """Whether forwards and backwards are computed in overlapped pairs."""
    stages: int
    tokens_per_step: int
    synchronous_steps: int = 0
    """Those at the start of training whose updates are not delayed, under Async2BW."""


@dataclass(frozen=True, kw_only=True)
class RunInfo(RunShape):
    """What a run is, from its start to its end. In `run.json`, with `"format": 3`."""

    run_id: str
    started: float
    """Seconds since the epoch."""
    host: str
    pid: int
    """Of rank 0, on `host`."""
    ranks: tuple[tuple[int, ...], ...]
    """The indices of the stages on each rank; ranks of one pipeline and of its data-parallel copies."""
    device: str
    """What the ranks compute on: "cpu", or the name of the accelerator."""
    versions: dict[str, str]
    """Of torch and others."""


def events_folder(run_dir: str | Path, run_id: str) -> Path:
    """Where a run leaves its events."""
    return Path(run_dir) / EVENTS_FOLDER / run_id


def write_info(folder: Path, info: RunInfo) -> None:
    """Write `run.json`, whole or not at all. Each node of a run may do it, to a disk that they share."""
    write_json(folder / _INFO, {"format": _FORMATS[-1]} | asdict(info), shared=True)


def read_info(folder: Path) -> RunInfo:
    """Read `run.json`.

    Raises:
        UserError: if it is missing, or of another version of this project.
    """
    path = folder / _INFO
    try:
        # Formats 1 and 2 lack the first; runs without a synchronous start may lack the other.
        record: Any = {"overlap": False, "synchronous_steps": 0} | read_json(path)
        if record["format"] not in _FORMATS:
            known = f"{_FORMATS[0]} to {_FORMATS[-1]}"
            raise ValueError(f"its format is {record['format']}, and this version reads {known}")
        values = {field.name: _of_type(record[field.name], field.type) for field in fields(RunInfo)}
        values["ranks"] = tuple(tuple(map(int, stages)) for stages in values["ranks"])
    except FileNotFoundError:
        raise UserError(f"{folder} holds no {_INFO}: give the folder of a run that has begun") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}): use the version that wrote it") from None
    return RunInfo(**values)


def read_format(folder: Path) -> int:
    """The format of a run's files; the one that is written now where `run.json` names no other."""
    try:
        found = read_json(folder / _INFO)["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return _FORMATS[-1]
    return found if found in _FORMATS else _FORMATS[-1]


def _of_type(value: Any, wanted: Any) -> Any:
    types = {str: str, int: int, float: int | float, bool: bool}
    if not isinstance(value, types.get(wanted, object)):
        raise ValueError(f"{value!r} is not of the type {wanted.__name__}")
    return value


def runs_in(run_dir: str | Path) -> list[Path]:
    """The folders of events of the runs that a `dump_folder` has seen, oldest first; none without events."""
    return sorted(path.parent for path in Path(run_dir).glob(f"{EVENTS_FOLDER}/*/{_INFO}"))
