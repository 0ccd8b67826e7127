"""Clean stop after SIGTERM, with which Slurm and other schedulers announce preemption, or after Ctrl-C.

Signals reach the ranks at different times, and perhaps only some of them, but all must stop after the same
step. So each step has a small all-reduce of whether a rank has received a signal. It starts with the step and
is waited for at its end; by then every rank has begun the step, so that the wait takes no time.
"""

import contextlib
import os
import signal
import threading
import time
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
"""Printed at the first Ctrl-C."""

SAME_PRESS_SECONDS = 0.3
"""A SIGINT within this time after another one is the same press of Ctrl-C, delivered twice."""

_REQUESTS = (None, signal.SIGTERM, signal.SIGINT)
"""The signals that request a stop; if the ranks differ, the last of these counts."""

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
    """Handles SIGTERM and SIGINT, and determines after each step whether any rank has received one.

    The constructor is a collective over all ranks. Before `listen` a signal ends the process as usual: there
    is nothing to save yet.
    """

    def __init__(self) -> None:
        self._received: dict[int, float] = {}
        self._pending: dist.Work | None = None
        self._latest = torch.zeros(1, dtype=torch.int32)
        self._launcher = os.environ.get(ERROR_DIR)
        self._rank = dist.get_rank()
        # On the CPU and apart from the groups of training, whose order of operations it must not change.
        alone = dist.get_world_size() == 1 or dist.get_backend() == "fake"
        self.group = None if alone else dist.new_group(backend="gloo")
        """All ranks, on their hosts; None for one rank, or a fake process group."""

    @property
    def interrupted(self) -> bool:
        """Whether this process, and not only that of another rank, has received SIGINT."""
        return signal.SIGINT in self._received

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the all-reduce."""
        if self.group is not None:
            dist.set_timeout(timeout, self.group)

    def listen(self) -> None:
        """From now on, handle SIGTERM as a request to stop.

        Repeated signals change nothing: both the scheduler and the launcher may send one. Does nothing
        outside the main thread, where Python cannot set handlers.
        """
        self._handle(signal.SIGTERM)

    def listen_to_interrupts(self) -> None:
        """From now on, handle SIGINT as a request to stop, as `listen` does SIGTERM.

        Reports this to our launcher, which ends the ranks at a second Ctrl-C. Without it a process ends at
        its second SIGINT, or at a SIGTERM after the first: torchrun forwards a second Ctrl-C as SIGTERM.
        """
        if dist.get_backend() == "fake":
            return  # there is no run to save
        self._handle(signal.SIGINT)
        if self._launcher:
            with contextlib.suppress(OSError):  # then Ctrl-C ends this run at once
                Path(self._launcher, f"{_MARK}{self._rank}").touch()

    def _handle(self, number: signal.Signals) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(number, self._on_signal)
            # System calls in C++ code that it interrupts are restarted.
            signal.siginterrupt(number, False)

    def _on_signal(self, number: int, frame: object) -> None:
        now = time.monotonic()
        pressed = self._received.get(signal.SIGINT)
        self._received.setdefault(number, now)
        if self._launcher:
            return
        if pressed is not None and now - pressed > SAME_PRESS_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif pressed is None and number == signal.SIGINT and self._rank == 0:
            # Not print, whose buffer may be in use.
            os.write(2, f"{STOPPING}\n".encode())

    def begin_step(self) -> None:
        """Start the all-reduce of whether a rank was asked to stop. Does not block."""
        # Iterating over `_received` would fail if a signal added to it meanwhile.
        self._latest.fill_(
            max(i for i, number in enumerate(_REQUESTS) if number is None or number in self._received)
        )
        if self.group is not None:
            self._pending = dist.all_reduce(self._latest, dist.ReduceOp.MAX, self.group, async_op=True)

    def end_step(self) -> signal.Signals | None:
        """The signal that any rank had received when it began this step, or None; the same on all ranks."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return _REQUESTS[self._latest.item()]


def ranks_that_stop_cleanly(folder: str | Path) -> int:
    """How many ranks of a launcher now handle SIGINT as a request; `folder` is its folder of reports."""
    return sum(1 for _ in Path(folder).glob(f"{_MARK}*"))


def shield_data_worker(worker_id: int) -> None:
    """A `worker_init_fn` that lets only the parent end a worker process of a data loader.

    A scheduler's SIGTERM goes to every process of a job, and so may Ctrl-C. A worker that died of it would
    end the training process, which is about to finish its step and save. Only SIGINT is ignored on systems
    other than Linux.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):
        return
    # Blocked before other threads exist, so that all of them inherit it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    parent = os.getppid()

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
