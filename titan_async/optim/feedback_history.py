"""The formulas of error feedback, and the history of each parameter.

With D_b the displacement that an optimizer proposes from the gradient g_b of batch b, and strength s:

    level "update":    D'_b = D_b + s (D_b - D_{b-1})
    level "gradient":  g'_b = g_b + s (g_b - g_{b-1})

`titan_async.optim.ErrorFeedback` measures the displacement after the optimizer that it wraps has stepped;
`titan_async.optim.Muon` corrects each block of a weight right after it has moved. All functions work on local
tensors.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan_async.local_tensors import local_part
from titan_async.optim.elementwise import at_least_float32, blocks

__all__ = [
    "LEVELS",
    "History",
    "MergedState",
    "advance_histories",
    "changes_flags",
    "checked_level",
    "checked_strength",
    "correct_gradients_",
    "correct_updates_",
    "history_key",
    "may_be_state_init_step",
    "negated_weights",
    "split_state",
]

LEVELS = ("update", "gradient")


def history_key(level: str) -> str:
    """The key of a parameter's history in the optimizer's state; that of its flag has the suffix ``_valid``.

    It contains the level because a history of one level is meaningless at the other.
    """
    return f"error_feedback_{level}"


def checked_strength(strength: float) -> float:
    """Check and return a strength.

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
    """Check and return a level.

    Raises:
        ValueError: it is not in `LEVELS`.
    """
    if level not in LEVELS:
        choices = ", ".join(repr(choice) for choice in LEVELS)
        raise ValueError(f"unknown level {level!r} of error feedback: choose {choices}")
    return level


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """A parameter's uncorrected displacement or gradient of the last update; a view of optimizer state.

    Args:
        key: its key in the state.
        buffer: of the parameter's shape and placement; zero where ``valid`` is false.
        valid: whether there was a last update: a bool tensor without dimensions, on the CPU.
    """

    key: str
    buffer: Tensor
    valid: Tensor

    @classmethod
    def create(cls, param: Tensor, level: str, dtype: torch.dtype) -> "History":
        buffer = torch.zeros_like(param, dtype=dtype, requires_grad=False)
        return cls(history_key(level), buffer, torch.zeros((), dtype=torch.bool, device="cpu"))

    @classmethod
    def from_state(cls, state: Mapping[str, Any], level: str) -> "History | None":
        """The history in a parameter's state, if it has one."""
        key = history_key(level)
        return cls(key, state[key], state[f"{key}_valid"]) if key in state else None

    def state(self) -> dict[str, Tensor]:
        """The entries in the parameter's state."""
        return {self.key: self.buffer, f"{self.key}_valid": self.valid}

    @property
    def local(self) -> Tensor:
        return local_part(self.buffer)

    @property
    def is_valid(self) -> bool:
        return bool(self.valid)

    def clear(self) -> None:
        """Leave the next update uncorrected."""
        if self.is_valid:
            self.local.zero_()
            self.valid.fill_(False)

    def load(self, state: Mapping[str, Any]) -> None:
        """Copy the history from a saved state, keeping its dtype; clear it if ``state`` has none."""
        if self.key not in state or not bool(state.get(f"{self.key}_valid", True)):
            self.clear()
        else:
            self.local.copy_(local_part(state[self.key]))
            self.valid.fill_(True)


def changes_flags(histories: Mapping[Tensor, History]) -> bool:
    """Whether a step now would start or clear a history, whose flag is on the host."""
    return any(history.is_valid != (param.grad is not None) for param, history in histories.items())


def advance_histories(histories: Mapping[Tensor, History], moved: Collection[Tensor]) -> None:
    """After an update, mark the histories of the parameters that moved as valid and clear all others."""
    for param, history in histories.items():
        if param in moved:
            history.valid.fill_(True)
        else:
            history.clear()


def may_be_state_init_step(histories: Mapping[Tensor, History], groups: Sequence[dict[str, Any]]) -> bool:
    """Whether a step now only creates state, if all its gradients are zero on all ranks.

    torch.distributed.checkpoint and torchtitan create state before loading by a step with zero gradients and
    learning rate 0. If it counted as an update, the first real one would be corrected by a displacement of 0,
    that is, doubled. A real first step at learning rate 0, as in a warm-up, has nonzero gradients.
    """
    if any(float(group.get("lr", 0.0)) != 0 for group in groups):
        return False
    return bool(histories) and not any(history.is_valid for history in histories.values())


class MergedState(Mapping[Tensor, Any]):
    """The state of an optimizer and its histories, merged: new dictionaries of live tensors."""

    def __init__(self, wrapped: Mapping[Tensor, Any], histories: Mapping[Tensor, History]) -> None:
        self._wrapped, self._histories = wrapped, histories

    def __getitem__(self, key: Tensor) -> Any:
        entries = self._wrapped.get(key, {})  # indexing would create an entry
        if not isinstance(entries, dict):
            return entries
        return {**entries, **self._histories[key].state()} if key in self._histories else dict(entries)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(dict.fromkeys([*self._wrapped, *self._histories]))

    def __len__(self) -> int:
        return len({*self._wrapped, *self._histories})

    def __contains__(self, key: object) -> bool:
        return key in self._wrapped or key in self._histories


def split_state(state: Mapping[Any, Any]) -> tuple[dict[Any, dict[str, Any]], dict[Any, Any]]:
    """Split the state of a state dict into the entries of error feedback and all others."""
    keys = {suffixed for level in LEVELS for suffixed in (history_key(level), f"{history_key(level)}_valid")}
    feedback: dict[Any, dict[str, Any]] = {}
    others: dict[Any, Any] = {}
    for index, entries in state.items():
        if not isinstance(entries, dict):
            others[index] = entries
            continue
        feedback[index] = {key: value for key, value in entries.items() if key in keys}
        rest = {key: value for key, value in entries.items() if key not in keys}
        if rest:
            others[index] = rest
    return feedback, others


def negated_weights(weights: Sequence[Tensor], out: Tensor | None = None) -> list[Tensor]:
    """Negated copies of weights before an update, in at least float32, for `correct_updates_`.

    Args:
        out: flat memory for the copies, of their dtype.
    """
    # Adding the new weights then gives the displacement in a single pass.
    if out is None:
        return [torch.neg(weight.to(at_least_float32(weight.dtype))) for weight in weights]
    sizes = [weight.numel() for weight in weights]
    parts = out[: sum(sizes)].split(sizes)
    return [torch.neg(w, out=part.view(w.shape)) for w, part in zip(weights, parts, strict=True)]


def correct_updates_(
    weights: list[Tensor],
    negated: list[Tensor],
    history: list[Tensor],
    valid: Sequence[bool],
    strength: float,
    skip: Tensor | None = None,
) -> None:
    """Correct an update that has been applied, and store its displacement in the history.

    Args:
        weights: after the update; corrected in place where the history is valid.
        negated: their `negated_weights` from before it; overwritten.
        history: the displacements of the last update; overwritten by those of this one, before correction.
        valid: for each, whether there was a last update.
        strength: s of the formulas.
        skip: a bool scalar on the device, true if the update was skipped. Weights and histories, all of which
            must be valid, then keep their bits.
    """
    if weights and weights[0].device.type == "cpu":
        # On the CPU lists of tensors are no faster, and blocks stay in the cache.
        for *tensors, is_valid in zip(weights, negated, history, valid, strict=True):
            for weight, displacement, old in blocks(*tensors):
                _correct_([weight], [displacement], [old], [is_valid], strength, skip)
    else:
        _correct_(weights, negated, history, valid, strength, skip)


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
        # The change below is then zero, and adding -strength times it, which is -0.0, keeps a weight's bits.
        for each, old in zip(displacement, history, strict=True):
            torch.where(skip, old.to(each.dtype), each, out=each)
    chosen = [index for index, is_valid in enumerate(valid) if is_valid and strength != 0]
    if chosen:
        # A history of the displacement's dtype stores the difference, without a third buffer.
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

    The caller stores the gradients in the history once it is known that the step is not skipped.
    """
    chosen = [index for index, is_valid in enumerate(valid) if is_valid and strength != 0]
    if chosen and copies[0].device.type == "cpu":
        for index in chosen:
            for copy, gradient, old in blocks(copies[index], gradients[index], history[index]):
                copy.add_(gradient - old, alpha=strength)
    elif chosen:
        change = torch._foreach_sub([gradients[i] for i in chosen], [history[i] for i in chosen])
        torch._foreach_add_([copies[i] for i in chosen], change, alpha=strength)
