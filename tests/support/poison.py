"""Non-finite gradients on the last stage, in selected batches."""

from collections.abc import Collection
from typing import Any

import torch


def poison(trainer: Any, batches: Collection[int]) -> None:
    """Makes the gradients of the losses of these batches, counted from 0, NaN; the losses do not change.

    Only the last stage computes them.
    """
    schedule = trainer.pp_schedule
    loss_fn = schedule._loss_fn

    def poisoned(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if output.requires_grad and trainer.step - 1 in batches:  # not in a validation
            output.register_hook(lambda gradient: gradient * torch.nan)
        return loss_fn(output, *args, **kwargs)

    schedule._loss_fn = poisoned
