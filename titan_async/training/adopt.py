"""Converts torchtitan's `Trainer.Config` to an `AsyncTrainer.Config`, so that its recipes train unchanged."""

import dataclasses
from typing import Any

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.validate import Validator
from torchtitan.config import derive
from torchtitan.trainer import Trainer

from titan_async.errors import UserError
from titan_async.training.checkpoint.checkpointer import AsyncCheckpointer
from titan_async.training.optimizer.config import AsyncLRSchedulers
from titan_async.training.optimizer.container import AsyncOptimizers
from titan_async.training.telemetry.metrics import AsyncMetrics
from titan_async.training.trainer import AsyncTrainer
from titan_async.training.validator import AsyncValidator

__all__ = ["adopt"]

_OURS = {
    OptimizersContainer.Config: AsyncOptimizers.Config,
    LRSchedulersContainer.Config: AsyncLRSchedulers.Config,
    MetricsProcessor.Config: AsyncMetrics.Config,
    CheckpointManager.Config: AsyncCheckpointer.Config,
    Validator.Config: AsyncValidator.Config,
}
"""Replacements of torchtitan's own sections, which keep their settings. Users' subclasses are kept."""


def adopt(config: Any, *, recipe: str) -> AsyncTrainer.Config:
    """A configuration with the same settings that also trains under Async2BW.

    Args:
        config: of a recipe function; not changed. An `AsyncTrainer.Config` is returned unchanged.
        recipe: the function's name, for messages.

    Raises:
        UserError: it is not a `Trainer.Config`, or that of another trainer.
    """
    if isinstance(config, AsyncTrainer.Config):
        return config
    if not isinstance(config, Trainer.Config):
        raise UserError(
            f"the recipe {recipe} returns a {type(config).__qualname__}: name a function that returns a "
            "Trainer.Config"
        )
    if type(config) is not Trainer.Config:
        raise UserError(
            f"the recipe {recipe} is for its own trainer ({type(config).__qualname__}), whose loop does not "
            "support delayed gradients: derive it from titan_async.training.trainer.AsyncTrainer, or choose "
            "another recipe"
        )
    changes = {
        field.name: derive(section, _OURS[type(section)])
        for field in dataclasses.fields(config)
        if type(section := getattr(config, field.name)) in _OURS
    }
    training = dataclasses.replace(config.training, disable_cuda_graphs=True)  # no pipelines
    return derive(config, AsyncTrainer.Config, **changes, training=training, adopted=True)
