"""The formulas of error feedback, on lists of local tensors.

With D_b the displacement that an optimizer proposes from the gradient g_b of batch b, and strength s:

    level "update":    D'_b = D_b + s (D_b - D_{b-1})
    level "gradient":  g'_b = g_b + s (g_b - g_{b-1})

See `titan_async.optim.error_feedback` for what they are for.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from titan_async.optim.elementwise import tiles
from titan_async.optim.tensors import at_least_float32

__all__ = [
    "LEVELS",
    "checked_level",
    "checked_strength",
    "correct_gradients_",
    "correct_updates_",
    "history_key",
    "snapshot",
]

LEVELS = ("update", "gradient")


def history_key(level: str) -> str:
    """The key of a parameter's history in the optimizer's state; with ``_valid`` behind, of its flag.

    It names the level, because the history of one makes no sense at the other.
    """
    return f"error_feedback_{level}"


def checked_strength(strength: float) -> float:
    """``strength``, if it is one.

    Raises:
        ValueError: it is negative or not finite.
    """
    if not (math.isfinite(strength) and strength >= 0):
        raise ValueError(
            f"the strength of error feedback must be a finite number, zero or more, not {strength!r}; "
            f"1 is the full correction, 0 none"
        )
    return float(strength)


def checked_level(level: str) -> str:
    """``level``, if it is one.

    Raises:
        ValueError: it is neither of `LEVELS`.
    """
    if level not in LEVELS:
        choices = ", ".join(repr(choice) for choice in LEVELS)
        raise ValueError(f"unknown level {level!r} of error feedback: choose {choices}")
    return level


def snapshot(weights: Sequence[Tensor], room: Tensor | None = None) -> list[Tensor]:
    """What `correct_updates_` needs from before the update: the weights, with the sign turned.

    Args:
        room: memory to use, flat, of the dtype of the snapshots.
    """
    # So that adding the new weights gives the displacement in a single pass.
    if room is None:
        return [torch.neg(weight.to(at_least_float32(weight.dtype))) for weight in weights]
    sizes = [weight.numel() for weight in weights]
    parts = room[: sum(sizes)].split(sizes)
    return [torch.neg(w, out=part.view(w.shape)) for w, part in zip(weights, parts, strict=True)]


def correct_updates_(
    weights: list[Tensor],
    before: list[Tensor],
    history: list[Tensor],
    valid: Sequence[bool],
    strength: float,
    skip: Tensor | None = None,
) -> None:
    """Correct an update that has been applied, and remember it.

    Args:
        weights: after the update; corrected in place where the history is valid.
        before: their `snapshot`; used up.
        history: the displacements of the last update; becomes those of this one, before correction.
        valid: for each, whether there was a last update.
        strength: s of the formulas.
        skip: a scalar on the device: whether there was no update after all. Weights and histories, all of
            them valid, then keep their bits.
    """
    if weights and weights[0].device.type == "cpu":
        # There lists of tensors bring nothing, and each is worked on piece by piece.
        for *tensors, is_valid in zip(weights, before, history, valid, strict=True):
            for weight, displacement, old in tiles(*tensors):
                _correct_([weight], [displacement], [old], [is_valid], strength, skip)
    else:
        _correct_(weights, before, history, valid, strength, skip)


def _correct_(
    weights: list[Tensor],
    displacement: list[Tensor],
    history: list[Tensor],
    valid: Sequence[bool],
    strength: float,
    skip: Tensor | None,
) -> None:
    torch._foreach_add_(displacement, weights)
    if skip is not None:
        # Then the change is zero below, and -strength times it is -0.0, which leaves every bit of a weight.
        for each, old in zip(displacement, history, strict=True):
            torch.where(skip, old.to(each.dtype), each, out=each)
    chosen = [index for index, is_valid in enumerate(valid) if is_valid and strength != 0]
    if chosen:
        # A history of the displacement's dtype holds the difference itself: no third buffer.
        change = [
            history[i].sub_(displacement[i])
            if history[i].dtype == displacement[i].dtype
            else history[i] - displacement[i]
            for i in chosen
        ]
        torch._foreach_add_([weights[i] for i in chosen], change, alpha=-strength)
    torch._foreach_copy_(history, displacement)


def correct_gradients_(
    copies: Sequence[Tensor],
    gradients: Sequence[Tensor],
    history: list[Tensor],
    valid: Sequence[bool],
    strength: float,
) -> None:
    """Correct copies of gradients in place where the history, the last gradients, is valid.

    Remembering the gradients is left to the caller, who may yet find that they are not to be used.
    """
    chosen = [index for index, is_valid in enumerate(valid) if is_valid and strength != 0]
    if chosen and copies[0].device.type == "cpu":
        for index in chosen:
            for copy, gradient, old in tiles(copies[index], gradients[index], history[index]):
                copy.add_(gradient - old, alpha=strength)
    elif chosen:
        change = torch._foreach_sub([gradients[i] for i in chosen], [history[i] for i in chosen])
        torch._foreach_add_([copies[i] for i in chosen], change, alpha=strength)
