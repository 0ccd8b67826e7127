"""Checks of the numbers of ranks, stages, microbatches and experts."""

import math
import os

from torchtitan.config import ParallelismConfig
from torchtitan.trainer import Trainer

from titan_async.config.checks import check_numbers
from titan_async.config.suggestions import unknown_name
from titan_async.errors import UserError
from titan_async.training._titan_internals import split_layers
from titan_async.training.models.tying import is_tied
from titan_async.training.optimizer.container import AsyncOptimizers
from titan_async.training.pipeline.balance import count_stages, measures_balance
from titan_async.training.pipeline.schedule import (
    ASYNC_SCHEDULE,
    accumulation_of,
    check_microbatches,
    delays_gradients,
)

__all__ = [
    "SCHEDULES",
    "check_layout",
    "check_tying",
    "data_parallel_degree",
    "non_data_parallel_size",
    "takes_stages",
]

SCHEDULES = (
    ASYNC_SCHEDULE,
    "1F1B",
    "GPipe",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
"""The values of `parallelism.pipeline_parallel_schedule`."""


def check_layout(config: Trainer.Config, *, world_size: int) -> None:
    """Refuse incompatible numbers of ranks, stages, microbatches and experts. Opens no file.

    Args:
        config: the resolved configuration; not changed.
        world_size: processes of the whole run.

    Raises:
        UserError: one sentence that names the cause and the fix.
    """
    _check_numbers(config)
    _check_schedule(config)
    _check_processes(config, world_size)
    _check_sequences(config)
    _check_loss(config)
    _check_stages(config)


def data_parallel_degree(config: Trainer.Config, world_size: int) -> int:
    """The data-parallel degree of a run of `world_size` processes."""
    return max(world_size // non_data_parallel_size(config.parallelism), 1)


def non_data_parallel_size(parallelism: ParallelismConfig) -> int:
    """Ranks that read the same data: of pipeline, tensor and context parallelism."""
    return (
        parallelism.pipeline_parallel_degree
        * parallelism.tensor_parallel_degree
        * parallelism.context_parallel_degree
    )


def _check_numbers(config: Trainer.Config) -> None:
    check_numbers(config)
    longest = getattr(config.model_spec.model, "max_seq_len", config.training.seq_len)
    if config.training.seq_len > longest:
        raise UserError(
            f"training.seq_len is {config.training.seq_len}, but the model's positions end at {longest}: "
            f"set it to at most {longest}"
        )


def _check_processes(config: Trainer.Config, world_size: int) -> None:
    parallelism = config.parallelism
    rest = non_data_parallel_size(parallelism) * parallelism.data_parallel_replicate_degree
    shards = parallelism.data_parallel_shard_degree
    if shards == -1:
        shards = max(world_size // rest, 1)
    if rest * shards != world_size:
        raise UserError(
            f"{world_size} processes were started, but the degrees of parallelism multiply to "
            f"{rest * shards}: start that many, or change the degrees"
        )
    _check_experts(config, shards)
    _check_batch(config, shards * parallelism.data_parallel_replicate_degree)


def _check_sequences(config: Trainer.Config) -> None:
    parallelism, seq_len = config.parallelism, config.training.seq_len
    tensor = parallelism.tensor_parallel_degree if parallelism.enable_sequence_parallel else 1
    context = parallelism.context_parallel_degree
    divisor = tensor * (2 * context if context > 1 else 1)
    if seq_len % divisor:
        raise UserError(
            f"training.seq_len is {seq_len}, which sequence parallelism over {tensor} ranks (of "
            f"tensor_parallel_degree) and context parallelism over {context} cannot divide: set it to a "
            f"multiple of {divisor}"
        )


def _check_loss(config: Trainer.Config) -> None:
    inner = getattr(config.loss, "loss_fn", None)
    loss, name = (inner, "loss.loss_fn") if inner is not None else (config.loss, "loss")
    chunks = getattr(config.loss, "num_chunks", 1)
    length = config.training.seq_len // config.parallelism.context_parallel_degree
    if length % chunks:
        raise UserError(
            f"loss.num_chunks is {chunks}, which does not divide the {length} tokens of a sequence on each "
            "rank (training.seq_len / parallelism.context_parallel_degree): set it to a divisor of that"
        )
    vocabulary = getattr(config.model_spec.model, "vocab_size", None)
    size = getattr(loss, "global_vocab_size", vocabulary)
    degree = config.parallelism.tensor_parallel_degree
    if degree > 1 and size != vocabulary:
        raise UserError(
            f"{name}.global_vocab_size is {size}, but the model's vocabulary, over which tensor parallelism "
            f"spreads the loss, has {vocabulary} entries: set it to that"
        )
    if vocabulary and vocabulary % degree and config.parallelism.spmd_backend == "spmd_types":
        raise UserError(
            f"parallelism.tensor_parallel_degree is {degree}, which does not divide the model's vocabulary "
            f"of {vocabulary} entries: set it to a divisor of that"
        )


def takes_stages(parallelism: ParallelismConfig, stages: int) -> bool:
    """Whether the schedule supports this number of stages: one or two per rank, or more if interleaved."""
    usual, degree = count_stages(parallelism), parallelism.pipeline_parallel_degree
    two_a_rank = parallelism.pipeline_parallel_schedule.lower() in ("zbvzerobubble", "dualpipev")
    if usual == degree or two_a_rank:
        return stages == usual
    return stages >= usual and stages % degree == 0


def _check_experts(config: Trainer.Config, shards: int) -> None:
    parallelism, degree = config.parallelism, config.parallelism.expert_parallel_degree
    # Expert parallelism uses the processes of other dimensions.
    ranks = shards * parallelism.context_parallel_degree * parallelism.tensor_parallel_degree
    if degree < 1 or ranks % degree:
        raise UserError(
            f"parallelism.expert_parallel_degree is {degree}, but experts are spread over the {ranks} ranks "
            "that data_parallel_shard_degree, tensor_parallel_degree and context_parallel_degree multiply "
            "to: set it to a divisor of that, or raise parallelism.data_parallel_shard_degree"
        )
    for layer in getattr(config.model_spec.model, "layers", []):
        moe = getattr(layer, "moe", None)
        if moe is not None and moe.num_experts % degree:
            raise UserError(
                f"parallelism.expert_parallel_degree is {degree}, which does not divide the model's "
                f"{moe.num_experts} experts: set it to a divisor of that"
            )


def _check_batch(config: Trainer.Config, data_parallel: int) -> None:
    parallelism, training = config.parallelism, config.training
    if training.global_batch_size < 0:
        return
    share = training.local_batch_size * data_parallel
    if training.global_batch_size == 0 or training.global_batch_size % share:
        raise UserError(
            f"training.global_batch_size is {training.global_batch_size}, which {data_parallel} "
            f"data-parallel ranks with training.local_batch_size {training.local_batch_size} do not "
            f"divide: set it to a multiple of {share}"
        )
    if delays_gradients(parallelism):
        try:
            check_microbatches(config, accumulation_of(training, data_parallel))
        except ValueError as error:
            raise UserError(str(error)) from None


def _check_passes(config: Trainer.Config) -> None:
    """Refuse numbers of microbatches that torch's schedules do not support."""
    parallelism, size = config.parallelism, config.parallelism.pipeline_parallel_microbatch_size
    degree, name = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    microbatches, stages = config.training.local_batch_size // size, count_stages(parallelism)
    rounds = max(1, microbatches // degree)
    if name.lower() in ("1f1b", "dualpipev") and microbatches < stages:
        needs, fix = f"at least as many microbatches as its {stages} stages", f"at least {stages * size}"
    elif name.lower() in ("interleaved1f1b", "interleavedzerobubble") and microbatches % rounds:
        needs, fix = f"microbatches divisible by its {rounds} rounds", f"a multiple of {degree * size}"
    else:
        return
    raise UserError(
        f"{name} needs {needs}, not {microbatches} (training.local_batch_size / "
        f"parallelism.pipeline_parallel_microbatch_size): set training.local_batch_size to {fix}"
    )


def _check_schedule(config: Trainer.Config) -> None:
    name = config.parallelism.pipeline_parallel_schedule
    table = config.parallelism.pipeline_parallel_schedule_csv
    if table:
        if not os.path.isfile(table):
            raise UserError(
                f"parallelism.pipeline_parallel_schedule_csv is {table}, which is not a file: set it to the "
                "CSV file of a schedule, or leave it out"
            )
        if delays_gradients(config.parallelism):
            raise UserError(
                "parallelism.pipeline_parallel_schedule_csv is for torch's schedules, and Async2BW has "
                "its own order: leave it out"
            )
        return
    if name.lower() not in {known.lower() for known in SCHEDULES}:
        raise UserError(unknown_name("parallelism.pipeline_parallel_schedule", name, SCHEDULES))


def _check_stages(config: Trainer.Config) -> None:
    parallelism = config.parallelism
    degree = parallelism.pipeline_parallel_degree
    check_tying(config)
    layers = getattr(config.model_spec.model, "layers", None)
    if degree < 2 or parallelism.pipeline_parallel_schedule_csv:
        return
    if measures_balance(config):  # `preflight.check` checks that split
        if layers is None or count_stages(parallelism) <= len(layers) + 2:
            _check_passes(config)
        return
    if layers is not None and parallelism.module_fqns_per_model_part is None:
        _check_split(config, len(layers))
    _check_passes(config)


def check_tying(config: Trainer.Config) -> None:
    """Refuse a tied weight on two stages if nothing keeps its copies equal.

    Raises:
        UserError: one sentence that names the cause and the fix.
    """
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree < 2 or not is_tied(config.model_spec.model):
        return
    if not delays_gradients(parallelism):
        raise UserError(
            f"the model's embedding and head are tied, which {parallelism.pipeline_parallel_schedule} does "
            f"not support: set parallelism.pipeline_parallel_schedule to {ASYNC_SCHEDULE}, or "
            "parallelism.pipeline_parallel_degree to 1"
        )
    if not isinstance(config.optimizer, AsyncOptimizers.Config):
        raise UserError(
            "the model's embedding and head are tied, with a copy on two stages, and "
            f"{type(config.optimizer).__qualname__} may update the copies differently: use an "
            "AsyncOptimizers.Config for optimizer, or set parallelism.pipeline_parallel_degree to 1"
        )


def _check_split(config: Trainer.Config, layers: int) -> None:
    parallelism = config.parallelism
    first = parallelism.pipeline_parallel_first_stage_less_layers
    last = parallelism.pipeline_parallel_last_stage_less_layers
    stages = count_stages(parallelism)
    if parallelism.pipeline_parallel_layers_per_stage is not None:
        stages = _stages_by_layers(config, layers + first + last)
    try:
        split_layers(stages, layers, first, last)
    except ValueError:
        raise UserError(
            f"a model of {layers} layers does not split into {stages} stages (the embedding counts as "
            f"{first} layers and the head as {last}): lower parallelism.pipeline_parallel_degree"
        ) from None


def _stages_by_layers(config: Trainer.Config, layers: int) -> int:
    """The stages by `pipeline_parallel_layers_per_stage`; `layers` include the embedding and the head."""
    parallelism, each = config.parallelism, config.parallelism.pipeline_parallel_layers_per_stage
    stages = math.ceil(layers / each)
    if not takes_stages(parallelism, stages):
        raise UserError(
            f"parallelism.pipeline_parallel_layers_per_stage is {each}, which makes {stages} stages of "
            f"{layers} layers (embedding and head counted), but {parallelism.pipeline_parallel_schedule} on "
            f"{parallelism.pipeline_parallel_degree} ranks has {count_stages(parallelism)}: leave it out"
        )
    return stages
