"""The check of what all optimizers of this layer have in common: learning rate and weight decay."""

import math
from typing import Any

from torch import Tensor

__all__ = ["check_rates"]


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
