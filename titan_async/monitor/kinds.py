"""Colours and texts of each kind of span, for plots, the live view and its messages.

The colours of computing, waiting and idling are distinct under each form of colour blindness.
"""

from enum import IntEnum
from typing import NamedTuple

from titan_async.pipelining.recording import Kind

__all__ = ["KINDS", "Activity", "KindInfo"]


class Activity(IntEnum):
    """The activity in a cell of the live view's timeline."""

    WAIT = 0
    """Includes the time of other stages on the same rank."""
    FORWARD = 1
    BACKWARD = 2
    UPDATE = 3
    """The optimizer, and work on gradients and weights around it."""
    PAIR = 4
    """An overlapped forward and backward."""


class KindInfo(NamedTuple):
    """Colour and texts of a kind of span."""

    colour: str
    """As #rrggbb."""
    name: str
    """In the legend of a plot."""
    now: str = ""
    """In the live view's column of current activities."""
    sentence: str = "is in {which}"
    """Continues a sentence that begins with the stage; `which` is a step or a microbatch of it."""
    activity: Activity = Activity.WAIT
    """In the live view's timeline."""


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
    # The text for a message depends on the microbatches in flight: see `titan_async.monitor.stalls.describe`.
    Kind.RECEIVE: KindInfo("#d0d0d0", "wait for a message", "waits"),
    Kind.SEND: KindInfo("#8c8c8c", "send", "sends"),
    Kind.SWAP: KindInfo(
        "#f0e442", "swap weights", "swaps", "activates the weights of {which}", Activity.UPDATE
    ),
    Kind.GATHER: KindInfo(
        "#aa4499", "gather weights", "gathers", "waits for the other replicas' weights of {which}",
        Activity.UPDATE,
    ),
    Kind.REDUCE: KindInfo(
        "#ddaacc", "reduce gradient", "reduces", "waits for the other replicas' gradients of {which}",
        Activity.UPDATE,
    ),
    Kind.CLIP: KindInfo(
        "#999933", "clip", "clips", "waits for the gradient norm of {which} from all stages"
    ),
    Kind.OPTIMIZER: KindInfo(
        "#661144", "optimizer", "update", "is in the update of {which}", Activity.UPDATE
    ),
    Kind.DATA: KindInfo("#c9b79c", "wait for data", "data", "waits for the data of {which}"),
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
