"""Ranks that kill themselves at planned times, once per start."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_async.monitor.recorder import EventRecorder
from titan_async.training.trainer import AsyncTrainer

__all__ = ["Kill", "install", "when_killed"]


@dataclass(frozen=True)
class Kill:
    """A SIGKILL that a rank sends itself in the `nth` span, from 0, of some kinds in a step."""

    phase: str
    """Name of the phase."""
    rank: int
    step: int
    kinds: tuple[int, ...] = ()
    """Values of `Kind`; empty for all kinds."""
    nth: int = 0
    delay: float = 0.0
    """Seconds after the start of the span; at most until its end."""
    draining: bool = False
    """Whether it is a span of the drain at the end of the step."""


def install(rank: int, *, plan: Sequence[dict[str, Any]], folder: str) -> None:
    """Prepares the next kill of the plan, if it is one of this rank.

    Args:
        rank: of this process.
        plan: the fields of `Kill`s.
        folder: contains a file for each past kill.
    """
    for number, fields in enumerate(plan):
        if when_killed(Path(folder), number) is None:
            if fields["rank"] == rank:
                _Planned(Kill(**fields), Path(folder, str(number))).watch()
            return


def when_killed(folder: Path, number: int) -> float | None:
    """The time of a kill of the plan, in seconds since the epoch; None for future ones."""
    try:
        return float((folder / str(number)).read_text())
    except FileNotFoundError:
        return None


class _Planned:
    def __init__(self, kill: Kill, note: Path) -> None:
        self._kill, self._note = kill, note
        self._draining = False
        self._seen = 0
        self._depth: int | None = None  # of the current span, relative to the span of the kill

    def watch(self) -> None:
        begin, end, drain = EventRecorder.begin, EventRecorder.end, AsyncTrainer._drain_and_update
        planned = self

        def beginning(self: Any, kind: int, stage: int, batch: int | None = None, *about: Any, **more: Any):
            begin(self, kind, stage, batch, *about, **more)
            planned._begin(kind, -1 if batch is None else batch + 1 + self._first_step)

        def ending(self: EventRecorder) -> None:
            planned._end()
            end(self)

        def draining(self: AsyncTrainer) -> None:
            planned._draining = self.step == planned._kill.step
            drain(self)
            if planned._draining and planned._kill.draining:
                planned._carry_out()  # there were fewer spans
            planned._draining = False

        EventRecorder.begin = beginning  # type: ignore[method-assign]
        EventRecorder.end = ending  # type: ignore[method-assign]
        AsyncTrainer._drain_and_update = draining  # type: ignore[method-assign]

    def _begin(self, kind: int, step: int) -> None:
        kill = self._kill
        if self._depth is not None:
            self._depth += 1
            return
        # A drain may also process the previous batch.
        meant = self._draining if kill.draining else step == kill.step and kind in kill.kinds
        if meant:
            if self._seen == kill.nth:
                self._depth = 0
                threading.Timer(kill.delay, self._carry_out).start()
            self._seen += 1

    def _end(self) -> None:
        if self._depth is not None:
            if self._depth == 0:
                self._carry_out()
            self._depth -= 1

    def _carry_out(self) -> None:
        partial = self._note.with_suffix(".partial")
        partial.write_text(str(time.time()))
        partial.replace(self._note)
        os.kill(os.getpid(), signal.SIGKILL)
