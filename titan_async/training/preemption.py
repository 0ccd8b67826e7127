"""Stopping in order at SIGTERM, with which Slurm and other schedulers announce that a job must go.

Signals reach the ranks at different times, and perhaps only some of them, but all must stop after the
same step. So every step carries a small all-reduce of "was I asked to stop?", which starts with the step
and is waited for at its end, when every rank has long begun that step: nobody waits for it.
"""

import os
import signal
import threading

import torch
import torch.distributed as dist

__all__ = ["PreemptedError", "Preemption", "shield_data_worker"]


class PreemptedError(Exception):
    """The run was asked to stop, and all ranks have agreed to do so after the same step."""


class Preemption:
    """Hears SIGTERM, and finds out after each step whether any rank has heard it.

    Making one is a collective over all ranks. Before `listen` the signal ends the process as usual, and
    is never used up: there is nothing to save yet.
    """

    def __init__(self) -> None:
        self._asked = False
        self._pending: dist.Work | None = None
        self._anyone = torch.zeros(1, dtype=torch.int32)
        # On the CPU and apart from the groups of training, whose order of operations it must not change.
        alone = dist.get_world_size() == 1 or dist.get_backend() == "fake"
        self._group = None if alone else dist.new_group(backend="gloo")

    def listen(self) -> None:
        """From now on, to the end of the process, take SIGTERM as a request.

        Repeated signals change nothing: a job step's signal comes from the scheduler and, once more, from
        the launcher. Outside the main thread, where Python hears no signals, does nothing.
        """
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._ask)
            # Calls of the system that it interrupts in C++ code go on by themselves.
            signal.siginterrupt(signal.SIGTERM, False)

    def _ask(self, number: int, frame: object) -> None:
        self._asked = True

    def begin_step(self) -> None:
        """Tell the other ranks whether this one was asked. A collective, which does not block."""
        self._anyone.fill_(self._asked)
        if self._group is not None:
            self._pending = dist.all_reduce(self._anyone, dist.ReduceOp.MAX, self._group, async_op=True)

    def end_step(self) -> bool:
        """Whether any rank had been asked when it began this step; the same on all ranks."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return bool(self._anyone.item())


def shield_data_worker(worker_id: int) -> None:
    """Let only its parent end a data loader's worker process: a `worker_init_fn`.

    A scheduler's SIGTERM goes to every process of a job. One that dies of it takes the training process
    with it, which is just about to finish its step and save. Linux only; elsewhere does nothing.
    """
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
