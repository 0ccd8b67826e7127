"""The journal of a run: one line of JSON for everything that happens once in a while, written by rank 0.

Every line is an object with `time` (seconds since the epoch) and `kind`, which says what else it has:

    step        step, loss, grad_norm (null before the first update), tokens_per_second (of the whole run,
                since the last such line), learning_rate, skipped (updates so far), mfu (a share; null where
                the peak is not known), utilization (a share for each stage, null where unknown)
    validation  step, loss
    checkpoint  step, seconds
    log         text: what the run says on the terminal
    warning     text: what deserves attention
    end         reason: "finished", "stopped" (by a signal, all saved) or "failed"
"""

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["History", "Journal", "JournalReader", "LogLine", "Series", "journal_path"]

_MOST_LINES = 500
_PACE_ENTRIES = 20  # over which the pace is taken


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
    def points(self) -> list[tuple[int, float]]:
        """Steps and values in order, up to the last that was added."""
        return self._points + ([_merged(self._open)] if self._open else [])


def _merged(points: Sequence[tuple[int, float]]) -> tuple[int, float]:
    return points[-1][0], sum(value for _, value in points) / len(points)


@dataclass(frozen=True)
class LogLine:
    """Something that the run said."""

    text: str
    warns: bool = False


@dataclass
class History:
    """The journal's entries in short: see `titan_async.monitor.journal` for what they are."""

    loss: Series = field(default_factory=Series)
    learning_rate: Series = field(default_factory=Series)
    lines: deque[LogLine] = field(default_factory=lambda: deque(maxlen=_MOST_LINES))
    step: int = 0
    """The last in the journal."""
    last_loss: float | None = None
    last_learning_rate: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    skipped: int = 0
    validation: tuple[int, float] | None = None
    """Step and loss of the last."""
    checkpoint: int | None = None
    """The step of the last."""
    checkpoints: int = 0
    warnings: int = 0
    end: str | None = None
    """Why the run is over."""
    last_time: float = 0.0
    """Of the last entry, by the clock of rank 0."""
    _paced: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_PACE_ENTRIES))

    @property
    def step_seconds(self) -> float | None:
        """Seconds a step lately, saving and validating included; None if not known."""
        if len(self._paced) < 2:
            return None
        (first, began), (last, ended) = self._paced[0], self._paced[-1]
        return (ended - began) / (last - first) if last > first and ended > began else None

    def add(self, entry: dict[str, Any]) -> None:
        """Take note of an entry. Those of kinds that are not known, or are not whole, count for nothing."""
        try:
            self._add(entry["kind"], entry)
            self.last_time = float(entry["time"])
        except (KeyError, TypeError, ValueError):
            pass

    def _add(self, kind: str, entry: dict[str, Any]) -> None:
        if kind == "step":
            self._add_step(entry)
        elif kind == "validation":
            self.validation = int(entry["step"]), _number(entry["loss"], float("nan"))
        elif kind == "checkpoint":
            self.checkpoint, self.checkpoints = int(entry["step"]), self.checkpoints + 1
        elif kind in ("log", "warning"):
            self.lines.append(LogLine(str(entry["text"]), warns=kind == "warning"))
            self.warnings += kind == "warning"
        elif kind == "end":
            self.end = str(entry["reason"])

    def _add_step(self, entry: dict[str, Any]) -> None:
        step = int(entry["step"])
        self._paced.append((step, float(entry["time"])))
        self.step = step
        self.tokens_per_second = _number(entry.get("tokens_per_second"))
        self.mfu = _number(entry.get("mfu"))
        self.skipped = int(entry.get("skipped") or 0)
        self.last_loss = _number(entry.get("loss"))
        self.last_learning_rate = _number(entry.get("learning_rate"))
        if self.last_loss is not None:
            self.loss.add(step, self.last_loss)
        if self.last_learning_rate is not None:
            self.learning_rate.add(step, self.last_learning_rate)


def _number(value: Any, missing: float | None = None) -> Any:
    return missing if value is None else float(value)
