"""The journal of a run: one line of JSON for everything that happens once in a while, written by rank 0.

Every line is an object with `time` (seconds since the epoch) and `kind`, which determines the other fields:

    step        step, loss, grad_norm (null before the first update), tokens_per_second (of the whole run,
                since the last such line), learning_rate, skipped (updates so far), mfu (a share; null where
                the peak is not known), utilization (a share for each stage, null where unknown)
    validation  step, loss
    checkpoint  step, seconds
    log         text: a line of the run's output
    warning     text: what deserves attention
    end         reason: "finished", "stopped" (by a signal, all saved) or "failed"
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

_MOST_LINES = 500
_PACE_ENTRIES = 20


def journal_path(folder: Path) -> Path:
    """The journal in a run's folder of events."""
    return folder / "journal.jsonl"


class Journal:
    """Appends to a journal.

    Args:
        folder: the run's folder of events.

    Raises:
        OSError: if the file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._file = open(journal_path(folder), "a", encoding="utf-8")  # noqa: SIM115

    def write(self, kind: str, **fields: Any) -> None:
        """Add an entry. A disk that is full costs entries, and not the training.

        Numbers that JSON lacks, infinities and NaN, become null.
        """
        entry = {"time": time.time(), "kind": kind} | {k: _finite(v) for k, v in fields.items()}
        try:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
        except OSError:
            pass

    def close(self) -> None:
        """Close the file. Harmless to call again."""
        with contextlib.suppress(OSError):  # of entries for which there was no room, either
            self._file.close()


class JournalReader:
    """Reads a journal while it may be written.

    Args:
        folder: the run's folder of events.
    """

    def __init__(self, folder: Path) -> None:
        self._path = journal_path(folder)
        self._position = 0

    def new_entries(self) -> list[dict[str, Any]]:
        """The entries since the last call, in order; lines that are no entries are passed over."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._position)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be half-written
        self._position += len(whole)
        return [entry for line in whole.splitlines() if (entry := _entry(line)) is not None]


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and "kind" in entry and "time" in entry else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Series:
    """Numbers by step, thinned out evenly as they become many.

    Args:
        most: how many points are kept at most; an even number.
    """

    def __init__(self, most: int = 1024) -> None:
        self._most, self._every = most, 1
        self._points: list[tuple[int, float]] = []
        self._open: list[tuple[int, float]] = []  # not yet as many as make a point

    def add(self, step: int, value: float) -> None:
        """Add a number; the last of several points that become one gives its step, their mean its value."""
        self._open.append((step, value))
        if len(self._open) < self._every:
            return
        self._points.append(_merged(self._open))
        self._open = []
        if len(self._points) == self._most:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_merged(pair) for pair in pairs]
            self._every *= 2

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """Steps and values in order, up to the last that was added."""
        return (*self._points, *([_merged(self._open)] if self._open else []))


def _merged(points: Sequence[tuple[int, float]]) -> tuple[int, float]:
    return points[-1][0], sum(value for _, value in points) / len(points)


@dataclass(frozen=True)
class LogLine:
    """A line of the run's output, or a warning."""

    text: str
    warns: bool = False


class History:
    """A summary of the entries so far, in bounded memory however long the run."""

    def __init__(self) -> None:
        self.loss, self.learning_rate = Series(), Series()
        self.lines: deque[LogLine] = deque(maxlen=_MOST_LINES)
        self.counts: Counter[str] = Counter()
        """Entries of each kind."""
        self.last_time = 0.0
        """Of the last entry, by the clock of rank 0."""
        self._last: dict[str, dict[str, Any]] = {}  # of each kind
        self._paced: deque[tuple[int, float]] = deque(maxlen=_PACE_ENTRIES)

    def last(self, kind: str, field: str) -> Any:
        """A field of the last entry of a kind; None if there is none, or it is null."""
        return self._last.get(kind, {}).get(field)

    @property
    def step(self) -> int:
        """The last in the journal; 0 before the first."""
        return self.last("step", "step") or 0

    @property
    def end(self) -> str | None:
        """Why the run is over; None if it goes on."""
        return self.last("end", "reason")

    @property
    def step_seconds(self) -> float | None:
        """Seconds a step lately, saving and validating included; None if not known."""
        if len(self._paced) < 2:
            return None
        (first, began), (last, ended) = self._paced[0], self._paced[-1]
        return (ended - began) / (last - first) if last > first and ended > began else None

    def add(self, entry: dict[str, Any]) -> None:
        """Take note of an entry. Those of kinds that are not known, or are not whole, count for nothing."""
        kind = entry["kind"]
        try:
            known = {field: _TYPES[field](entry[field]) for field in ("time", *_NEEDED[kind])}
            known |= {field: None if entry.get(field) is None else float(entry[field]) for field in _NUMBERS}
        except (KeyError, TypeError, ValueError):
            return
        self.last_time = known["time"]
        self.counts[kind] += 1
        self._last[kind] = known
        if kind == "step":
            self._paced.append((known["step"], known["time"]))
            for series, value in ((self.loss, known["loss"]), (self.learning_rate, known["learning_rate"])):
                if value is not None:
                    series.add(known["step"], value)
        elif "text" in known:
            self.lines.append(LogLine(known["text"], warns=kind == "warning"))


_NEEDED: dict[str, tuple[str, ...]] = {
    "step": ("step",),
    "validation": ("step",),
    "checkpoint": ("step",),
    "log": ("text",),
    "warning": ("text",),
    "end": ("reason",),
}
_TYPES: dict[str, Callable[[Any], Any]] = {"time": float, "step": int, "text": str, "reason": str}
_NUMBERS = ("loss", "learning_rate", "tokens_per_second", "mfu", "skipped")
"""Those that may be null, or missing."""
