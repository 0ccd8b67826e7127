"""Warnings at the start of a run about valid settings that change how it trains."""

import re
from collections.abc import Iterable

from torchtitan.trainer import Trainer

from titan_async.training.optimizer.config import HIDDEN_MATRICES, match_group
from titan_async.training.optimizer.container import AsyncOptimizers
from titan_async.training.pipeline.overlap import why_nothing_overlaps
from titan_async.training.pipeline.schedule import ASYNC_SCHEDULE, delays_gradients, is_async

__all__ = ["start_notes"]


def start_notes(
    config: Trainer.Config, names: Iterable[str], *, was_delayed: bool | None = None
) -> list[str]:
    """Warnings about a configuration that may not train as its user expects.

    Args:
        config: the resolved configuration.
        names: of the parameters of the model, or of a part of it.
        was_delayed: whether the run of the resumed checkpoint had a delay; None if none is resumed.
    """
    notes = []
    parallelism, delayed = config.parallelism, delays_gradients(config.parallelism)
    if is_async(parallelism) and not delayed:
        notes.append(
            f"one stage: no delay, no feedback ({ASYNC_SCHEDULE} needs parallelism.pipeline_parallel_degree "
            "of at least 2)"
        )
    if (line := _synchronous_start(config)) is not None:
        notes.append(line)
    if (line := why_nothing_overlaps(config)) is not None:
        notes.append(line)
    if config.adopted and config.training.disable_cuda_graphs:
        feedback = config.optimizer if isinstance(config.optimizer, AsyncOptimizers.Config) else None
        on = delayed and feedback is not None and feedback.error_feedback.enable
        notes.append(
            "a configuration of torchtitan's: training.disable_cuda_graphs is set, which pipelines need"
            + (", and optimizer.error_feedback is on" if on else "")
        )
    if was_delayed not in (None, delayed):
        had, has = ("a", "none") if was_delayed else ("no", "one")
        notes.append(f"the checkpoint's run had {had} delay, this one has {has}: the training changes here")
    if delayed and _adam_without_feedback(config, names):
        notes.append(
            "AdamW without error feedback trains poorly under a delay (arXiv 2606.30634: 2.890 nats against "
            '2.612 without one; Muon 2.590 against 2.578): set optimizer.name to "muon", or turn on '
            "optimizer.error_feedback"
        )
    warmup, steps = config.lr_scheduler.warmup_steps, config.lr_scheduler.total_steps or config.training.steps
    if warmup is not None and warmup > steps:
        notes.append(
            f"lr_scheduler.warmup_steps is {warmup}, but the schedule has {steps} steps: all are warm-up"
        )
    return notes


def _synchronous_start(config: Trainer.Config) -> str | None:
    """A warning about a synchronous start that takes the whole run, or has no effect."""
    asked, steps = config.pipeline.synchronous_steps, config.training.steps
    if delays_gradients(config.parallelism):
        if asked is not None and asked > steps:
            found = f"pipeline.synchronous_steps is {asked}, but the run has {steps} steps"
            return f"{found}: all are synchronous"
    elif config.pipeline.resolved_synchronous_steps(steps) and not is_async(config.parallelism):
        name = "synchronous_ratio" if asked is None else "synchronous_steps"
        schedule = config.parallelism.pipeline_parallel_schedule
        return f"pipeline.{name} has no effect: under {schedule} every step is synchronous"
    return None


def _adam_without_feedback(config: Trainer.Config, names: Iterable[str]) -> bool:
    optimizer = config.optimizer
    groups = optimizer.param_groups
    if isinstance(optimizer, AsyncOptimizers.Config):
        groups = optimizer.resolved_groups()
        if optimizer.error_feedback.enable and optimizer.error_feedback.strength:
            return False
    hidden = (name for name in names if re.search(HIDDEN_MATRICES, name))
    return any(groups[match_group(name, groups)].optimizer_name in ("AdamW", "Adam") for name in hidden)
