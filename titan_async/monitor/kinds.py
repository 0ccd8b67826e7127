"""How each kind of span is drawn and named: one table for pictures, the live view and its messages.

The colours of compute, waiting and idling differ clearly under each form of colour blindness. Waiting is
grey, so that work stands out.
"""

from enum import IntEnum
from typing import NamedTuple

from titan_async.pipelining.recording import Kind

__all__ = ["KINDS", "Activity", "KindInfo"]


class Activity(IntEnum):
    """What a cell of the live view's strip shows."""

    WAIT = 0
    """Also for the stage's neighbours on the same rank."""
    FORWARD = 1
    BACKWARD = 2
    UPDATE = 3
    """The optimizer, and what is done with gradients and weights around it."""
    PAIR = 4
    """A forward and a backward, overlapped."""


class KindInfo(NamedTuple):
    """What there is to say of a kind."""

    colour: str
    """As #rrggbb."""
    name: str
    """In the legend of a picture."""
    now: str = ""
    """In the live view's column of what a stage does."""
    sentence: str = "is in {which}"
    """The rest of a sentence that begins with the stage; `which` is a step or a microbatch of it."""
    activity: Activity = Activity.WAIT
    """In the live view's strip."""


KINDS: dict[Kind, KindInfo] = {
    Kind.IDLE: KindInfo("#ffffff", "idle"),
    Kind.STEP: KindInfo("#000000", "step"),
    Kind.FORWARD: KindInfo(
        "#5b9bd5", "forward", "forward", "computes the forward of {which}", Activity.FORWARD
    ),
    Kind.BACKWARD: KindInfo(
        "#e69f00", "backward", "backward", "computes the backward of {which}", Activity.BACKWARD
    ),
    Kind.BACKWARD_INPUT: KindInfo(
        "#d55e00", "backward, input half", "backward", "computes the backward of {which}", Activity.BACKWARD
    ),
    Kind.BACKWARD_WEIGHT: KindInfo(
        "#1b7f5c", "backward, weight half", "weights", "computes the weights' gradients of {which}",
        Activity.BACKWARD,
    ),
    # Whose message it is about depends on what the stage holds: see `titan_async.monitor.stalls.describe`.
    Kind.RECEIVE: KindInfo("#d0d0d0", "wait for a message", "waits"),
    Kind.SEND: KindInfo("#8c8c8c", "send", "sends"),
    Kind.SWAP: KindInfo(
        "#f0e442", "swap weights", "swaps", "puts the weights of {which} in place", Activity.UPDATE
    ),
    Kind.GATHER: KindInfo(
        "#aa4499", "gather weights", "gathers", "waits for the other copies' weights of {which}",
        Activity.UPDATE,
    ),
    Kind.REDUCE: KindInfo(
        "#ddaacc", "reduce gradient", "reduces", "waits for the other copies' gradients of {which}",
        Activity.UPDATE,
    ),
    Kind.CLIP: KindInfo(
        "#999933", "clip", "clips", "waits for the gradient's norm of {which} from all stages"
    ),
    Kind.OPTIMIZER: KindInfo(
        "#661144", "optimizer", "update", "is in the update of {which}", Activity.UPDATE
    ),
    Kind.DATA: KindInfo("#c9b79c", "wait for data", "data", "waits for the texts of {which}"),
    Kind.SAVE: KindInfo("#555555", "save", "saves", "saves a checkpoint"),
    Kind.VALIDATE: KindInfo("#bfa5d9", "validate", "validates", "validates"),
    Kind.GARBAGE_COLLECTION: KindInfo(
        "#7f3b08", "garbage collection", "collects", "collects garbage before {which}"
    ),
    Kind.OVERLAP: KindInfo(
        "#7048c8", "overlapped pair", "pair", "computes the forward of {which} in an overlapped pair",
        Activity.PAIR,
    ),
}  # fmt: skip
