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
from pathlib import Path
from typing import Any

__all__ = ["Journal", "JournalReader", "journal_path"]


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
