"""Gradients that are not finite, on one stage, in the batches that a test names."""

from collections.abc import Collection
from typing import Any

import torch


def poison(trainer: Any, batches: Collection[int]) -> None:
    """Let the losses of these batches, counted from 0, have a NaN for gradient, and stay what they are.

    Only the last stage computes them.
    """
    schedule = trainer.pp_schedule
    loss_fn = schedule._loss_fn

    def poisoned(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if output.requires_grad and trainer.step - 1 in batches:  # not in a validation
            output.register_hook(lambda gradient: gradient * torch.nan)
        return loss_fn(output, *args, **kwargs)

    schedule._loss_fn = poisoned
