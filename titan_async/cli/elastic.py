"""Runs worker processes with torchelastic, and reports which failed first.

torchelastic starts and monitors the processes. Patches of `PContext` add: which processes failed by
themselves rather than being stopped, signals as requests to save, and shorter time-outs for processes that do
not exit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest
from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.numa.binding import AffinityMode, NumaOptions

from titan_async.training.process.failures import ERROR_DIR
from titan_async.training.process.preemption import SAME_PRESS_SECONDS, STOPPING, ranks_that_stop_cleanly

__all__ = ["Outcome", "WorkerExit", "run_workers"]

GRACE_SECONDS = 10
"""Time-out for processes to exit once another one has failed after SIGTERM."""

SAVE_SECONDS = 60
"""Time-out for processes to finish a step, save and exit after SIGTERM."""

_STDERR_BYTES = 1 << 16
"""Size of the tail of stderr that is kept: more than NCCL's watchdog and C++ print in an abort."""

_SAME_REQUEST_SECONDS = {
    signal.SIGTERM: 1.0,  # `timeout` signals its child, and then the group of the child
    signal.SIGINT: SAME_PRESS_SECONDS,
}


@dataclass(frozen=True)
class WorkerExit:
    """A process that failed, and was not stopped by the launcher."""

    rank: int
    status: int
    """Its exit status; the negative signal number if a signal ended it."""


@dataclass(frozen=True)
class Outcome:
    """How a run of workers ended."""

    exits: list[WorkerExit] = field(default_factory=list)
    """The processes that failed and were not stopped by the launcher; empty after success."""
    interrupted: signal.Signals | None = None
    """The signal that the launcher received; None after a SIGTERM on which all processes saved and exited."""
    failed: bool = False
    """Whether any process did not exit with status 0."""
    killed_after: float | None = None
    """Seconds after SIGTERM at which the remaining processes were killed."""
    stderr: dict[int, str] = field(default_factory=dict)
    """The tail of each rank's stderr."""


@dataclass
class _Request:
    """The signals that were forwarded to the workers."""

    at: dict[int, float] = field(default_factory=dict)
    """When each signal was first received, by `time.monotonic`."""
    killed_after: float | None = None

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that determines the exit status."""
        return next((number for number in (signal.SIGINT, signal.SIGTERM) if number in self.at), None)


def run_workers(
    command: Sequence[str], nproc: int, rendezvous: dict[str, Any], *, bind: bool = False
) -> Outcome:
    """Runs `nproc` copies of `command` and returns when all have exited.

    They write to this process's own stdout, and to its stderr through a pipe each. When one fails, or this
    process receives SIGHUP or SIGQUIT, the others are killed. SIGTERM is forwarded, as a request to save and
    exit with status 0; after `SAVE_SECONDS`, or at a second SIGTERM, they are killed. SIGINT is forwarded,
    without a time-out, once all of them handle it (`ranks_that_stop_cleanly`); before that, or at a second
    SIGINT, they are killed.

    Args:
        command: the program and its arguments.
        nproc: the number of processes on this machine.
        rendezvous: further fields of `LaunchConfig`, for the rendezvous of the machines.
        bind: whether to bind each process to the NUMA node of the accelerator of its local rank.
    """
    stderr = _StderrTee(os.environ[ERROR_DIR])
    config = LaunchConfig(
        nproc_per_node=nproc,
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=stderr,
        shutdown_timeout=GRACE_SECONDS,
        numa_options=NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True) if bind else None,
        **rendezvous,
    )
    request = _Request()
    with (
        _logging_disabled(),
        _exiting_on_signals_in_rendezvous(),
        _forwarding_signals(request, nproc),
        _recorded_stops(request) as stopped,
    ):
        try:
            with stderr.forwarded():
                elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            # Processes that were stopped are in `failures` too, after those that failed by themselves.
            exits = [
                WorkerExit(rank=rank, status=failure.exitcode)
                for rank, failure in error.failures.items()
                if failure.pid not in stopped
            ]
            return Outcome(exits, request.signal, True, request.killed_after, stderr.tails())
        except SignalException as error:
            return Outcome(interrupted=error.sigval, failed=True, killed_after=request.killed_after)
    return Outcome(interrupted=signal.SIGINT if signal.SIGINT in request.at else None)


class _StderrTee(DefaultLogsSpecs):
    """Forwards the stderr of processes, and keeps its tail, where NCCL's watchdog prints why it aborts.

    Args:
        folder: for named pipes. If its file system has none, processes write to this process's stderr.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(log_dir=os.devnull)
        self._folder = folder
        self._selector = selectors.DefaultSelector()
        self._tails: dict[int, bytes] = {}

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destinations = super().reify(envs)
        for local_rank, environ in envs.items():
            path = os.path.join(self._folder, f"stderr-{environ['RANK']}")
            with contextlib.suppress(OSError):
                os.mkfifo(path)
                # Also open for writing: otherwise a read returns end of file while no process has it open.
                pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
                self._selector.register(pipe, selectors.EVENT_READ, int(environ["RANK"]))
                destinations.stderrs[local_rank] = path
        return destinations

    @contextlib.contextmanager
    def forwarded(self) -> Iterator[None]:
        """Forwards while the processes run."""
        ended = threading.Event()
        thread = threading.Thread(target=self._forward, args=(ended,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            for key in list(self._selector.get_map().values()):
                os.close(key.fd)
            self._selector.close()

    def _forward(self, ended: threading.Event) -> None:
        while True:
            over = ended.is_set()  # before the last select
            ready = self._selector.select(0 if over else 0.1)
            for key, _ in ready:
                data = os.read(key.fd, _STDERR_BYTES)
                self._tails[key.data] = (self._tails.get(key.data, b"") + data)[-_STDERR_BYTES:]
                with contextlib.suppress(OSError):  # it may be closed
                    while data:
                        data = data[os.write(2, data) :]
            if over and not ready:
                return

    def tails(self) -> dict[int, str]:
        """Returns the tail of each rank's stderr."""
        return {rank: tail.decode(errors="replace") for rank, tail in self._tails.items()}


@contextlib.contextmanager
def _logging_disabled() -> Iterator[None]:
    # torchelastic's loggers set their own levels, which only the global level overrides.
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _exiting_on_signals_in_rendezvous() -> Iterator[None]:
    """Makes a signal end this process while it waits for the other machines.

    The rendezvous blocks in C++, where Python runs no signal handlers, but writes the number of a signal to
    its wakeup descriptor, which a thread reads. Once there are workers, the agent's handlers take over.
    """
    started = threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    start = PContext.start

    def recorded_start(self: PContext) -> None:
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

    # A signal without a Python handler is not written. The agent installs its own handlers later.
    terminate = signal.signal(signal.SIGTERM, stop)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    PContext.start = recorded_start  # type: ignore[method-assign]
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
def _forwarding_signals(request: _Request, nproc: int) -> Iterator[None]:
    """Forwards SIGTERM and SIGINT to the workers, which the agent continues to monitor."""
    start = PContext.start
    timers: list[threading.Timer] = []
    before = {number: signal.getsignal(number) for number in _SAME_REQUEST_SECONDS}

    def forwarding_start(self: PContext) -> None:
        start(self)
        processes = [handler.proc for handler in self.subprocess_handlers.values()]  # type: ignore[attr-defined]

        def kill() -> bool:
            alive = [process for process in processes if process.poll() is None]
            for process in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and its data loader, in the same group
            return bool(alive)

        def kill_late() -> None:
            if kill():
                request.killed_after = SAVE_SECONDS

        def end_immediately(number: int) -> None:
            kill()
            raise SignalException(f"got {signal.Signals(number).name}", sigval=signal.Signals(number))

        def forward(number: int, frame: object) -> None:
            now = time.monotonic()
            if number in request.at:
                if now - request.at[number] > _SAME_REQUEST_SECONDS[number]:
                    end_immediately(number)
                return
            if number == signal.SIGINT and ranks_that_stop_cleanly(os.environ[ERROR_DIR]) < nproc:
                end_immediately(number)
            request.at[number] = now
            for process in processes:
                process.send_signal(number)
            if number == signal.SIGINT:
                # Not print, which is not reentrant. A terminal shows ^C on the line.
                os.write(2, ("\n" * os.isatty(2) + STOPPING + "\n").encode())
            else:
                timer = threading.Timer(SAVE_SECONDS, kill_late)
                timer.daemon = True
                timer.start()
                timers.append(timer)

        # Replaces the handlers of the agent, which would stop monitoring.
        for number in before:
            signal.signal(number, forward)

    PContext.start = forwarding_start  # type: ignore[method-assign]
    try:
        yield
    finally:
        PContext.start = start  # type: ignore[method-assign]
        for timer in timers:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _recorded_stops(request: _Request) -> Iterator[set[int]]:
    """Yields the set of processes that were still running when the agent stopped them.

    They are killed, because after SIGTERM they would try to finish the step, which needs the other processes.
    After a forwarded SIGTERM, all processes do this together, so they have time to save.
    """
    stopped: set[int] = set()
    close = PContext.close

    def recording_close(
        self: PContext, death_sig: signal.Signals | None = None, timeout: int | None = None
    ) -> None:
        for handler in getattr(self, "subprocess_handlers", {}).values():
            if handler.proc.poll() is None:
                stopped.add(handler.proc.pid)
        saving = request.signal is not None and death_sig in (None, signal.SIGTERM)
        close(self, signal.SIGTERM if saving else signal.SIGKILL, GRACE_SECONDS)

    PContext.close = recording_close  # type: ignore[method-assign]
    try:
        yield stopped
    finally:
        PContext.close = close  # type: ignore[method-assign]
