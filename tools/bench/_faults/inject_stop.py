"""A rank that does not respond: stopped by a signal, or hung."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from titan_async.monitor.recorder import EventRecorder

__all__ = ["install"]


def install(rank: int, *, of_rank: int, span: int, step: int, seconds: float | None, hangs: bool) -> None:
    """Stops or hangs a rank at the start of a span.

    Args:
        rank: of this process.
        of_rank: the rank to stop.
        span: the `Kind` of the span.
        step: of the span, since the start of the process.
        seconds: duration; None for no end.
        hangs: whether it sleeps instead, while the other threads of its process continue.
    """
    if rank != of_rank:
        return
    begin, done = EventRecorder.begin, []

    def beginning(
        self: EventRecorder, kind: int, stage: int, batch: int | None = None, *rest: Any, **more: Any
    ) -> None:
        begin(self, kind, stage, batch, *rest, **more)
        if kind == span and batch == step - 1 and not done:
            done.append(step)
            _stop(seconds, hangs)

    EventRecorder.begin = beginning  # type: ignore[method-assign]


def _stop(seconds: float | None, hangs: bool) -> None:
    if hangs:
        time.sleep(1e6 if seconds is None else seconds)
        return
    if seconds is not None and not os.fork():
        time.sleep(seconds)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
