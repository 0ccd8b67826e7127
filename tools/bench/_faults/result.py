"""The outcome of a fault: a row of the table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Attempt:
    """One try of a fault."""

    survived: bool
    """Whether the run continued or resumed to the weights of a run without faults, or failed with the
    expected message and status, and left no partial files."""
    work_lost: int | None = None
    """Steps that were repeated after resuming."""
    notice: float | None = None
    """Seconds from the fault to the end of all processes, or to the run's message about it."""
    resume: float | None = None
    """Seconds from the next start to the end of its first step."""
    said: str = ""
    """The line in which the run reports the fault; the reason if it did not survive."""


@dataclass(frozen=True)
class Result:
    """All tries of a fault."""

    family: str
    fault: str
    tried: int
    survived: int
    work_lost: int | None
    """Maximum of steps."""
    notice: float | None
    """Median of seconds."""
    resume: float | None
    """Median of seconds."""
    said: str
    """The line of the first try that did not survive; otherwise of the first."""


def summarize(family: str, fault: str, attempts: Sequence[Attempt]) -> Result:
    """Combines the tries of one fault."""
    lost = [attempt.work_lost for attempt in attempts if attempt.work_lost is not None]
    reported = next((attempt for attempt in attempts if not attempt.survived), attempts[0])
    return Result(
        family=family,
        fault=fault,
        tried=len(attempts),
        survived=sum(attempt.survived for attempt in attempts),
        work_lost=max(lost, default=None),
        notice=_median([attempt.notice for attempt in attempts]),
        resume=_median([attempt.resume for attempt in attempts]),
        said=reported.said,
    )


def _median(seconds: Sequence[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    return statistics.median(known) if known else None
