"""Variants of a configuration with another number of nodes, another layout or another schedule.

The global batch size, and so the training data, stays the same.
"""

import dataclasses
from dataclasses import dataclass

from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.trainer import Trainer

from titan_async.errors import UserError
from titan_async.planning.layout import ranks_without_shards, split_of
from titan_async.training.pipeline.schedule import ASYNC_SCHEDULE
from titan_async.training.preflight.layout import check_layout, check_tying, takes_stages

__all__ = [
    "Degrees",
    "at_degrees",
    "on_nodes",
    "on_own_ranks",
    "sequences_of",
    "with_overlap",
    "with_schedule",
    "world_size_of",
]


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """The settings that `at_degrees` changes."""

    pp: int
    dp_replicate: int
    dp_shard: int
    ep: int
    microbatch_size: int
    lookahead: int
    overlap: bool = False


def on_own_ranks(config: Trainer.Config, per_node: int) -> Trainer.Config:
    """A copy whose shard degree is not -1: -1 becomes the rest of one node, or 1."""
    parallelism = config.parallelism
    if parallelism.data_parallel_shard_degree != -1:
        return config
    shards = max(per_node // ranks_without_shards(config.parallelism), 1)
    return _replaced(config, parallelism=dataclasses.replace(parallelism, data_parallel_shard_degree=shards))


def on_nodes(config: Trainer.Config, nodes: int, per_node: int) -> Trainer.Config:
    """A copy for a number of nodes; the shard degree follows from them.

    Raises:
        UserError: if the other degrees do not divide the ranks, or the ranks the batch.
    """
    if nodes < 1:
        raise UserError(f"--nodes is {nodes}: set it to at least 1")
    world_size, fixed = nodes * per_node, ranks_without_shards(config.parallelism)
    if world_size % fixed:
        raise UserError(
            f"--nodes {nodes} makes {world_size} ranks ({per_node} per node), which the product {fixed} of "
            "pipeline, replicate, tensor and context degrees does not divide: change --nodes or "
            "parallelism.pipeline_parallel_degree"
        )
    parallelism = dataclasses.replace(config.parallelism, data_parallel_shard_degree=world_size // fixed)
    return _with_parallelism(config, parallelism)


def at_degrees(config: Trainer.Config, degrees: Degrees) -> Trainer.Config:
    """A copy with other degrees.

    Raises:
        UserError: if `check_layout` refuses them.
    """
    parallelism = dataclasses.replace(
        config.parallelism,
        pipeline_parallel_degree=degrees.pp,
        data_parallel_replicate_degree=degrees.dp_replicate,
        data_parallel_shard_degree=degrees.dp_shard,
        expert_parallel_degree=degrees.ep,
        pipeline_parallel_microbatch_size=degrees.microbatch_size,
    )
    pipeline = dataclasses.replace(config.pipeline, lookahead=0, overlap=False)
    config = dataclasses.replace(config, pipeline=pipeline)
    config = _with_parallelism(config, parallelism)
    pipeline = dataclasses.replace(pipeline, lookahead=degrees.lookahead, overlap=degrees.overlap)
    config = _replaced(config, pipeline=pipeline)
    check_layout(config, world_size=world_size_of(config))
    return config


def with_schedule(config: Trainer.Config, schedule: str) -> Trainer.Config:
    """A copy under another schedule, without gradient accumulation over several passes.

    A split into another number of stages than the schedule takes is replaced by the default one.

    Raises:
        UserError: if the schedule does not support the numbers.
    """
    parallelism = dataclasses.replace(config.parallelism, pipeline_parallel_schedule=schedule)
    explicit = parallelism.pipeline_parallel_layers_per_stage or parallelism.module_fqns_per_model_part
    if explicit and not takes_stages(
        parallelism, len(split_of(parallelism, len(config.model_spec.model.layers)))
    ):
        parallelism = dataclasses.replace(
            parallelism, pipeline_parallel_layers_per_stage=None, module_fqns_per_model_part=None
        )
    if schedule != ASYNC_SCHEDULE:
        config = dataclasses.replace(config, pipeline=dataclasses.replace(config.pipeline, lookahead=0))
    changed = _with_parallelism(config, parallelism)
    check_tying(changed)
    return changed


def with_overlap(config: Trainer.Config, overlap: bool) -> Trainer.Config:
    """A copy with overlapped pairs, or without."""
    return dataclasses.replace(config, pipeline=dataclasses.replace(config.pipeline, overlap=overlap))


def world_size_of(config: Trainer.Config) -> int:
    """The world size of a configuration whose shard degree is not -1."""
    return ranks_without_shards(config.parallelism) * int(config.parallelism.data_parallel_shard_degree)


def sequences_of(training: TrainingConfig, parallelism: ParallelismConfig) -> int:
    """The global batch size in sequences, if the shard degree is not -1."""
    if training.global_batch_size > 0:
        return int(training.global_batch_size)
    return int(training.local_batch_size * _data_parallel(parallelism))


def _data_parallel(parallelism: ParallelismConfig) -> int:
    return int(parallelism.data_parallel_replicate_degree * parallelism.data_parallel_shard_degree)


def _with_parallelism(config: Trainer.Config, parallelism: ParallelismConfig) -> Trainer.Config:
    """A copy with the same global batch size; a shard degree of -1 stands for the new one."""
    open_shards = config.parallelism.data_parallel_shard_degree == -1
    sequences = sequences_of(config.training, parallelism if open_shards else config.parallelism)
    data_parallel = _data_parallel(parallelism)
    if sequences % data_parallel:
        raise UserError(
            f"a batch of {sequences} sequences cannot be divided evenly over {data_parallel} data-parallel "
            f"ranks: set training.global_batch_size to a multiple of {data_parallel}, or use fewer ranks"
        )
    local = sequences // data_parallel
    if parallelism.pipeline_parallel_degree == 1:  # without a pipeline, microbatches are passes
        local = min(parallelism.pipeline_parallel_microbatch_size, local)
    training = dataclasses.replace(config.training, local_batch_size=local, global_batch_size=sequences)
    return _replaced(config, parallelism=parallelism, training=training)


def _replaced(config: Trainer.Config, **changes: object) -> Trainer.Config:
    try:
        return dataclasses.replace(config, **changes)
    except ValueError as error:
        raise UserError(" ".join(str(error).split())) from error
