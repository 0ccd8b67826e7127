"""Timeouts of process groups: long for what runs for the first time, then adapted to the steps.

An operation over NCCL has the timeout that its group has when it is enqueued, and NCCL's watchdog counts from
there. The host may enqueue a receive while the device still executes the previous step, and the sender may
have a step, an update and a validation to do first. A fixed timeout would end runs with longer steps. So each
rank measures its steps on the host, and derives its groups' timeouts from them; in a pipeline the steps of
all ranks take equally long.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torchtitan.distributed import ParallelDims

from titan_async._group_internals import set_joint_timeout
from titan_async.training._titan_internals import saves_at
from titan_async.training.process.preemption import Preemption

__all__ = ["WaitLimits", "pauses_after", "set_all_timeouts"]

_STEPS_OF_WAIT = 4
"""Steps that one operation may have to wait for: the one on the device, its own, that of a late sender, and
one for safety."""

_RECENT = 8
"""Recent steps of each kind, of which the longest counts."""

_FIRST_STEPS = 2
"""Under Async2BW the first step compiles the model, and the second makes the first update."""


class WaitLimits:
    """Sets the timeouts of a rank's process groups, step by step.

    The timeout is `comm.init_timeout_seconds` for the first two steps, for a step before the first validation
    or save, and for the step after any of these: other ranks may still compile then. For other steps it is
    `comm.train_timeout_seconds`. It is at least four times the longest recent step.

    Args:
        comm: the configuration's `comm` section.
        apply: sets the timeout of operations enqueued afterwards.
        clock: returns seconds.
    """

    def __init__(
        self, comm: Any, apply: Callable[[timedelta], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._comm, self._apply, self._clock = comm, apply, clock
        self._steps = 0  # started
        self._began = 0.0
        self._pauses: frozenset[str] = frozenset()
        self._is_first = True
        self._known: set[str] = set()
        self._seconds: dict[frozenset[str], deque[float]] = {}
        self._of_first: set[frozenset[str]] = set()  # kinds with a first step only, which compiles
        self._limit: int | None = None
        self._set(comm.init_timeout_seconds)

    def begin(self, pauses: Iterable[str] = ()) -> None:
        """Call before a step; `pauses` contains "validation" and "save", if they follow it."""
        now, pauses = self._clock(), frozenset(pauses)
        if self._steps:
            self._measure(now - self._began)
        was_first, before = self._is_first, self._pauses
        self._is_first = self._steps < _FIRST_STEPS or not pauses <= self._known
        self._steps, self._began, self._pauses = self._steps + 1, now, pauses
        self._known |= pauses
        longest = max((max(of) for kind, of in self._seconds.items() if kind <= pauses | before), default=0.0)
        is_long = self._is_first or was_first
        limit = self._comm.init_timeout_seconds if is_long else self._comm.train_timeout_seconds
        # torchtitan shortens the timeouts of its groups after the first step.
        self._set(max(limit, math.ceil(_STEPS_OF_WAIT * longest)), again=is_long)

    def _measure(self, seconds: float) -> None:
        recent = self._seconds.setdefault(self._pauses, deque(maxlen=_RECENT))
        if self._pauses in self._of_first:
            recent.clear()
            self._of_first.remove(self._pauses)
        if self._is_first:
            self._of_first.add(self._pauses)
        recent.append(seconds)

    def _set(self, seconds: int, again: bool = False) -> None:
        if seconds != self._limit or again:
            self._limit = seconds
            self._apply(timedelta(seconds=seconds))


def pauses_after(trainer: Any) -> list[str]:
    """Which of "validation" and "save" follow the trainer's current step."""
    step, config = trainer.step, trainer.config
    validates = config.validator.enable and trainer.validator.should_validate(step)
    saves = saves_at(trainer.checkpointer, step, step == config.training.steps)
    return ["validation"] * validates + ["save"] * saves


def set_all_timeouts(timeout: timedelta, dims: ParallelDims, preemption: Preemption) -> None:
    """Set the timeouts of torchtitan's process groups and of this project's."""
    set_joint_timeout(timeout)
    preemption.set_timeout(timeout)
    for mesh in dims.get_all_one_dimensional_meshes().values():
        dist.set_timeout(timeout, mesh.get_group())
    dist.set_timeout(timeout)
