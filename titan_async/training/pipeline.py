"""Puts a model on pipeline stages, for torch's own schedules and for `ScheduleAsync2BW`."""

import dataclasses
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.distributed.compile import apply_compile
from torchtitan.protocols.model_spec import ModelSpec

from titan_async.errors import UserError
from titan_async.pipelining import ScheduleAsync2BW
from titan_async.training import cpu
from titan_async.training._titan_internals import parts_of

__all__ = ["ASYNC_SCHEDULE", "adapt_model_spec", "delays_gradients"]

ASYNC_SCHEDULE = "Async2BW"
"""The name that selects `ScheduleAsync2BW` in `parallelism.pipeline_parallel_schedule`."""


def delays_gradients(parallelism: ParallelismConfig) -> bool:
    """Whether training runs under `ScheduleAsync2BW`. One stage is no pipeline and trains synchronously."""
    return (
        parallelism.pipeline_parallel_schedule.lower() == ASYNC_SCHEDULE.lower()
        and parallelism.pipeline_parallel_degree > 1
    )


def adapt_model_spec(model_spec: ModelSpec) -> ModelSpec:
    """A copy of any torchtitan model's spec that also builds `ScheduleAsync2BW`, and runs on CPU."""
    return dataclasses.replace(
        model_spec,
        parallelize_fn=partial(_parallelize, model_spec.parallelize_fn),
        pipelining_fn=model_spec.pipelining_fn and partial(_pipeline, model_spec.pipelining_fn),
    )


def _parallelize(parallelize_fn, model: nn.Module, **kwargs: Any) -> nn.Module:
    return cpu.adapt_module(parallelize_fn(model, **kwargs))


def _pipeline(
    pipelining_fn, model: nn.Module, *, parallelism: ParallelismConfig, **kwargs: Any
) -> tuple[_PipelineSchedule, list[nn.Module], bool, bool]:
    if not delays_gradients(parallelism):
        return pipelining_fn(model, parallelism=parallelism, **kwargs)
    # torchtitan knows torch's own schedules only: let it build the stages for 1F1B, then use them.
    kwargs["parallelize_fn"] = _compile_and_checkpoint
    parallelism = dataclasses.replace(parallelism, pipeline_parallel_schedule="1F1B")
    built, model_parts, has_first, has_last = pipelining_fn(model, parallelism=parallelism, **kwargs)
    parts = parts_of(built)
    # torchtitan's losses sum over tokens and divide by the batch's count, so gradients add up unscaled.
    schedule = ScheduleAsync2BW(parts.stage, parts.n_microbatches, loss_fn=parts.loss_fn, scale_grads=False)
    return schedule, model_parts, has_first, has_last


def _compile_and_checkpoint(
    model: nn.Module,
    *,
    parallel_dims: ParallelDims,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointingConfig,
    dump_folder: str,
    **unused: Any,
) -> nn.Module:
    """What torchtitan's own functions do for a model without data or tensor parallelism.

    They would wrap it in FSDP even on one rank, which `ScheduleAsync2BW` does not support.

    Raises:
        UserError: if there are more processes than stages.
    """
    if parallel_dims.world_size != parallel_dims.pp:
        raise UserError(
            f"Async2BW runs one process a stage, but {parallel_dims.world_size} processes were started for "
            f"{parallel_dims.pp} stages: set NGPU to {parallel_dims.pp}"
        )
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    return model
