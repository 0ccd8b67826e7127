"""The interface of a recorder, which records what a rank does as spans.

The schedule notifies a recorder when each of its actions begins and ends. `titan_async.monitor` has a
recorder that writes files; any object with these two methods works.
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
    """The kind of a span. The numbers are used in event files and never change their meaning."""

    IDLE = 0
    """None of the others, within a step. Never recorded: the time without a span."""
    STEP = 1
    """A training step, which contains the others, except SAVE, VALIDATE and GARBAGE_COLLECTION."""
    FORWARD = 2
    """Of one microbatch, on the last stage with its loss."""
    BACKWARD = 3
    """Of one microbatch, with the recomputation of activation checkpointing."""
    BACKWARD_INPUT = 4
    """The gradient of the input, which the previous stage waits for, under schedules with split backwards."""
    BACKWARD_WEIGHT = 5
    """The gradients of the weights, under schedules with split backwards."""
    RECEIVE = 6
    """Waiting for the input of a forward, or for the gradient that a backward starts from."""
    SEND = 7
    """Starting to send, and waiting for earlier sends if too many are pending."""
    SWAP = 8
    """Activating the other version of the weights."""
    GATHER = 9
    """Reading the weights of a batch, which FSDP begins to gather; this continues in the first forward."""
    REDUCE = 10
    """Reducing the gradient of a batch over the data-parallel ranks, and starting its norm. On an accelerator
    both overlap with forwards and backwards."""
    CLIP = 11
    """Waiting for the norm of the gradient, and scaling by it."""
    OPTIMIZER = 12
    """An optimizer step."""
    DATA = 13
    """Waiting for the data of a batch."""
    SAVE = 14
    """A checkpoint."""
    VALIDATE = 15
    """A validation."""
    GARBAGE_COLLECTION = 16
    """Of Python, which torchtitan calls before every `training.gc_freq`-th step. Not in files of format 1."""
    OVERLAP = 17
    """An overlapped pair: a forward and a backward that are computed together, each during the other's
    all-to-alls. Batch, microbatch and version are those of the forward. Not in files of formats 1 and 2."""


BACKWARD_KINDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
"""Backwards that are computed alone, whole or split."""

FORWARD_KINDS = (Kind.FORWARD, Kind.OVERLAP)
"""Kinds that contain a forward."""

GRADIENT_KINDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.OVERLAP)
"""Kinds that receive a gradient from the next stage, and send one to the previous stage."""

RELEASING_KINDS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT, Kind.OVERLAP)
"""Kinds after which the activations of a microbatch are freed."""

COMPUTE_KINDS = (Kind.FORWARD, *BACKWARD_KINDS, Kind.OVERLAP)
"""Kinds in which a stage is busy."""


class Recorder(Protocol):
    """Records what a rank does. Spans may be nested and do not overlap otherwise."""

    def begin(
        self,
        kind: Kind,
        stage: int,
        batch: int | None = None,
        microbatch: int | None = None,
        version: int | None = None,
    ) -> None:
        """Begin a span.

        Args:
            kind: of the span.
            stage: the stage's index.
            batch: the batch's number since the schedule was created.
            microbatch: of that batch, if the span belongs to one.
            version: number of updates since then of the weights in use; -1 if older weights than the module's
                were loaded into the schedule at the start.
        """

    def end(self) -> None:
        """End the innermost open span."""


class NoRecorder:
    """Records nothing."""

    def begin(self, *about: Any, **more: Any) -> None:
        """See `Recorder`."""

    def end(self) -> None:
        """See `Recorder`."""
