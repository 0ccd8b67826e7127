"""One colour for each kind of span, the same in every picture, and told apart by those who see few colours.

The kinds of compute, waiting and idling differ clearly under each form of colour blindness. Waiting is grey,
so that work stands out.
"""

from titan_async.pipelining.recording import Kind

__all__ = ["COLOURS", "NAMES", "RUN_COLOURS", "mixed"]

COLOURS: dict[Kind, str] = {
    Kind.IDLE: "#ffffff",
    Kind.STEP: "#000000",
    Kind.FORWARD: "#5b9bd5",
    Kind.BACKWARD: "#e69f00",
    Kind.BACKWARD_INPUT: "#d55e00",
    Kind.BACKWARD_WEIGHT: "#1b7f5c",
    Kind.RECEIVE: "#d0d0d0",
    Kind.SEND: "#8c8c8c",
    Kind.SWAP: "#f0e442",
    Kind.GATHER: "#aa4499",
    Kind.REDUCE: "#ddaacc",
    Kind.CLIP: "#999933",
    Kind.OPTIMIZER: "#661144",
    Kind.DATA: "#c9b79c",
    Kind.SAVE: "#555555",
    Kind.VALIDATE: "#bfa5d9",
    Kind.GARBAGE_COLLECTION: "#7f3b08",
    Kind.OVERLAP: "#7048c8",
}
"""As #rrggbb."""

NAMES: dict[Kind, str] = {kind: kind.name.lower().replace("_", " ") for kind in Kind} | {
    Kind.BACKWARD_INPUT: "backward, input half",
    Kind.BACKWARD_WEIGHT: "backward, weight half",
    Kind.RECEIVE: "wait for a message",
    Kind.GATHER: "gather weights",
    Kind.REDUCE: "reduce gradient",
    Kind.SWAP: "swap weights",
    Kind.DATA: "wait for data",
    Kind.OVERLAP: "overlapped pair",
}
"""What a legend calls them."""

RUN_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999933")
"""For curves side by side; they start over after the last."""


def mixed(colour: str, other: str, share: float) -> str:
    """`colour` with that share of `other` in it, from 0 to 1."""
    parts = [
        round((1 - share) * int(colour[i : i + 2], 16) + share * int(other[i : i + 2], 16)) for i in (1, 3, 5)
    ]
    return "#" + "".join(f"{part:02x}" for part in parts)
