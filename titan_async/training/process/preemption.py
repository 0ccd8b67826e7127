"""Stopping in order at SIGTERM, with which Slurm and other schedulers announce that a job must go, or Ctrl-C.

Signals reach the ranks at different times, and perhaps only some of them, but all must stop after the
same step. So every step carries a small all-reduce of "was I asked to stop?", which starts with the step
and is waited for at its end, when every rank has long begun that step: nobody waits for it.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from titan_async.training.process.failures import ERROR_DIR

__all__ = [
    "SAME_PRESS_SECONDS",
    "STOPPING",
    "PreemptedError",
    "Preemption",
    "ranks_that_stop_cleanly",
    "shield_data_worker",
]

STOPPING = "stopping after this step and saving; press Ctrl-C again to stop at once"
"""What the first Ctrl-C is answered with."""

SAME_PRESS_SECONDS = 0.3
"""A SIGINT that follows another within this time is the same press of Ctrl-C, come by another way."""

_REQUESTS = (None, signal.SIGTERM, signal.SIGINT)
"""What a rank may have been asked by; if the ranks differ, the last of these counts."""

_MARK = "stops-cleanly-"


class PreemptedError(Exception):
    """The run was asked to stop, and all ranks have agreed to do so after the same step.

    Args:
        request: SIGTERM, or SIGINT for Ctrl-C.
    """

    def __init__(self, request: signal.Signals) -> None:
        super().__init__(request.name)
        self.request = request


class Preemption:
    """Hears SIGTERM and SIGINT, and finds out after each step whether any rank has heard one.

    Making one is a collective over all ranks. Before `listen` a signal ends the process as usual, and is
    never used up: there is nothing to save yet.
    """

    def __init__(self) -> None:
        self._heard: dict[int, float] = {}
        self._pending: dist.Work | None = None
        self._latest = torch.zeros(1, dtype=torch.int32)
        self._launcher = os.environ.get(ERROR_DIR)
        self._rank = dist.get_rank()
        # On the CPU and apart from the groups of training, whose order of operations it must not change.
        alone = dist.get_world_size() == 1 or dist.get_backend() == "fake"
        self.group = None if alone else dist.new_group(backend="gloo")
        """All ranks, on their hosts; None for one rank, or imaginary ones."""

    @property
    def interrupted(self) -> bool:
        """Whether this process itself, and not only another rank's, was sent SIGINT."""
        return signal.SIGINT in self._heard

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait so long, and not longer, for the other ranks."""
        if self.group is not None:
            dist.set_timeout(timeout, self.group)

    def listen(self) -> None:
        """From now on, to the end of the process, take SIGTERM as a request.

        Repeated signals change nothing: a job step's signal comes from the scheduler and, once more, from
        the launcher. Outside the main thread, where Python hears no signals, does nothing.
        """
        self._hear(signal.SIGTERM, self._ask)

    def listen_to_interrupts(self) -> None:
        """From now on, to the end of the process, take SIGINT as a request, as `listen` does SIGTERM.

        Tells our launcher, which ends the ranks itself at a second Ctrl-C. Without it a process ends at its
        second SIGINT, or at a SIGTERM after the first: torchrun passes on a second Ctrl-C as that.
        """
        if dist.get_backend() == "fake":
            return  # there is no run to save
        self._hear(signal.SIGINT, self._ask)
        if self._launcher:
            with contextlib.suppress(OSError):  # then Ctrl-C ends this run at once
                Path(self._launcher, f"{_MARK}{self._rank}").touch()

    def _hear(self, number: signal.Signals, handler: Callable[[int, object], None]) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(number, handler)
            # Calls of the system that it interrupts in C++ code go on by themselves.
            signal.siginterrupt(number, False)

    def _ask(self, number: int, frame: object) -> None:
        now = time.monotonic()
        pressed = self._heard.get(signal.SIGINT)
        self._heard.setdefault(number, now)
        if self._launcher:
            return
        if pressed is not None and now - pressed > SAME_PRESS_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif pressed is None and number == signal.SIGINT and self._rank == 0:
            # Not print, whose buffer the signal may have found in use.
            os.write(2, f"{STOPPING}\n".encode())

    def begin_step(self) -> None:
        """Tell the other ranks whether this one was asked. A collective, which does not block."""
        # Looping over `_heard` would fail if a signal arrived meanwhile and added to it.
        self._latest.fill_(
            max(i for i, number in enumerate(_REQUESTS) if number is None or number in self._heard)
        )
        if self.group is not None:
            self._pending = dist.all_reduce(self._latest, dist.ReduceOp.MAX, self.group, async_op=True)

    def end_step(self) -> signal.Signals | None:
        """What any rank had been asked by when it began this step, if at all; the same on all ranks."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return _REQUESTS[self._latest.item()]


def ranks_that_stop_cleanly(folder: str | Path) -> int:
    """How many of a launcher's ranks now take SIGINT as a request; `folder` is its folder of reports."""
    return sum(1 for _ in Path(folder).glob(f"{_MARK}*"))


def shield_data_worker(worker_id: int) -> None:
    """Let only its parent end a data loader's worker process: a `worker_init_fn`.

    A scheduler's SIGTERM goes to every process of a job, and so may Ctrl-C. One that dies of it takes the
    training process with it, which is just about to finish its step and save. Elsewhere than on Linux only
    SIGINT is kept off.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):
        return
    # Blocked before there are other threads, so that all of them inherit it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    parent = os.getppid()

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
