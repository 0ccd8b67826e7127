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
"""How long processes may take to end by themselves after they are told to."""


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


def run_workers(command: Sequence[str], nproc: int, rendezvous: dict[str, Any]) -> Outcome:
    """Runs `nproc` copies of `command` and returns when all have ended.

    They write to this process's own terminal. When one fails, or this process gets SIGINT, SIGTERM,
    SIGHUP or SIGQUIT, the others are sent SIGTERM and after `GRACE_SECONDS` are killed.

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
    with _silent(), _ending_at_once_before_workers(), _noting_stops() as stopped:
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            # Those we stopped are in `failures` too, after the ones that ended by themselves.
            exits = [
                WorkerExit(rank=rank, status=failure.exitcode)
                for rank, failure in error.failures.items()
                if failure.pid not in stopped
            ]
            return Outcome(exits=exits, failed=True)
        except SignalException as error:
            return Outcome(interrupted=error.sigval, failed=True)
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
def _noting_stops() -> Iterator[set[int]]:
    """Yields the set of processes that were still alive when the agent stopped them.

    The agent waits 30 s for them after a failure, which is a constant in its code, so the wrapper
    also passes our shorter time.
    """
    stopped: set[int] = set()
    close = PContext.close

    def noting_close(
        self: PContext, death_sig: signal.Signals | None = None, timeout: int | None = None
    ) -> None:
        for handler in getattr(self, "subprocess_handlers", {}).values():
            if handler.proc.poll() is None:
                stopped.add(handler.proc.pid)
        # One signal for every reason to end: on SIGINT Python programs print tracebacks.
        close(self, death_sig if death_sig == signal.SIGKILL else signal.SIGTERM, timeout or GRACE_SECONDS)

    PContext.close = noting_close  # type: ignore[method-assign]
    try:
        yield stopped
    finally:
        PContext.close = close  # type: ignore[method-assign]
