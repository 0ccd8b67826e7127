"""Runs worker processes with torchelastic, and reports what it does not: who died first.

Every access to torchelastic's internals is here. Its agent is right for starting and watching
processes; its silence about cause and effect, its half minute of patience with processes that do
not end and its log lines are not.
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
"""How long processes may take to end once another one has ended badly after SIGTERM."""

SAVE_SECONDS = 60
"""How long processes may take to finish a step, save and end after SIGTERM."""

_STDERR_BYTES = 1 << 16
"""What is kept of a process's stderr: more than NCCL's watchdog and C++ say at a process's end."""

_SAME_REQUEST_SECONDS = {
    signal.SIGTERM: 1.0,  # `timeout` sends it to its child, and then to the child's group
    signal.SIGINT: SAME_PRESS_SECONDS,
}


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
    """The signal that the launcher itself was sent; if the processes then saved and ended, SIGINT alone."""
    failed: bool = False
    """Whether any process did not end with status 0."""
    killed_after: float | None = None
    """Seconds after SIGTERM at which processes that were still there were killed."""
    stderr: dict[int, str] = field(default_factory=dict)
    """The end of what each rank wrote there."""


@dataclass
class _Request:
    """What was passed on to the workers."""

    at: dict[int, float] = field(default_factory=dict)
    """When each signal first came, by `time.monotonic`."""
    killed_after: float | None = None

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that says how the run ends."""
        return next((number for number in (signal.SIGINT, signal.SIGTERM) if number in self.at), None)


def run_workers(
    command: Sequence[str], nproc: int, rendezvous: dict[str, Any], *, bind: bool = False
) -> Outcome:
    """Runs `nproc` copies of `command` and returns when all have ended.

    They write to this process's own stdout, and to its stderr through a pipe each. When one fails, or this
    process gets SIGHUP or SIGQUIT, the others are killed. SIGTERM is passed on, as a request to save and end
    with status 0; after `SAVE_SECONDS`, or at a second SIGTERM, they are killed. So is SIGINT, without a
    limit of time, once all of them stop cleanly at it (`ranks_that_stop_cleanly`); before, or at a second
    SIGINT, they are killed.

    Args:
        command: the program and its arguments.
        nproc: the number of processes on this machine.
        rendezvous: further fields of `LaunchConfig`, saying how the machines find each other.
        bind: whether to bind each process to the NUMA node of the accelerator of its local rank.
    """
    stderr = _Stderr(os.environ[ERROR_DIR])
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
        _silent(),
        _ending_at_once_before_workers(),
        _passing_requests_on(request, nproc),
        _noting_stops(request) as stopped,
    ):
        try:
            with stderr.passed_on():
                elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            # Those we stopped are in `failures` too, after the ones that ended by themselves.
            exits = [
                WorkerExit(rank=rank, status=failure.exitcode)
                for rank, failure in error.failures.items()
                if failure.pid not in stopped
            ]
            return Outcome(exits, request.signal, True, request.killed_after, stderr.ends())
        except SignalException as error:
            return Outcome(interrupted=error.sigval, failed=True, killed_after=request.killed_after)
    return Outcome(interrupted=signal.SIGINT if signal.SIGINT in request.at else None)


class _Stderr(DefaultLogsSpecs):
    """Passes on what processes write to stderr, and keeps the end of it.

    NCCL's watchdog says there why it aborts a process, and nowhere else.

    Args:
        folder: where to put the pipes. Where it can hold none, processes write to this process's stderr.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(log_dir=os.devnull)
        self._folder = folder
        self._selector = selectors.DefaultSelector()
        self._ends: dict[int, bytes] = {}

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destinations = super().reify(envs)
        for local_rank, environ in envs.items():
            path = os.path.join(self._folder, f"stderr-{environ['RANK']}")
            with contextlib.suppress(OSError):
                os.mkfifo(path)
                # Also for writing: else it would be at its end whenever nobody writes.
                pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
                self._selector.register(pipe, selectors.EVENT_READ, int(environ["RANK"]))
                destinations.stderrs[local_rank] = path
        return destinations

    @contextlib.contextmanager
    def passed_on(self) -> Iterator[None]:
        """While the processes run."""
        ended = threading.Event()
        thread = threading.Thread(target=self._pass_on, args=(ended,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            for key in list(self._selector.get_map().values()):
                os.close(key.fd)
            self._selector.close()

    def _pass_on(self, ended: threading.Event) -> None:
        while True:
            over = ended.is_set()  # before the last look
            ready = self._selector.select(0 if over else 0.1)
            for key, _ in ready:
                data = os.read(key.fd, _STDERR_BYTES)
                self._ends[key.data] = (self._ends.get(key.data, b"") + data)[-_STDERR_BYTES:]
                with contextlib.suppress(OSError):  # it may be closed
                    while data:
                        data = data[os.write(2, data) :]
            if over and not ready:
                return

    def ends(self) -> dict[int, str]:
        """By rank."""
        return {rank: end.decode(errors="replace") for rank, end in self._ends.items()}


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
def _passing_requests_on(request: _Request, nproc: int) -> Iterator[None]:
    """Lets the workers themselves answer a SIGTERM or SIGINT to this process, and the agent watch them."""
    start = PContext.start
    timers: list[threading.Timer] = []
    before = {number: signal.getsignal(number) for number in _SAME_REQUEST_SECONDS}

    def passing_on(self: PContext) -> None:
        start(self)
        processes = [handler.proc for handler in self.subprocess_handlers.values()]  # type: ignore[attr-defined]

        def kill() -> bool:
            alive = [process for process in processes if process.poll() is None]
            for process in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and its data loader, of the same group
            return bool(alive)

        def kill_late() -> None:
            if kill():
                request.killed_after = SAVE_SECONDS

        def end_at_once(number: int) -> None:
            kill()
            raise SignalException(f"got {signal.Signals(number).name}", sigval=signal.Signals(number))

        def pass_on(number: int, frame: object) -> None:
            now = time.monotonic()
            if number in request.at:
                if now - request.at[number] > _SAME_REQUEST_SECONDS[number]:
                    end_at_once(number)
                return
            if number == signal.SIGINT and ranks_that_stop_cleanly(os.environ[ERROR_DIR]) < nproc:
                end_at_once(number)
            request.at[number] = now
            for process in processes:
                process.send_signal(number)
            if number == signal.SIGINT:
                # Not print, whose buffer the signal may have found in use. A terminal shows a ^C before it.
                os.write(2, ("\n" * os.isatty(2) + STOPPING + "\n").encode())
            else:
                timer = threading.Timer(SAVE_SECONDS, kill_late)
                timer.daemon = True
                timer.start()
                timers.append(timer)

        # In place of the agent's handlers, which would end the watching.
        for number in before:
            signal.signal(number, pass_on)

    PContext.start = passing_on  # type: ignore[method-assign]
    try:
        yield
    finally:
        PContext.start = start  # type: ignore[method-assign]
        for timer in timers:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


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
        asked = request.signal is not None and death_sig in (None, signal.SIGTERM)
        close(self, signal.SIGTERM if asked else signal.SIGKILL, GRACE_SECONDS)

    PContext.close = noting_close  # type: ignore[method-assign]
    try:
        yield stopped
    finally:
        PContext.close = close  # type: ignore[method-assign]
