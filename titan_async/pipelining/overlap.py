"""Overlapped pairs: a forward and a backward take turns, each during the other's all-to-alls between experts.

In a mixture of experts a forward stops at every dispatch and combine until its tokens have arrived, and so
does a backward. `ScheduleAsync2BW` always has an independent forward and backward to run, so one of them
computes during the other's communication, as in DualPipe (arXiv 2412.19437, section 3.2.1).

The two halves run in two threads, only one of which runs at a time: `hand_over` suspends a half and resumes
the other. So the order of operations on each rank is fixed, and ranks that exchange tokens meet in the same
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
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_async.pipelining._torch_internals import process_group

__all__ = ["Overlap", "PairState", "all_to_all_single", "hand_over"]

_FORWARD, _BACKWARD = 0, 1


class PairState(Protocol):
    """State of the module that differs between the forward (0) and the backward (1) of a pair."""

    def leave(self, half: int) -> None:
        """The running half is suspended."""

    def enter(self, half: int) -> None:
        """The half resumes."""


class _OtherHalfError(RuntimeError):
    """Ends a half whose other half has failed."""


class _Pair:
    """A running forward and backward. The thread that creates it runs the forward."""

    def __init__(self, device: torch.device, state: PairState) -> None:
        self.error: BaseException | None = None  # the first one
        self._device = device
        self._state = state
        self._thread = threading.get_ident()
        # A half waits for its turn to acquire its lock.
        self._turns = (threading.Lock(), threading.Lock())
        for turn in self._turns:
            turn.acquire()
        self._done = [False, False]
        self._rng_states: list[tuple[Tensor, Tensor | None]] = [self._rng_state()] * 2

    def hand_over(self) -> None:
        # On accelerators autograd runs backwards in its own threads.
        half = _FORWARD if threading.get_ident() == self._thread else _BACKWARD
        if self._done[half]:
            return
        self._raise_if_failed()
        if self._done[1 - half]:
            return
        self._leave(half)
        self._turns[1 - half].release()
        self._wait_for_turn(half)
        self._enter(half)
        self._raise_if_failed()

    def start(self, half: int) -> None:
        """Wait for the first turn of a half."""
        self._wait_for_turn(half)
        self._enter(half)

    def end(self, half: int, error: BaseException | None) -> None:
        """Mark the running half as done."""
        self.error = self.error or error
        try:
            self._leave(half)
        finally:
            self._done[half] = True
            self._turns[1 - half].release()

    def finish(self) -> None:
        """Wait for the end of the backward, after the forward is done."""
        if not self._done[_BACKWARD]:
            self._wait_for_turn(_FORWARD)
        self._enter(_FORWARD)

    def abort(self, error: BaseException) -> None:
        """End the forward, whichever half is running; the backward ends at its next `hand_over`."""
        self.error = self.error or error
        self._done[_FORWARD] = True
        if self._turns[_BACKWARD].locked():
            self._turns[_BACKWARD].release()

    def _wait_for_turn(self, half: int) -> None:
        # A signal that arrives just before `acquire` does not interrupt it.
        while not self._turns[half].acquire(timeout=1.0):
            pass

    def _raise_if_failed(self) -> None:
        if self.error is not None:
            raise _OtherHalfError("the other half of an overlapped pair has failed")

    def _leave(self, half: int) -> None:
        self._rng_states[half] = self._rng_state()
        self._state.leave(half)

    def _enter(self, half: int) -> None:
        # Activation checkpointing rewinds the generators during a recomputation.
        of_cpu, of_device = self._rng_states[half]
        torch.set_rng_state(of_cpu)
        if of_device is not None:
            torch.get_device_module(self._device).set_rng_state(of_device, self._device)
        self._state.enter(half)

    def _rng_state(self) -> tuple[Tensor, Tensor | None]:
        if self._device.type == "cpu":
            return torch.get_rng_state(), None
        return torch.get_rng_state(), torch.get_device_module(self._device).get_rng_state(self._device)


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


def all_to_all_single(
    input: Tensor,
    output_split_sizes: list[int],
    input_split_sizes: list[int],
    group: dist.ProcessGroup | DeviceMesh,
) -> Tensor:
    """Scatter `input` along dimension 0 to all ranks of `group`, and gather what they scatter.

    During an overlapped pair the other half runs while the data is in flight (`hand_over`). Differentiable,
    and a single operator for `torch.compile` and selective activation checkpointing:
    `torch.ops.titan_async.all_to_all_single`. As with a synchronous collective, the output may be used when
    this returns; on accelerators the current stream waits for it.

    Args:
        input: tensor to scatter, of at least one dimension; the slices are in the order of ranks.
        output_split_sizes: sizes along dimension 0 to receive from each rank.
        input_split_sizes: sizes along dimension 0 to send to each rank.
        group: the process group to work on, or a one-dimensional mesh.

    Returns:
        The concatenated slices from all ranks, of the dtype of `input`.
    """
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    return _all_to_all_single(input, output_split_sizes, input_split_sizes, group.group_name)


@torch.library.custom_op("titan_async::all_to_all_single", mutates_args=())
def _all_to_all_single(
    input: Tensor, output_split_sizes: list[int], input_split_sizes: list[int], group_name: str
) -> Tensor:
    output = input.new_empty(sum(output_split_sizes), *input.shape[1:])
    # Both tensors live until the wait: the communication may use its own stream.
    sent = input.contiguous()
    work = dist.all_to_all_single(
        output, sent, output_split_sizes, input_split_sizes, group=process_group(group_name), async_op=True
    )
    assert work is not None, "this rank is not a member of the group"
    hand_over()
    work.wait()
    return output


@_all_to_all_single.register_fake
def _(input: Tensor, output_split_sizes: list[int], input_split_sizes: list[int], group_name: str) -> Tensor:
    return input.new_empty(sum(output_split_sizes), *input.shape[1:])


def _save_splits(ctx: Any, inputs: tuple[Tensor, list[int], list[int], str], output: Tensor) -> None:
    _, *ctx.splits, ctx.group_name = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    output_split_sizes, input_split_sizes = ctx.splits
    return _all_to_all_single(grad, input_split_sizes, output_split_sizes, ctx.group_name), None, None, None


_all_to_all_single.register_autograd(_backward, setup_context=_save_splits)


class Overlap:
    """Runs the overlapped pairs of one stage, on `device`, with one thread for their backwards."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backwards: _Queue | None = None

    def run(self, forward: Callable[[], None], backward: Callable[[], None], state: PairState) -> None:
        """Run a forward and a backward that are independent of each other, taking turns.

        The backward has the first turn: it starts its first all-to-all without any computation, and the first
        segment of the forward overlaps with it. With the forward first, nothing would overlap with its first
        all-to-all and with the backward's last one.

        The forward draws the same random numbers as it would alone.

        Raises:
            BaseException: the first that one of them raises; the other one is then ended.
            RuntimeError: if another pair of this process is running, in another thread.
        """
        global _running
        if _running is not None and _running.error is None:
            raise RuntimeError("a process runs one overlapped pair at a time: step schedules in one thread")
        # Current device and stream, options of torch.compile, and autocast are thread-local.
        streams = self._device.type != "cpu"
        stream: Any = torch.accelerator.current_stream(self._device) if streams else nullcontext()
        pair = _running = _Pair(stream.device if streams else self._device, state)
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
        except BaseException as error:  # from a signal, at any time: the backward may wait for a lost rank
            pair.abort(error)
            raise
        _running = None
        if pair.error is not None:
            raise pair.error

    def _queue(self) -> "_Queue":
        if self._backwards is None:
            self._backwards = SimpleQueue()
            # A daemon: a thread that waits for a lost rank must not prevent the process from exiting.
            threading.Thread(target=_run_all, args=(self._backwards,), name="backwards", daemon=True).start()
            weakref.finalize(self, self._backwards.put, None).atexit = False
        return self._backwards


_Queue = SimpleQueue[Callable[[], None] | None]


def _run_all(queue: _Queue) -> None:
    while (backward := queue.get()) is not None:
        backward()
        del backward  # and with it the pair, until the next one


def _autocast(device_type: str) -> Any:
    """The autocast context of this thread, for another thread."""
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
