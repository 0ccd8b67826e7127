"""Puts a model on pipeline stages, for torch's own schedules and for `ScheduleAsync2BW`."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from titan_async.config.device import has_accelerator
from titan_async.pipelining import ScheduleAsync2BW
from titan_async.pipelining.actions import min_microbatches
from titan_async.training._titan_internals import parts_of, without_fsdp, wrap_initializers
from titan_async.training.models.tying import is_tied, store_once, tied_parameters, untied
from titan_async.training.optimizer.config import share_of

__all__ = [
    "ASYNC_SCHEDULE",
    "PipelineConfig",
    "accumulation_of",
    "adapt_model_spec",
    "check_microbatches",
    "check_supported",
    "delays_gradients",
    "has_last_stage",
    "is_async",
    "needs_fsdp",
    "overlaps",
    "synchronous_steps",
    "tokens_per_step",
]


@dataclass(kw_only=True, slots=True)
class PipelineConfig:
    """Options of the pipeline that `torchtitan.config.ParallelismConfig` lacks."""

    balance: Literal["layers", "measured"] = "layers"
    """How the model is split into stages. "layers" is torchtitan's way: the same number of layers on each,
    where `parallelism.pipeline_parallel_first_stage_less_layers` and `..._last_stage_less_layers` set how
    many layers the embedding and the head count for. "measured" instead times forward and backward of each
    kind of layer, of the embedding and of the head when training starts, and makes the slowest stage as
    fast as a split into whole layers can."""

    lookahead: int = 0
    """Microbatches that the first stage keeps in flight beyond the stages - 1 that it must, under Async2BW;
    their number decreases evenly to 0 at the last stage. They hide the latency of messages and imbalance of
    stages, and each costs a microbatch's activations; more than stages - 1 are of little use."""

    early_receives: Literal["auto", "always", "never"] = "auto"
    """Whether the receive of a message is posted while the stage still computes, under Async2BW. That hides
    the transfer, but on a GPU a posted receive occupies multiprocessors, and one at each end of an edge can
    hang if something waits for both devices. "auto": for all messages on the CPU; on accelerators for
    activations from another host, if there is a lookahead."""

    synchronous_steps: int | None = None
    """Steps at the start of training without delay, under Async2BW: each drains the pipeline, which costs the
    bubble of 1F1B, and the next one reads the updated weights. Error feedback begins after them. "none" for
    `synchronous_ratio` of all steps; a number overrides it."""

    synchronous_ratio: float = 0.0
    """Share of the steps (`training.steps`) that are synchronous, rounded down. Has no effect if
    `synchronous_steps` is a number."""

    overlap: bool = False
    """Whether a stage overlaps a forward and a backward, each with the other's all-to-alls of tokens, under
    Async2BW. It hides the all-to-alls of expert parallelism (`parallelism.expert_parallel_degree`). With it
    stage r of d holds 2 (d - 1 - r) + 1 microbatches in flight instead of d - 1 - r, and while it computes
    such a pair one more, and a batch needs at least 2 d - 1."""

    def resolved_synchronous_steps(self, training_steps: int) -> int:
        """The synchronous steps at the start of a run of `training_steps` under Async2BW."""
        if self.synchronous_steps is not None:
            return min(self.synchronous_steps, training_steps)
        return share_of(training_steps, self.synchronous_ratio)


ASYNC_SCHEDULE = "Async2BW"
"""The name that selects `ScheduleAsync2BW` in `parallelism.pipeline_parallel_schedule`."""


def is_async(parallelism: ParallelismConfig) -> bool:
    """Whether the configured schedule is Async2BW, whatever the number of stages."""
    return parallelism.pipeline_parallel_schedule.lower() == ASYNC_SCHEDULE.lower()


def delays_gradients(parallelism: ParallelismConfig) -> bool:
    """Whether training runs under `ScheduleAsync2BW`. One stage trains synchronously."""
    return is_async(parallelism) and parallelism.pipeline_parallel_degree > 1


def overlaps(config: Trainer.Config) -> bool:
    """Whether training overlaps pairs of a forward and a backward."""
    return delays_gradients(config.parallelism) and config.pipeline.overlap


def synchronous_steps(config: Trainer.Config) -> int:
    """The steps at the start of a run whose updates are not delayed; 0 if none ever is."""
    if not delays_gradients(config.parallelism):
        return 0
    return config.pipeline.resolved_synchronous_steps(config.training.steps)


def has_last_stage(trainer: Trainer) -> bool:
    """Whether this rank computes losses."""
    return not trainer.parallel_dims.pp_enabled or trainer.pp_has_last_stage


def tokens_per_step(trainer: Trainer) -> int:
    """The tokens of a batch over all data-parallel ranks."""
    dims, training = trainer.parallel_dims, trainer.config.training
    degree = dims.get_mesh("batch").size() if dims.dp_enabled else 1
    return training.seq_len * training.local_batch_size * trainer.gradient_accumulation_steps * degree


def check_microbatches(config: Trainer.Config, accumulation: int) -> None:
    """Refuse fewer microbatches than the pipeline needs.

    Args:
        config: of an asynchronous pipeline.
        accumulation: passes of `training.local_batch_size` sequences in a batch.

    Raises:
        ValueError: one sentence that names the fields and the fix.
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
    """Refuse settings that `ScheduleAsync2BW` does not support.

    Raises:
        ValueError: one sentence that names the fields and the fix.
    """
    parallelism, training = config.parallelism, config.training
    if training.global_batch_size < 0:  # else it depends on degrees that are not all known yet
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
    if not has_accelerator():
        _adapt_to_cpu(model)
    if tied:
        store_once(model)
    return model


def _adapt_to_cpu(module: nn.Module) -> None:
    """Let a parallelized module start and train on CPU and gloo as it would on GPUs.

    FSDP reduces by plain sums, because gloo has no pre-multiplied sum. Sharded parameters are initialized as
    full tensors: on the CPU every rank draws the same numbers for its shard, so that the experts of two ranks
    would be equal, receive the same tokens, and stay equal.
    """
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.set_force_sum_reduction_for_comms(True)
    wrap_initializers(module, _initialize_full)


def _initialize_full(initialize: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], None]:
    """`initialize` for sharded parameters: each gets its shard of what the full tensor would get."""

    def initialize_shard(parameter: torch.Tensor) -> None:
        if not isinstance(parameter, DTensor):
            initialize(parameter)
            return
        mesh = parameter.device_mesh
        full = DTensor.from_local(
            torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device),
            mesh,
            [Replicate()] * mesh.ndim,
        )
        initialize(full)
        # Slices it: `copy_` alone refuses a dimension of fewer entries than ranks.
        parameter.copy_(full.redistribute(placements=parameter.placements))

    return initialize_shard


def needs_fsdp(ranks_of_a_stage: int, training: TrainingConfig) -> bool:
    """Whether a stage has several ranks, or computes in another dtype than that of its parameters.

    If not, FSDP would gather, reduce and cast nothing, but cost a copy of the weights, and 4 % of a small
    model's step.
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
    # torchtitan builds stages for torch's schedules only. GPipe supports any number of microbatches, whereas
    # 1F1B checks those of one pass.
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
    """Gradient accumulation: passes of `training.local_batch_size` sequences on each rank in a batch."""
    if training.global_batch_size < 0:
        return 1
    return training.global_batch_size // (training.local_batch_size * data_parallel_degree)
