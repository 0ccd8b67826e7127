"""One stage at work: runs instructions, each with the weights and buffers that its batch reads."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.pipelining.stage import _PipelineStageBase

from titan_async.local_tensors import local_part
from titan_async.pipelining._torch_internals import (
    allocate_buffers,
    expected_outputs,
    gradients_to_send,
    outputs_to_send,
    prepare_buffers,
    release_buffers,
)
from titan_async.pipelining.actions import (
    EARLY,
    Action,
    Instruction,
    evaluation_program,
    in_flight,
    slots,
)
from titan_async.pipelining.overlap import Overlap
from titan_async.pipelining.p2p_channels import Messages, most_pending
from titan_async.pipelining.recording import Kind, NoRecorder, Recorder
from titan_async.pipelining.versions import Versions

__all__ = ["Batch", "Execution", "Forward"]

Forward = Callable[[int, int], Callable[[], None]]
"""Runs the forward of a microbatch in a slot; what it returns computes the loss, where there is one."""

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
    """What a batch needs until its last backward."""

    number: int  # since the schedule was made
    version: int  # of the weights and buffers that it uses
    updates: int  # gradients that had been delivered when these weights were made
    losses: list[Tensor]  # one a microbatch, on the last stage


class Execution:
    """Runs what one stage computes, sends and receives.

    Args:
        stage: the stage of this rank.
        lookahead: see `ScheduleAsync2BW`.
        early_receives: likewise.
        overlap: likewise.
    """

    def __init__(
        self, stage: _PipelineStageBase, lookahead: int, early_receives: bool | None, overlap: bool
    ) -> None:
        self._stage = stage
        self._lookahead, self._early_receives = lookahead, early_receives
        self._tail = in_flight(stage.stage_index, stage.num_stages, lookahead, overlap)
        self._overlap = Overlap(stage.device) if overlap else None
        self._slots = 0
        self.early = EARLY  # which receives are, once opened
        self._messages = Messages(stage)
        self._outgoing: dict[str, list[Tensor]] = {}  # of what was computed last, by kind
        self._n_microbatches = 0
        self._expected: list[tuple[torch.Size, torch.dtype]] = []  # outputs, once opened
        self.recorder: Recorder = NoRecorder()

    def open(self, n_microbatches: int) -> None:
        """Get ready for batches of this many microbatches, on a stage that torch has initialized."""
        self._n_microbatches = n_microbatches
        self._messages.open()
        self.early = self._messages.early(self._early_receives, self._lookahead)
        shape = self._stage.stage_index, self._stage.num_stages
        self._slots = slots(*shape, self._lookahead, self.early, self._overlap is not None)
        prepare_buffers(self._stage, self._slots)
        self._expected = expected_outputs(self._stage)

    def close(self) -> None:
        """Wait until everything that was sent has been taken. Nothing may be in flight."""
        self._messages.close()

    def begin(self, program: list[Instruction]) -> list[Instruction]:
        """Post the receive that a program begins with, and return the rest of it.

        What comes next may wait for the device, and the stage before for its send.
        """
        if program and program[0].kind == "receive":
            self._receive(program[0].action)
            return program[1:]
        return program

    def train(
        self,
        program: list[Instruction],
        batches: Mapping[int, Batch],
        versions: Versions,
        finish: Callable[[int], None],
        forward: Forward | None,
    ) -> None:
        """Run a step's or a drain's instructions.

        Args:
            program: the instructions.
            batches: those that occur in it, by the program's numbers.
            versions: of the module.
            finish: is called where the stage's gradient of a batch is complete, with its number.
            forward: of the program's newest batch; a drain has none.
        """
        shown: int | None = None
        with versions.running():
            for kind, action, beside in _undisturbed(program, versions):
                if kind == "receive":
                    self._receive(action)
                    continue
                batch = batches[action.batch]
                # A pair waits for its backward's message before its forward has gathered another version.
                waits = kind == "wait" and not versions.is_gathering
                if (waits or kind in ("compute", "finish")) and batch.version != shown:
                    # Before backwards too: activation checkpointing computes the forward once more. And
                    # before the wait for a message, where it takes no time.
                    self._begin(Kind.SWAP, action, batch)
                    versions.show(batch.version)
                    self.recorder.end()
                    shown = batch.version
                self._begin(Kind.OVERLAP if beside else _KINDS[kind, action.kind], action, batch)
                if kind == "wait":
                    self._messages.wait(action)
                elif beside is not None:
                    assert forward is not None
                    self._compute_pair(action, beside, batches, versions, forward)
                elif kind == "compute":
                    self._compute(action, batch, forward)
                elif kind == "send":
                    self._send(action, most_pending(self._tail))
                else:
                    finish(action.batch)
                self.recorder.end()

    def evaluate(self, forward: Forward) -> None:
        """Run one batch of forwards, and close."""
        stage = self._stage
        program = evaluation_program(stage.stage_index, stage.num_stages, self._n_microbatches, self.early)
        for kind, action, _ in program:
            if kind == "receive":
                self._receive(action)
            elif kind == "wait":
                self._messages.wait(action)
            elif kind == "compute":
                self._compute_forward(action, forward)
            else:
                self._send(action, max(self._tail, 1))
        stage.fwd_cache.clear()
        self.close()

    def _begin(self, kind: Kind, action: Action, batch: Batch) -> None:
        microbatch = None if kind is Kind.REDUCE else action.microbatch
        self.recorder.begin(kind, self._stage.stage_index, batch.number, microbatch, batch.updates)

    def _receive(self, action: Action) -> None:
        buffers = allocate_buffers(self._received(action), self._stage.device)
        self._messages.receive(action, buffers)

    def _send(self, action: Action, most: int) -> None:
        self._messages.send(action, self._outgoing.pop(action.kind), most)

    def _prepare_send(self, action: Action) -> None:
        """Allocate what the send needs: after a late receive nothing may wait for the device until it."""
        to_send = outputs_to_send if action.kind == "F" else gradients_to_send
        self._outgoing[action.kind] = to_send(self._stage, self._slot(action))

    def _compute(self, action: Action, batch: Batch, forward: Forward | None) -> None:
        if action.kind == "F":
            assert forward is not None
            self._compute_forward(action, forward)
        else:
            loss = batch.losses[action.microbatch] if self._stage.is_last else None
            self._stage.backward_one_chunk(self._slot(action), loss)
            if loss is not None:  # its graph is used up, and would keep the input
                batch.losses[action.microbatch] = loss.detach()
            release_buffers(self._received(action))
            if not self._stage.is_first:
                self._prepare_send(action)

    def _compute_pair(
        self,
        action: Action,
        beside: Action,
        batches: Mapping[int, Batch],
        versions: Versions,
        forward: Forward,
    ) -> None:
        assert self._overlap is not None
        of_forward, of_backward = batches[action.batch], batches[beside.batch]
        losses: list[Callable[[], None]] = []
        self._overlap.run(
            lambda: losses.append(forward(action.microbatch, self._slot(action))),
            lambda: self._compute(beside, of_backward, None),
            versions.halves(of_forward.version, of_backward.version),
        )
        # A loss that runs backwards, as one in chunks does, would wait on accelerators for the thread in
        # which the pair's backward has stopped.
        losses[0]()
        self._finish_forward(action)

    def _compute_forward(self, action: Action, forward: Forward) -> None:
        compute_loss = forward(action.microbatch, self._slot(action))
        compute_loss()
        self._finish_forward(action)

    def _finish_forward(self, action: Action) -> None:
        release_buffers(self._received(action))
        if not self._stage.is_last:
            self._check_outputs(action)
            self._prepare_send(action)

    def _check_outputs(self, action: Action) -> None:
        """Refuse what the next stage has no buffers for: gloo would abort the process that receives it."""
        outputs, _ = self._stage.fwd_cache[self._slot(action)]
        shapes = [(local_part(output).shape, output.dtype) for output in outputs]
        if shapes != self._expected:
            raise ValueError(
                f"stage {self._stage.stage_index} returned {_described(shapes)} for microbatch "
                f"{action.microbatch}, but the pipeline was made for {_described(self._expected)}: return "
                "the same for all microbatches, and drain() before a batch whose outputs have other shapes"
            )

    def _received(self, action: Action) -> tuple:
        slot = self._slot(action)
        if action.kind == "F":
            return self._stage.args_recv_info[slot]
        return self._stage.grad_recv_info[slot]

    def _slot(self, action: Action) -> int:
        return (action.batch * self._n_microbatches + action.microbatch) % self._slots


def _undisturbed(program: list[Instruction], versions: Versions) -> Iterator[Instruction]:
    """The instructions, but for a forward that gathers its weights, which is computed before its backward."""
    for instruction in program:
        if instruction.beside is not None and versions.is_gathering:
            yield instruction._replace(beside=None)
            yield instruction._replace(action=instruction.beside, beside=None)
        else:
            yield instruction


def _described(tensors: list[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"a tensor of shape {tuple(shape)} and {dtype}" for shape, dtype in tensors) or "nothing"
