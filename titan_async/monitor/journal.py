"""The journal of a run: rare events as one JSON object per line, written by rank 0.

Each object has `time` (seconds since the epoch) and `kind`, which determines the other fields:

    step        step, loss, grad_norm (null before the first update), tokens_per_second (of the whole run,
                since the last such line), learning_rate, skipped (updates so far), mfu (from 0 to 1; null if
                the peak is unknown), utilization (from 0 to 1 for each stage, null if unknown)
    validation  step, loss
    checkpoint  step, seconds
    log         text: a line of the run's output
    warning     text
    end         reason: "finished", "stopped" (by a signal, after saving) or "failed"
"""

import contextlib
import json
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["History", "Journal", "JournalReader", "LogLine", "Series", "journal_path"]

_MAX_LINES = 500
_TIMED_ENTRIES = 20


def journal_path(folder: Path) -> Path:
    """The journal in a run's folder of events."""
    return folder / "journal.jsonl"


class Journal:
    """Appends to a journal.

    Args:
        folder: the run's folder of events.

    Raises:
        OSError: if the file cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        self._file = open(journal_path(folder), "a", encoding="utf-8")  # noqa: SIM115

    def write(self, kind: str, **fields: Any) -> None:
        """Appends an entry. Errors of writing, such as a full disk, are ignored, and training continues.

        Infinities and NaN become null, since JSON does not have them.
        """
        entry = {"time": time.time(), "kind": kind} | {k: _finite(v) for k, v in fields.items()}
        try:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
        except OSError:
            pass

    def close(self) -> None:
        """Closes the file. Further calls have no effect."""
        with contextlib.suppress(OSError):  # of buffered entries on a full disk
            self._file.close()


class JournalReader:
    """Reads a journal while rank 0 may be writing it.

    Args:
        folder: the run's folder of events.
    """

    def __init__(self, folder: Path) -> None:
        self._path = journal_path(folder)
        self._position = 0

    def new_entries(self) -> list[dict[str, Any]]:
        """The entries since the last call, in order; invalid lines are skipped."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._position)
                data = file.read()
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]  # the last line may be incomplete
        self._position += len(complete)
        return [entry for line in complete.splitlines() if (entry := _entry(line)) is not None]


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and "kind" in entry and "time" in entry else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Series:
    """Values by step in bounded memory: neighbouring points are averaged as the series grows.

    Args:
        max_points: maximum number of points; even.
    """

    def __init__(self, max_points: int = 1024) -> None:
        self._max_points, self._per_point = max_points, 1
        self._points: list[tuple[int, float]] = []
        self._open: list[tuple[int, float]] = []  # values of the next point

    def add(self, step: int, value: float) -> None:
        """Adds a value. An averaged point has the mean of its values and the last of their steps."""
        self._open.append((step, value))
        if len(self._open) < self._per_point:
            return
        self._points.append(_averaged(self._open))
        self._open = []
        if len(self._points) == self._max_points:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_averaged(pair) for pair in pairs]
            self._per_point *= 2

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """Steps and values in order, including the last one added."""
        return (*self._points, *([_averaged(self._open)] if self._open else []))


def _averaged(points: Sequence[tuple[int, float]]) -> tuple[int, float]:
    return points[-1][0], sum(value for _, value in points) / len(points)


@dataclass(frozen=True)
class LogLine:
    """A line of the run's output, or a warning."""

    text: str
    is_warning: bool = False


class History:
    """A summary of the entries so far, in bounded memory."""

    def __init__(self) -> None:
        self.loss, self.learning_rate = Series(), Series()
        self.lines: deque[LogLine] = deque(maxlen=_MAX_LINES)
        self.counts: Counter[str] = Counter()
        """Number of entries by kind."""
        self.last_time = 0.0
        """The time of the last entry, by the clock of rank 0."""
        self._last: dict[str, dict[str, Any]] = {}  # by kind
        self._step_times: deque[tuple[int, float]] = deque(maxlen=_TIMED_ENTRIES)

    def last(self, kind: str, field: str) -> Any:
        """A field of the last entry of a kind; None if missing or null."""
        return self._last.get(kind, {}).get(field)

    @property
    def step(self) -> int:
        """The last step in the journal; 0 before the first."""
        return self.last("step", "step") or 0

    @property
    def end(self) -> str | None:
        """The reason for which the run has ended; None if it has not."""
        return self.last("end", "reason")

    @property
    def step_seconds(self) -> float | None:
        """Recent seconds per step, with saves and validations; None if unknown."""
        if len(self._step_times) < 2:
            return None
        (first, began), (last, ended) = self._step_times[0], self._step_times[-1]
        return (ended - began) / (last - first) if last > first and ended > began else None

    def add(self, entry: dict[str, Any]) -> None:
        """Adds an entry. Entries of unknown kinds, or with missing fields, are ignored."""
        kind = entry["kind"]
        try:
            known = {field: _TYPES[field](entry[field]) for field in ("time", *_REQUIRED[kind])}
            known |= {field: None if entry.get(field) is None else float(entry[field]) for field in _NUMBERS}
        except (KeyError, TypeError, ValueError):
            return
        self.last_time = known["time"]
        self.counts[kind] += 1
        self._last[kind] = known
        if kind == "step":
            self._step_times.append((known["step"], known["time"]))
            for series, value in ((self.loss, known["loss"]), (self.learning_rate, known["learning_rate"])):
                if value is not None:
                    series.add(known["step"], value)
        elif "text" in known:
            self.lines.append(LogLine(known["text"], is_warning=kind == "warning"))


_REQUIRED: dict[str, tuple[str, ...]] = {
    "step": ("step",),
    "validation": ("step",),
    "checkpoint": ("step",),
    "log": ("text",),
    "warning": ("text",),
    "end": ("reason",),
}
_TYPES: dict[str, Callable[[Any], Any]] = {"time": float, "step": int, "text": str, "reason": str}
_NUMBERS = ("loss", "learning_rate", "tokens_per_second", "mfu", "skipped")
"""Fields that may be null or missing."""
