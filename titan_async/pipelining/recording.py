"""What a rank does, one span after another, for whoever wants to watch: the interface of a recorder.

The schedule tells a recorder when each of its actions begins and ends. `titan_async.monitor` has one that
writes files; any object with these two methods will do.
"""

from enum import IntEnum
from typing import Any, Protocol

__all__ = [
    "BACKWARD_KINDS",
    "COMPUTE_KINDS",
    "FORWARD_KINDS",
    "GRADIENT_KINDS",
    "RELEASING_KINDS",
    "Kind",
    "NoRecorder",
    "Recorder",
]


class Kind(IntEnum):
    """What a span is about. The numbers are those of the event files and never change their meaning."""

    IDLE = 0
    """Nothing of the others, within a step. Never recorded: it is what spans leave over."""
    STEP = 1
    """A training step, in which the others lie, but for SAVE, VALIDATE and GARBAGE_COLLECTION."""
    FORWARD = 2
    """Of one microbatch, on the last stage with its loss."""
    BACKWARD = 3
    """Of one microbatch, with what activation checkpointing computes once more."""
    BACKWARD_INPUT = 4
    """The half of a backward that the stage before waits for, where schedules take it apart."""
    BACKWARD_WEIGHT = 5
    """The other half."""
    RECEIVE = 6
    """Waiting for the input of a forward, or for the gradient that a backward starts from."""
    SEND = 7
    """Starting to send, and waiting for earlier messages if too many are on their way."""
    SWAP = 8
    """Putting the other version of the weights in place."""
    GATHER = 9
    """Reading the weights of a batch, which FSDP begins to gather; it goes on in the first forward."""
    REDUCE = 10
    """Reducing the gradient of a batch over the data-parallel ranks, and starting its norm. On an accelerator
    both go on beside forwards and backwards."""
    CLIP = 11
    """Waiting for the norm of the gradient, and scaling by it."""
    OPTIMIZER = 12
    """An update."""
    DATA = 13
    """Waiting for the texts of a batch."""
    SAVE = 14
    """A checkpoint."""
    VALIDATE = 15
    """A validation."""
    GARBAGE_COLLECTION = 16
    """Python's, which torchtitan calls before every `training.gc_freq`-th step. Not in files of format 1."""
    OVERLAP = 17
    """An overlapped pair: a forward and a backward that are computed together, each while the other waits for
    tokens. Batch, microbatch and version are those of the forward. Not in files of formats 1 and 2."""


BACKWARD_KINDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
"""Backwards that are computed alone, whole or in halves."""

FORWARD_KINDS = (Kind.FORWARD, Kind.OVERLAP)
"""Kinds with a forward in them."""

GRADIENT_KINDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.OVERLAP)
"""Kinds that start from the next stage's gradient, and give the stage before its own."""

RELEASING_KINDS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT, Kind.OVERLAP)
"""Kinds after which nothing of a microbatch is held any more."""

COMPUTE_KINDS = (Kind.FORWARD, *BACKWARD_KINDS, Kind.OVERLAP)
"""The kinds in which a stage is busy."""


class Recorder(Protocol):
    """Is told what a rank does. Spans may lie within each other and do not overlap otherwise."""

    def begin(
        self,
        kind: Kind,
        stage: int,
        batch: int | None = None,
        microbatch: int | None = None,
        version: int | None = None,
    ) -> None:
        """A span begins.

        Args:
            kind: what it is about.
            stage: the stage's index.
            batch: the batch's number since the schedule was made.
            microbatch: of that batch, if the span is about one.
            version: how many updates the weights that it uses have seen since then; -1 if the schedule was
                given older ones than the module's to start from.
        """

    def end(self) -> None:
        """The span that began last, of those that have not ended, ends."""


class NoRecorder:
    """Records nothing."""

    def begin(self, *about: Any, **more: Any) -> None:
        """See `Recorder`."""

    def end(self) -> None:
        """See `Recorder`."""
