"""Executes the instructions of one stage, each with the weights and buffers of its batch."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.pipelining.stage import _PipelineStageBase

from titan_async.local_tensors import local_part
from titan_async.pipelining._torch_internals import (
    allocate_buffers,
    check_wrapper,
    expected_outputs,
    gradients_to_send,
    outputs_to_send,
    prepare_buffers,
    release_buffers,
)
from titan_async.pipelining.actions import (
    ALL_EARLY,
    Action,
    EarlyReceives,
    Instruction,
    drain_program,
    evaluation_program,
    in_flight,
    slots,
    step_program,
)
from titan_async.pipelining.gradient_norm import GradientClipper
from titan_async.pipelining.overlap import Overlap
from titan_async.pipelining.p2p_channels import P2PChannels, max_pending_sends
from titan_async.pipelining.recording import Kind, NoRecorder, Recorder
from titan_async.pipelining.side_stream import SideStream
from titan_async.pipelining.tied_parameters import TiedParameters
from titan_async.pipelining.versions import BatchGrads, Versions

__all__ = ["Batch", "Executor", "Forward"]

Forward = Callable[[int, int], Callable[[], None]]
"""Runs the forward of a microbatch in a slot, and returns a function that computes its loss, if any."""

_KINDS = {
    ("wait", "F"): Kind.RECEIVE,
    ("wait", "B"): Kind.RECEIVE,
    ("compute", "F"): Kind.FORWARD,
    ("compute", "B"): Kind.BACKWARD,
    ("send", "F"): Kind.SEND,
    ("send", "B"): Kind.SEND,
    ("finish", "B"): Kind.REDUCE,
}


class Batch(NamedTuple):
    """State of a batch until its last backward."""

    number: int  # since the schedule was created
    version: int  # of the weights and buffers that it uses
    updates: int  # gradients published before these weights
    losses: list[Tensor]  # one per microbatch, on the last stage


class Executor:
    """Trains and evaluates batches on one stage, and leaves each finished batch's gradient in `.grad`.

    Args:
        stage: the stage of this rank.
        lookahead: see `ScheduleAsync2BW`.
        early_receives: see `ScheduleAsync2BW`.
        overlap: see `ScheduleAsync2BW`.
        tied: the tied parameters of the stage.
        scale_grads: whether to divide gradients by the number of microbatches.
    """

    def __init__(
        self,
        stage: _PipelineStageBase,
        lookahead: int,
        early_receives: bool | None,
        overlap: bool,
        tied: TiedParameters,
        scale_grads: bool,
    ) -> None:
        self._stage = stage
        self._lookahead, self._early_receives = lookahead, early_receives
        self._overlap = Overlap(stage.device) if overlap else None
        # Only the last stage, and without overlap, finishes the backwards of a batch within the batch's step.
        self._in_flight = in_flight(stage.stage_index, stage.num_stages, lookahead, overlap)
        self._channels = P2PChannels(stage)
        self._outgoing: dict[str, list[Tensor]] = {}  # outputs of the last computation, by kind
        self._slots = 0
        self.early = ALL_EARLY  # valid after `open`
        self._n_microbatches = 0
        self._expected: list[tuple[torch.Size, torch.dtype]] = []  # outputs, valid after `open`
        self.recorder: Recorder = NoRecorder()
        self.versions: Versions | None = None  # from the first training batch on
        self.num_batches = 0  # since the pipeline was last empty
        self._drained_batches = 0  # until then
        self._published = 0  # gradients
        self.missing_updates = 0  # of them, those the weights of the next batch lack: 1 after a drain
        self._batches: dict[int, Batch] = {}
        self._finished: dict[int, BatchGrads] = {}  # by batch, until published
        self._side_stream = SideStream(stage.device)  # of reductions, and all that follows until publication
        self.gradient_ready = False
        self.delay = 0
        self._scale_grads = scale_grads
        self.tied = tied
        self.clipper = GradientClipper(stage, tied.exclude_shared)

    def checked_versions(self) -> Versions:
        """The versions of the module, created at the first call.

        Raises:
            RuntimeError, NotImplementedError: if the module has changed, or is not supported.
        """
        if self.versions is None:
            check_wrapper(self._stage.submod)
            self.versions = Versions(self._stage.submod)
            self.tied.locate(self.versions.parameters)
        self.versions.weights.check_unchanged()
        return self.versions

    def open(self, n_microbatches: int) -> None:
        """Prepare for batches of `n_microbatches`, on a stage that torch has initialized."""
        self._n_microbatches = n_microbatches
        self._channels.open()
        self.early = self._channels.early(self._early_receives, self._lookahead)
        position = self._stage.stage_index, self._stage.num_stages
        self._slots = slots(*position, self._lookahead, self.early, self._overlap is not None)
        prepare_buffers(self._stage, self._slots)
        self._expected = expected_outputs(self._stage)

    def forward_of(
        self,
        args: list,
        kwargs: list,
        targets: list | None,
        losses: list[Tensor],
        return_outputs: bool,
        loss_fn: Callable[..., Tensor] | None,
        loss_kwargs: dict[str, Any],
    ) -> Forward:
        """The forward of a batch's microbatches, which appends their losses to `losses` on the last stage."""
        stage = self._stage

        def forward(microbatch: int, slot: int) -> Callable[[], None]:
            output = stage.forward_one_chunk(slot, args[microbatch], kwargs[microbatch], return_outputs)
            if stage.has_backward and self.versions is not None:
                self.versions.weights.finish_gather()

            def compute_loss() -> None:
                if stage.is_last and loss_fn is not None and targets is not None:
                    losses.append(loss_fn(output, targets[microbatch], **loss_kwargs))

            return compute_loss

        return forward

    def train_batch(
        self,
        forward: Forward,
        losses: list[Tensor],
        warmup: Callable[[], None] | None,
        delay_updates: bool,
    ) -> None:
        """Run a step: the forwards of a new batch, and the backwards that are due.

        Args:
            forward: of the new batch.
            losses: filled by `forward` on the last stage.
            warmup: runs a microbatch without messages before the first one, if given.
            delay_updates: see `ScheduleAsync2BW`.
        """
        assert self.versions is not None
        versions, index, stage = self.versions, self.num_batches, self._stage.stage_index
        if not delay_updates:  # a drain or a load may have frozen older weights for this batch
            versions.unfreeze()
            self.missing_updates = 0
        updates, self.missing_updates = self._published - self.missing_updates, 0
        self.recorder.begin(Kind.GATHER, stage, self._drained_batches + index, version=updates)
        batch = Batch(self._drained_batches + index, versions.begin_batch(), updates, losses)
        self._batches[index] = batch
        if not self._in_flight:
            versions.weights.free_other(batch.version)
        self.recorder.end()
        if warmup is not None:
            with versions.warmup(batch.version):
                warmup()
        self._run(step_program(*self._shape, index, *self._order), forward)
        if self._in_flight and delay_updates:
            self.recorder.begin(Kind.SWAP, stage, batch.number, version=updates)
            versions.weights.stash(batch.version)
            self.recorder.end()
        self.num_batches += 1
        self.gradient_ready = False
        if not delay_updates:
            self._finish_in_flight(versions.unfreeze)
        elif index:
            self._publish(index - 1)
            del self._batches[index - 1]

    def drain(self) -> None:
        """Finish what is in flight; the next batch will read the weights as they are now."""
        assert self.versions is not None
        self._finish_in_flight(self.versions.freeze)
        self.missing_updates = 1

    def evaluate(self, forward: Forward) -> None:
        """Run the forwards of one batch on an empty pipeline, and close the channels."""
        stage = self._stage
        program = evaluation_program(stage.stage_index, stage.num_stages, self._n_microbatches, self.early)
        for kind, action, _ in program:
            if kind == "receive":
                self._post_recv(action)
            elif kind == "wait":
                self._channels.wait(action)
            elif kind == "compute":
                self._compute(action, None, forward)
            else:
                self._channels.send(action, self._outgoing.pop(action.kind), max(self._in_flight, 1))
        stage.fwd_cache.clear()
        self._channels.close()

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self._stage.stage_index, self._stage.num_stages, self._n_microbatches

    @property
    def _order(self) -> tuple[int, EarlyReceives, bool]:
        return self._lookahead, self.early, self._overlap is not None

    def _finish_in_flight(self, prepare_next: Callable[[], None]) -> None:
        """Run the remaining backwards of the newest batch, and publish its gradient after `prepare_next`."""
        newest = self.num_batches - 1
        self._run(drain_program(*self._shape, newest, *self._order), None)
        self._channels.close()
        prepare_next()
        self._publish(newest)
        self._drained_batches += self.num_batches
        self.num_batches = 0
        self._batches.clear()

    def _run(self, program: list[Instruction], forward: Forward | None) -> None:
        """Execute the instructions of a step or a drain; `forward` is that of the newest batch."""
        assert self.versions is not None
        if program and program[0].kind == "receive":
            # Before anything that may wait for the device: the previous stage may need it in order to send.
            self._post_recv(program.pop(0).action)
        due = self.num_batches - 1
        if due in self._finished:  # the last stage finished it before the optimizer step
            self._reduce(due)
        versions, active = self.versions, None
        with versions.swapping():
            for kind, action, overlapped in _without_gathering_pairs(program, versions):
                if kind == "receive":
                    self._post_recv(action)
                    continue
                batch = self._batches[action.batch]
                # A pair waits for its backward's input while its forward may still gather another version.
                waits = kind == "wait" and not versions.weights.is_gathering
                if (waits or kind in ("compute", "finish")) and batch.version != active:
                    # Before backwards too, because activation checkpointing recomputes the forward. And
                    # before the wait for a message, where it takes no extra time.
                    self._record(Kind.SWAP, action, batch)
                    versions.activate(batch.version)
                    self.recorder.end()
                    active = batch.version
                self._record(Kind.OVERLAP if overlapped else _KINDS[kind, action.kind], action, batch)
                if kind == "wait":
                    self._channels.wait(action)
                elif overlapped is not None:
                    self._compute_pair(action, overlapped, forward)
                elif kind == "compute":
                    self._compute(action, batch, forward)
                elif kind == "send":
                    outputs = self._outgoing.pop(action.kind)
                    self._channels.send(action, outputs, max_pending_sends(self._in_flight))
                else:
                    self._finish_batch(action.batch)
                self.recorder.end()

    def _record(self, kind: Kind, action: Action, batch: Batch) -> None:
        microbatch = None if kind is Kind.REDUCE else action.microbatch
        self.recorder.begin(kind, self._stage.stage_index, batch.number, microbatch, batch.updates)

    def _post_recv(self, action: Action) -> None:
        self._channels.recv(action, allocate_buffers(self._recv_infos(action), self._stage.device))

    def _compute(self, action: Action, batch: Batch | None, forward: Forward | None) -> None:
        if action.kind == "F":
            assert forward is not None
            forward(action.microbatch, self._slot(action))()
            self._finish_forward(action)
            return
        assert batch is not None
        loss = batch.losses[action.microbatch] if self._stage.is_last else None
        self._stage.backward_one_chunk(self._slot(action), loss)
        if loss is not None:  # its graph is freed, but would keep the input alive
            batch.losses[action.microbatch] = loss.detach()
        release_buffers(self._recv_infos(action))
        if not self._stage.is_first:
            self._outgoing["B"] = gradients_to_send(self._stage, self._slot(action))

    def _compute_pair(self, action: Action, overlapped: Action, forward: Forward | None) -> None:
        assert self._overlap is not None and self.versions is not None and forward is not None
        of_forward, of_backward = self._batches[action.batch], self._batches[overlapped.batch]
        losses: list[Callable[[], None]] = []
        self._overlap.run(
            lambda: losses.append(forward(action.microbatch, self._slot(action))),
            lambda: self._compute(overlapped, of_backward, None),
            self.versions.pair(of_forward.version, of_backward.version),
        )
        # A loss that runs backwards itself, as a chunked loss does, would wait on accelerators for the
        # autograd thread in which the pair's backward is suspended.
        losses[0]()
        self._finish_forward(action)

    def _finish_forward(self, action: Action) -> None:
        release_buffers(self._recv_infos(action))
        if not self._stage.is_last:
            self._check_outputs(action)
            # Allocated here: after a late receive nothing may wait for the device until the send.
            self._outgoing["F"] = outputs_to_send(self._stage, self._slot(action))

    def _check_outputs(self, action: Action) -> None:
        """Refuse outputs that do not fit into the next stage's buffers: gloo would abort that process."""
        outputs, _ = self._stage.fwd_cache[self._slot(action)]
        shapes = [(local_part(output).shape, output.dtype) for output in outputs]
        if shapes != self._expected:
            raise ValueError(
                f"stage {self._stage.stage_index} returned {_described(shapes)} for microbatch "
                f"{action.microbatch}, but the pipeline expects {_described(self._expected)}: return "
                "the same for all microbatches, and drain() before a batch whose outputs have other shapes"
            )

    def _recv_infos(self, action: Action) -> tuple:
        slot = self._slot(action)
        if action.kind == "F":
            return self._stage.args_recv_info[slot]
        return self._stage.grad_recv_info[slot]

    def _slot(self, action: Action) -> int:
        return (action.batch * self._n_microbatches + action.microbatch) % self._slots

    def _finish_batch(self, index: int) -> None:
        """Take the gradient of a batch after its last backward."""
        assert self.versions is not None
        finished = self.versions.pop_grads(self._batches[index].version, self._side_stream)
        with self._side_stream.running():
            present = [part for part in map(local_part, finished.grads) if part is not None]
            if self._scale_grads and present:
                torch._foreach_div_(present, self._n_microbatches)
        self._finished[index] = finished
        if index < self.num_batches:
            self._reduce(index)

    def _reduce(self, index: int) -> None:
        """Start the all-reduces of tied parameters and of the norm, once `.grad` will no longer change."""
        assert self.versions is not None
        finished = self._finished[index]
        with self._side_stream.running():
            self.tied.start(index, finished.grads)
            self.versions.accumulate(finished)
            if self._stage.is_first:  # the last stage, which is a batch ahead, would have to wait here
                self.tied.finish(index, finished.grads)
            self.clipper.start(self.versions.accumulated_grads(finished))
        self._side_stream.record(index)

    def _publish(self, index: int) -> None:
        """Put the gradient of a finished batch into `.grad`."""
        assert self.versions is not None
        finished = self._finished.pop(index)
        self._side_stream.wait(index)
        if not self._stage.is_first:
            self.tied.finish(index, finished.grads)
        self.versions.publish_grads(finished)
        self.clipper.publish(self.versions.grads())
        self.delay = self._published - self._batches[index].updates
        self._published += 1
        self.gradient_ready = True


def _without_gathering_pairs(program: list[Instruction], versions: Versions) -> Iterator[Instruction]:
    """The instructions, without pairs whose forward gathers its weights: it runs before the backward."""
    for instruction in program:
        if instruction.overlapped is not None and versions.weights.is_gathering:
            yield instruction._replace(overlapped=None)
            yield instruction._replace(action=instruction.overlapped, overlapped=None)
        else:
            yield instruction


def _described(tensors: list[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"a tensor of shape {tuple(shape)} and {dtype}" for shape, dtype in tensors) or "nothing"
