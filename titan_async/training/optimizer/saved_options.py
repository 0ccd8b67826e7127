"""Options of the optimizers in a checkpoint: which a run changes, and which older checkpoints lack."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from titan_async.config.field_values import format_value

__all__ = ["changed_options", "may_be_missing"]

_OPTION = re.compile(r"param_groups\.(?P<parameter>.+)\.(?P<option>[^.]+)")

_NEW_OPTIONS = {
    "ns_form",
    "cautious_weight_decay",
    "split_sizes",
    "split_dim",
    "input_dim",
    "momentum_dtype",
    "error_feedback",
    "error_feedback_level",
    "error_feedback_dtype",
}
"""Options of Muon that checkpoints of earlier versions lack."""

_NOT_COMPARED = {"lr", "fused", "foreach", "capturable"}
"""The learning rate of a step follows from `initial_lr` and the schedule; the others select a kernel."""


def changed_options(
    saved: Mapping[str, Any], own: Mapping[str, Any], name_of: Callable[[str, str], str]
) -> list[str]:
    """The options that differ, as "optimizer.muon.momentum 0.9 -> 0.95": first the checkpoint's value.

    Args:
        saved: a checkpoint's options of each parameter, as "param_groups.PARAMETER.OPTION". One that it lacks
            does not differ.
        own: this run's.
        name_of: returns the name of a parameter's option in the recipe.
    """
    found: dict[str, tuple[list[str], str]] = {}
    for key, value in own.items():
        match = _OPTION.fullmatch(key)
        if match is None or match["option"] in _NOT_COMPARED or key not in saved:
            continue
        before, now = _plain(saved[key]), _plain(value)
        if before != now:
            # Parameters of one group may have been in several.
            befores, _ = found.setdefault(
                name_of(match["parameter"], match["option"]), ([], format_value(now))
            )
            if format_value(before) not in befores:
                befores.append(format_value(before))
    return [f"{name} {' or '.join(befores)} -> {now}" for name, (befores, now) in found.items()]


def may_be_missing(key: str) -> bool:
    """Whether a checkpoint without this key of the optimizers' state can be loaded."""
    if key.startswith("state."):
        return ".error_feedback_" in key
    return key.startswith("param_groups.") and key.rpartition(".")[2] in _NEW_OPTIONS


def _plain(value: Any) -> Any:
    """The value of an option as Python numbers and lists."""
    if isinstance(value, Tensor):
        return value.item()
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
