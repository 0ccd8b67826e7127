"""Puts a model on pipeline stages, for torch's own schedules and for `ScheduleAsync2BW`."""

import dataclasses
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from titan_async.pipelining import ScheduleAsync2BW
from titan_async.pipelining.actions import min_microbatches
from titan_async.training import cpu
from titan_async.training._titan_internals import parts_of, without_fsdp
from titan_async.training.pipeline_config import PipelineConfig
from titan_async.training.tying import is_tied, store_once, tied_parameters, untied

__all__ = [
    "ASYNC_SCHEDULE",
    "accumulation_of",
    "adapt_model_spec",
    "check_microbatches",
    "check_supported",
    "delays_gradients",
    "is_async",
    "needs_fsdp",
    "overlaps",
]

ASYNC_SCHEDULE = "Async2BW"
"""The name that selects `ScheduleAsync2BW` in `parallelism.pipeline_parallel_schedule`."""


def is_async(parallelism: ParallelismConfig) -> bool:
    """Whether the configured schedule is Async2BW, whatever the number of stages."""
    return parallelism.pipeline_parallel_schedule.lower() == ASYNC_SCHEDULE.lower()


def delays_gradients(parallelism: ParallelismConfig) -> bool:
    """Whether training runs under `ScheduleAsync2BW`. One stage is no pipeline and trains synchronously."""
    return is_async(parallelism) and parallelism.pipeline_parallel_degree > 1


def overlaps(config: Trainer.Config) -> bool:
    """Whether training runs overlapped pairs."""
    return delays_gradients(config.parallelism) and config.pipeline.overlap


def check_microbatches(config: Trainer.Config, accumulation: int) -> None:
    """Refuse fewer microbatches than the pipeline needs.

    Args:
        config: a configuration whose pipeline is asynchronous.
        accumulation: passes of `training.local_batch_size` sequences in a batch.

    Raises:
        ValueError: one sentence that names the fields and the mend.
    """
    parallelism, stages = config.parallelism, config.parallelism.pipeline_parallel_degree
    size = parallelism.pipeline_parallel_microbatch_size
    microbatches = config.training.local_batch_size // size * accumulation
    if microbatches < stages:
        raise ValueError(
            f"Async2BW needs at least as many microbatches ({microbatches}, training.local_batch_size / "
            f"parallelism.pipeline_parallel_microbatch_size) as stages ({stages}, "
            "parallelism.pipeline_parallel_degree): set training.local_batch_size to at least "
            f"{stages * size}"
        )
    overlap, lookahead = config.pipeline.overlap, config.pipeline.lookahead
    least = min_microbatches(stages, overlap=overlap)
    if microbatches < least:
        raise ValueError(
            f"pipeline.overlap over {stages} stages (parallelism.pipeline_parallel_degree) needs at least "
            f"{least} microbatches, not {microbatches} (training.local_batch_size / "
            "parallelism.pipeline_parallel_microbatch_size): set training.local_batch_size to at least "
            f"{least * size}, or turn pipeline.overlap off"
        )
    if not 0 <= lookahead <= microbatches - least:
        raise ValueError(
            f"pipeline.lookahead is {lookahead}, but {microbatches} microbatches over {stages} stages"
            f"{' with pipeline.overlap' if overlap else ''} leave room for 0 to {microbatches - least}: set "
            "it to one of these"
        )


def check_supported(config: Trainer.Config) -> None:
    """Refuse what `ScheduleAsync2BW` does not do yet, and what it never can.

    Raises:
        ValueError: one sentence that names the fields and the mend.
    """
    parallelism, training = config.parallelism, config.training
    if training.global_batch_size < 0:  # else the degrees decide, which are not all known yet
        check_microbatches(config, accumulation=1)
    if parallelism.fsdp_reshard_after_forward == "always":
        raise ValueError(
            "Async2BW keeps the unsharded weights of a microbatch until its backward: set "
            'parallelism.fsdp_reshard_after_forward to "default" or "never"'
        )
    if training.enable_cpu_offload:
        raise ValueError("Async2BW does not offload to the CPU: set training.enable_cpu_offload to false")


def adapt_model_spec(
    model_spec: ModelSpec, parallelism: ParallelismConfig, pipeline: PipelineConfig
) -> ModelSpec:
    """A copy of any torchtitan model's spec that also builds `ScheduleAsync2BW`, and runs on CPU."""
    model, pipelining_fn = model_spec.model, model_spec.pipelining_fn
    tied = is_tied(model)
    return dataclasses.replace(
        model_spec,
        model=untied(model) if tied and delays_gradients(parallelism) else model,
        parallelize_fn=partial(_parallelize, model_spec.parallelize_fn, tied),
        pipelining_fn=pipelining_fn and partial(_pipeline, pipelining_fn, pipeline, tied),
    )


def _parallelize(
    parallelize_fn,
    tied: bool,
    model: nn.Module,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    **kwargs: Any,
) -> nn.Module:
    kwargs |= {"training": training, "parallel_dims": parallel_dims}
    ranks_of_a_stage = parallel_dims.world_size // parallel_dims.pp
    with nullcontext() if needs_fsdp(ranks_of_a_stage, training) else without_fsdp():
        model = parallelize_fn(model, **kwargs)
    model = cpu.adapt_module(model)
    if tied:
        store_once(model)
    return model


def needs_fsdp(ranks_of_a_stage: int, training: TrainingConfig) -> bool:
    """Whether a stage has several ranks, or computes in another dtype than that of its parameters.

    Elsewhere FSDP would gather, reduce and cast nothing, and take a copy of the weights and 4 % of a step of
    a small model for that.
    """
    return (
        ranks_of_a_stage > 1
        or training.enable_cpu_offload
        or training.mixed_precision_param != training.dtype
    )


def _pipeline(
    pipelining_fn,
    pipeline: PipelineConfig,
    tied: bool,
    model: nn.Module,
    *,
    parallelism: ParallelismConfig,
    training: TrainingConfig,
    parallel_dims: ParallelDims,
    **kwargs: Any,
) -> tuple[_PipelineSchedule, list[nn.Module], bool, bool]:
    kwargs |= {"training": training, "parallel_dims": parallel_dims}
    if not delays_gradients(parallelism):
        return pipelining_fn(model, parallelism=parallelism, **kwargs)
    # torchtitan knows torch's own schedules only: let it build the stages for one of them, then use them.
    # GPipe takes any number of microbatches, where 1F1B would count those of one pass.
    parallelism = dataclasses.replace(parallelism, pipeline_parallel_schedule="GPipe")
    built, model_parts, has_first, has_last = pipelining_fn(model, parallelism=parallelism, **kwargs)
    parts = parts_of(built)
    schedule = ScheduleAsync2BW(
        parts.stage,
        parts.n_microbatches * accumulation_of(training, parallel_dims.dp_replicate * parallel_dims.dp_shard),
        loss_fn=parts.loss_fn,
        # torchtitan's losses sum over tokens and divide by the batch's count, so gradients add up unscaled.
        scale_grads=False,
        lookahead=pipeline.lookahead,
        tied_parameters=tied_parameters(model_parts[0]) if tied else (),
        early_receives={"auto": None, "always": True, "never": False}[pipeline.early_receives],
        overlap=pipeline.overlap,
    )
    return schedule, model_parts, has_first, has_last


def accumulation_of(training: TrainingConfig, data_parallel_degree: int) -> int:
    """Passes of `training.local_batch_size` sequences on each data-parallel rank that make up a batch."""
    if training.global_batch_size < 0:
        return 1
    return training.global_batch_size // (training.local_batch_size * data_parallel_degree)
