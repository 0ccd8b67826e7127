"""Prepares a configuration for training: for its device, its schedule, and the split of its model."""

import dataclasses
from typing import Any

from titan_async.config.device import has_accelerator
from titan_async.training.optimizer.container import feedback_if_delayed
from titan_async.training.pipeline import overlap
from titan_async.training.pipeline.balance import balance_model_spec
from titan_async.training.pipeline.schedule import adapt_model_spec, delays_gradients

__all__ = ["adapt_to_cpu", "prepare_config"]


def prepare_config(config: Any) -> Any:
    """A copy of an `AsyncTrainer.Config` from which torchtitan's `Trainer` can be built."""
    config = overlap.adapt_config(adapt_to_cpu(config))
    model_spec = balance_model_spec(config.model_spec, config.pipeline)
    return dataclasses.replace(
        config,
        model_spec=adapt_model_spec(model_spec, config.parallelism, config.pipeline),
        optimizer=feedback_if_delayed(config.optimizer, delays_gradients(config.parallelism)),
    )


def adapt_to_cpu(config: Any) -> Any:
    """A copy with the module overrides that the CPU needs; unchanged if there is an accelerator."""
    if has_accelerator():
        return config
    from titan_async.training.models import cpu_overrides  # changes functions of torchtitan

    override = dataclasses.replace(
        config.override, imports=[*config.override.imports, *cpu_overrides.override_imports(config)]
    )
    checkpoint = config.checkpoint
    if getattr(checkpoint, "async_mode", None) == "async_with_pinned_mem":
        checkpoint = dataclasses.replace(checkpoint, async_mode="disabled")
    return dataclasses.replace(config, override=override, checkpoint=checkpoint)
