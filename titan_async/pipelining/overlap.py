"""Overlapped pairs: a forward and a backward by turns, each while the other's tokens travel between experts.

In a mixture of experts a forward stops at every dispatch and combine until its tokens have come, and so does
a backward. `ScheduleAsync2BW` has an independent forward and backward to run at any time, so one of them
computes while the other's tokens travel, as in DualPipe (arXiv 2412.19437, section 3.2.1).

The two run in two threads, of which only one at a time does anything: `hand_over` stops a half and lets the
other one go on. So what each rank does has one order, and ranks that exchange tokens meet in the same
collectives.
"""

import contextvars
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Halves", "Overlap", "hand_over"]

_FORWARD, _BACKWARD = 0, 1


class Halves(Protocol):
    """What is the module's, and differs between the forward (0) and the backward (1) of a pair."""

    def leave(self, half: int) -> None:
        """The half, which has the turn, stops."""

    def enter(self, half: int) -> None:
        """The half goes on."""


class _OtherHalfError(RuntimeError):
    """Ends a half whose pair is lost."""


class _Pair:
    """A forward and a backward that are under way. The thread that made it runs the forward."""

    def __init__(self, device: torch.device, halves: Halves) -> None:
        self.error: BaseException | None = None  # the first
        self._device = device
        self._halves = halves
        self._thread = threading.get_ident()
        # A half waits for its turn to acquire its lock.
        self._turns = (threading.Lock(), threading.Lock())
        for turn in self._turns:
            turn.acquire()
        self._over = [False, False]
        self._random: list[tuple[Tensor, Tensor | None]] = [self._random_state()] * 2

    def hand_over(self) -> None:
        # On accelerators autograd runs backwards in threads of its own.
        half = _FORWARD if threading.get_ident() == self._thread else _BACKWARD
        if self._over[half]:
            return
        self._refuse_lost()
        if self._over[1 - half]:
            return
        self._leave(half)
        self._turns[1 - half].release()
        self._wait_for_turn(half)
        self._enter(half)
        self._refuse_lost()

    def start(self, half: int) -> None:
        """Wait for the first turn of a half."""
        self._wait_for_turn(half)
        self._enter(half)

    def end(self, half: int, error: BaseException | None) -> None:
        """The half, which has the turn, is done."""
        self.error = self.error or error
        try:
            self._leave(half)
        finally:
            self._over[half] = True
            self._turns[1 - half].release()

    def finish(self) -> None:
        """Wait, as the forward that is done, for the end of the backward."""
        if not self._over[_BACKWARD]:
            self._wait_for_turn(_FORWARD)
        self._enter(_FORWARD)

    def abandon(self, error: BaseException) -> None:
        """End the forward, whoever has the turn; the backward ends at its next `hand_over`."""
        self.error = self.error or error
        self._over[_FORWARD] = True
        if self._turns[_BACKWARD].locked():
            self._turns[_BACKWARD].release()

    def _wait_for_turn(self, half: int) -> None:
        # A signal that comes just before a lock is waited for does not end that wait.
        while not self._turns[half].acquire(timeout=1.0):
            pass

    def _refuse_lost(self) -> None:
        if self.error is not None:
            raise _OtherHalfError("the other half of an overlapped pair has failed")

    def _leave(self, half: int) -> None:
        self._random[half] = self._random_state()
        self._halves.leave(half)

    def _enter(self, half: int) -> None:
        # Activation checkpointing rewinds the generators for as long as it computes a forward again.
        of_cpu, of_device = self._random[half]
        torch.set_rng_state(of_cpu)
        if of_device is not None:
            self._generators().set_rng_state(of_device, self._device)
        self._halves.enter(half)

    def _random_state(self) -> tuple[Tensor, Tensor | None]:
        device = None if self._device.type == "cpu" else self._generators().get_rng_state(self._device)
        return torch.get_rng_state(), device

    def _generators(self) -> Any:
        return torch.get_device_module(self._device)


_running: _Pair | None = None


def hand_over() -> None:
    """Switch to the other half of an overlapped pair; returns once that half switches back or ends.

    Call it in a forward or backward after starting a collective and before waiting for it. It is a no-op
    outside of an overlapped pair, and after the other half has ended.

    All ranks of an expert-parallel group must call it the same number of times in a forward, and in a
    backward.
    """
    if _running is not None:
        _running.hand_over()


class Overlap:
    """Runs the overlapped pairs of one stage, on `device`, with one thread for their backwards."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backwards: _Queue | None = None

    def run(self, forward: Callable[[], None], backward: Callable[[], None], halves: Halves) -> None:
        """Run a forward and a backward that are independent of each other, by turns.

        The backward begins: its first message follows without computation, and the forward's first segment
        hides it. If the forward began, nothing would hide that one's first message and the backward's last.

        Random numbers that the forward draws are those that it would draw alone.

        Raises:
            BaseException: the first that one of them raises; the other one is then ended.
            RuntimeError: if another pair of this process is running, in another thread.
        """
        global _running
        if _running is not None and _running.error is None:
            raise RuntimeError("a process runs one overlapped pair at a time: step schedules in one thread")
        # A thread has a device and a stream of its own, options of torch.compile, and autocast or none.
        streams = self._device.type != "cpu"
        stream: Any = torch.accelerator.current_stream(self._device) if streams else nullcontext()
        pair = _running = _Pair(stream.device if streams else self._device, halves)
        contexts = (stream, _autocast(self._device.type))
        self._queue().put(partial(_run_backward, pair, contextvars.copy_context(), contexts, backward))
        try:
            try:
                pair.hand_over()
                forward()
            except Exception as error:
                pair.end(_FORWARD, error)
            else:
                pair.end(_FORWARD, None)
            pair.finish()
        except BaseException as error:  # from a signal, at any time: the backward may wait for a lost peer
            pair.abandon(error)
            raise
        _running = None
        if pair.error is not None:
            raise pair.error

    def _queue(self) -> "_Queue":
        if self._backwards is None:
            self._backwards = SimpleQueue()
            # A daemon: one that waits for a lost peer must not keep the process from ending.
            threading.Thread(target=_run_all, args=(self._backwards,), name="backwards", daemon=True).start()
            weakref.finalize(self, self._backwards.put, None).atexit = False
        return self._backwards


_Queue = SimpleQueue[Callable[[], None] | None]


def _run_all(queue: _Queue) -> None:
    while (backward := queue.get()) is not None:
        backward()
        del backward  # and with it the pair, until the next one comes


def _autocast(device_type: str) -> Any:
    """Autocast as it is in this thread, for another one."""
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    dtype, cache = torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled()
    return torch.autocast(device_type, dtype, cache_enabled=cache)


def _run_backward(
    pair: _Pair, context: contextvars.Context, contexts: tuple[Any, Any], backward: Callable[[], None]
) -> None:
    stream, autocast = contexts
    failure: BaseException | None = None
    try:
        pair.start(_BACKWARD)
        if pair.error is None:
            with stream, autocast:
                context.run(backward)
    except BaseException as error:
        failure = error
    pair.end(_BACKWARD, failure)
