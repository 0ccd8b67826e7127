"""Starts the record of a trainer's run, and lets everything in it that takes time tell so."""

from typing import TYPE_CHECKING

import torch.distributed as dist

from titan_async.monitor.run_folder import RunShape
from titan_async.training._titan_internals import stages_of
from titan_async.training.pipeline.schedule import overlaps
from titan_async.training.telemetry.recording import Recording, start_recording
from titan_async.training.telemetry.stage_spans import ModelSpans, Passing, StageSpans, no_spans

if TYPE_CHECKING:
    from titan_async.training.trainer import AsyncTrainer

__all__ = ["record"]


def record(trainer: "AsyncTrainer", first_step: int) -> tuple[Recording, Passing]:
    """Start to record, unless the configuration says no or the ranks are imaginary. A collective.

    Args:
        trainer: about to train.
        first_step: steps that are done.

    Returns:
        The record, and what to run each pass of a batch in.
    """
    config, dims = trainer.config, trainer.parallel_dims
    if not config.monitor.events or dist.get_backend() == "fake":
        return Recording(), no_spans
    stages = stages_of(trainer.pp_schedule) if dims.pp_enabled else []
    microbatches = trainer.num_pipeline_parallel_microbatches if stages else 1
    recording = start_recording(
        config.dump_folder,
        RunShape(
            model=f"{config.model_spec.name} {config.model_spec.flavor}",
            first_step=first_step,
            steps=config.training.steps,
            log_every=config.metrics.log_freq,
            schedule=config.parallelism.pipeline_parallel_schedule if stages else "none",
            microbatches=microbatches * trainer.gradient_accumulation_steps,
            lookahead=config.pipeline.lookahead if trainer.delayed else 0,
            overlap=overlaps(config),
            stages=stages[0].num_stages if stages else 1,
            synchronous_steps=trainer.synchronous_steps,
            tokens_per_step=config.training.seq_len * trainer.sequences_per_step,
        ),
        [stage.stage_index for stage in stages] or [0],
        trainer.device,
        trainer.reporter.warn_from_any_rank,
    )
    passing: Passing = no_spans
    if recording.events is not None:
        if trainer.delayed:
            trainer.pp_schedule.recorder = recording.events
        elif stages:
            passing = StageSpans(stages, recording.events).passing
        else:
            passing = ModelSpans(trainer.model_parts[0], recording.events).passing
    return recording, passing
