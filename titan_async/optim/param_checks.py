"""The checks of what all optimizers of this layer have in common: parameters, learning rate, weight decay."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from titan_async.optim.tensors import named

__all__ = ["check_duplicates", "check_rates"]


def check_duplicates(
    optimizer: Optimizer, groups: Sequence[dict[str, Any]], param_group: dict[str, Any]
) -> None:
    """Check that a group has no parameter twice, nor one of ``groups``; its parameters become a list.

    Raises:
        ValueError: it has.
    """
    if isinstance(param_group["params"], (Tensor, set)):  # a single one, or what torch refuses
        return
    if not isinstance(param_group["params"], list):
        param_group["params"] = list(param_group["params"])
    names = param_group.get("param_names") or [None] * len(param_group["params"])
    seen = {param for group in groups for param in group["params"]}
    for name, param in zip(names, param_group["params"], strict=False):
        if isinstance(param, tuple):
            name, param = param[:2]
        if isinstance(param, Tensor) and param in seen:
            raise ValueError(
                f"{type(optimizer).__name__} was given {named(param, name)} twice, and would update it twice "
                f"in a step: list each parameter once, also one that two modules share"
            )
        if isinstance(param, Tensor):
            seen.add(param)


def check_rates(group: dict[str, Any]) -> None:
    """Check a group's learning rate and weight decay.

    Raises:
        ValueError: one is negative or not finite, or a learning rate has several elements.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must have one element, but has shape {list(lr.shape)}")
    for key in ("lr", "weight_decay"):
        if not (float(group[key]) >= 0 and math.isfinite(group[key])):
            raise ValueError(f"{key} must be a finite number, zero or more, not {group[key]!r}")
