"""Runs worker processes with torchelastic, and reports what it does not: who died first.

Every access to torchelastic's internals is here. Its agent is right for starting and watching
processes; its silence about cause and effect, its half minute of patience with processes that do
not end and its log lines are not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from titan_async.training.failures import ERROR_DIR

__all__ = ["Outcome", "WorkerExit", "run_workers"]

GRACE_SECONDS = 10
"""How long processes may take to end once another one has ended badly after SIGTERM."""

SAVE_SECONDS = 60
"""How long processes may take to finish a step, save and end after SIGTERM."""

_SAME_REQUEST_SECONDS = 1.0


@dataclass(frozen=True)
class WorkerExit:
    """A process that ended badly, by itself."""

    rank: int
    status: int
    """Its exit status; minus the signal's number if a signal ended it."""


@dataclass(frozen=True)
class Outcome:
    """How a run of workers ended."""

    exits: list[WorkerExit] = field(default_factory=list)
    """The processes that ended badly and were not stopped by us; empty after success."""
    interrupted: signal.Signals | None = None
    """The signal that the launcher itself was sent."""
    failed: bool = False
    """Whether any process did not end with status 0."""
    killed_after: float | None = None
    """Seconds after SIGTERM at which processes that were still there were killed."""


@dataclass
class _Request:
    """The SIGTERM that was passed on to the workers."""

    at: float | None = None
    """When, by `time.monotonic`; None as long as there was none."""
    killed_after: float | None = None


def run_workers(command: Sequence[str], nproc: int, rendezvous: dict[str, Any]) -> Outcome:
    """Runs `nproc` copies of `command` and returns when all have ended.

    They write to this process's own terminal. When one fails, or this process gets SIGINT, SIGHUP or
    SIGQUIT, the others are killed. SIGTERM is passed on, as a request to save and end with status 0; after
    `SAVE_SECONDS`, or at a second SIGTERM, they are killed.

    Args:
        command: the program and its arguments.
        nproc: the number of processes on this machine.
        rendezvous: further fields of `LaunchConfig`, saying how the machines find each other.
    """
    config = LaunchConfig(
        nproc_per_node=nproc,
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        shutdown_timeout=GRACE_SECONDS,
        **rendezvous,
    )
    request = _Request()
    with (
        _silent(),
        _ending_at_once_before_workers(),
        _passing_sigterm_on(request),
        _noting_stops(request) as stopped,
    ):
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            # Those we stopped are in `failures` too, after the ones that ended by themselves.
            exits = [
                WorkerExit(rank=rank, status=failure.exitcode)
                for rank, failure in error.failures.items()
                if failure.pid not in stopped
            ]
            interrupted = None if request.at is None else signal.SIGTERM
            return Outcome(exits, interrupted, failed=True, killed_after=request.killed_after)
        except SignalException as error:
            return Outcome(interrupted=error.sigval, failed=True, killed_after=request.killed_after)
    return Outcome()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    # Loggers of torchelastic carry levels of their own, so that only the global switch quiets all.
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _ending_at_once_before_workers() -> Iterator[None]:
    """Lets a signal end this process while it waits for the other machines.

    The wait is a call into C++, during which Python runs no signal handler; but the interpreter still
    writes the signal's number to its wakeup descriptor, which a thread reads. Once there are workers,
    the agent's handlers take over.
    """
    started = threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    start = PContext.start

    def noting_start(self: PContext) -> None:
        started.set()
        start(self)

    def watch() -> None:
        for number in iter(lambda: os.read(reader, 1), b""):
            if not started.is_set():
                shutil.rmtree(os.environ.get(ERROR_DIR, ""), ignore_errors=True)
                print(f"stopped by {signal.Signals(number[0]).name}", file=sys.stderr, flush=True)
                os._exit(128 + number[0])

    def stop(number: int, frame: object) -> None:
        raise SignalException(f"got {signal.Signals(number).name}", sigval=signal.Signals(number))

    # A signal without a handler in Python is not written; the agent sets its own later.
    terminate = signal.signal(signal.SIGTERM, stop)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    PContext.start = noting_start  # type: ignore[method-assign]
    try:
        yield
    finally:
        PContext.start = start  # type: ignore[method-assign]
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGTERM, terminate)
        os.close(writer)
        watcher.join()
        os.close(reader)


@contextlib.contextmanager
def _passing_sigterm_on(request: _Request) -> Iterator[None]:
    """Lets the workers themselves answer a SIGTERM to this process, and the agent watch them do it."""
    start = PContext.start
    timers: list[threading.Timer] = []

    def passing_on(self: PContext) -> None:
        start(self)
        processes = [handler.proc for handler in self.subprocess_handlers.values()]  # type: ignore[attr-defined]

        def kill() -> None:
            for process in processes:
                if process.poll() is None:
                    request.killed_after = SAVE_SECONDS
                    process.kill()

        def pass_on(number: int, frame: object) -> None:
            if request.at is None:
                request.at = time.monotonic()
                for process in processes:
                    process.send_signal(signal.SIGTERM)
                timer = threading.Timer(SAVE_SECONDS, kill)
                timer.daemon = True
                timer.start()
                timers.append(timer)
            elif time.monotonic() - request.at > _SAME_REQUEST_SECONDS:
                # Not a repetition such as `timeout` sends, to its child and then to the child's group.
                for process in processes:
                    process.kill()
                raise SignalException(f"got {signal.Signals(number).name}", sigval=signal.Signals(number))

        # In place of the agent's handler, which would end the watching.
        signal.signal(signal.SIGTERM, pass_on)

    PContext.start = passing_on  # type: ignore[method-assign]
    try:
        yield
    finally:
        PContext.start = start  # type: ignore[method-assign]
        for timer in timers:
            timer.cancel()


@contextlib.contextmanager
def _noting_stops(request: _Request) -> Iterator[set[int]]:
    """Yields the set of processes that were still alive when the agent stopped them.

    They are killed: SIGTERM would be a request to go on to the end of the step, which without the others
    they cannot reach. Only after such a request they are given time to finish what the others had finished.
    """
    stopped: set[int] = set()
    close = PContext.close

    def noting_close(
        self: PContext, death_sig: signal.Signals | None = None, timeout: int | None = None
    ) -> None:
        for handler in getattr(self, "subprocess_handlers", {}).values():
            if handler.proc.poll() is None:
                stopped.add(handler.proc.pid)
        asked = request.at is not None and death_sig in (None, signal.SIGTERM)
        close(self, signal.SIGTERM if asked else signal.SIGKILL, GRACE_SECONDS)

    PContext.close = noting_close  # type: ignore[method-assign]
    try:
        yield stopped
    finally:
        PContext.close = close  # type: ignore[method-assign]
