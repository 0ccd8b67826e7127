"""The layout of a run: degrees of parallelism, stages, microbatches."""

import math
from dataclasses import dataclass

from torchtitan.config import ParallelismConfig
from torchtitan.trainer import Trainer

from titan_async.pipelining.programs import V_SHAPED, schedule_programs
from titan_async.pipelining.simulation import Task
from titan_async.training._titan_internals import split_layers
from titan_async.training.pipeline.balance import count_stages
from titan_async.training.pipeline.schedule import (
    ASYNC_SCHEDULE,
    accumulation_of,
    delays_gradients,
    is_async,
    overlaps,
)

__all__ = ["Layout", "layout_of", "microbatch_size_of", "ranks_without_shards", "split_of"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of parallelism, batch and stages of a run.

    Ranks are numbered as by torchtitan, with tensor parallelism innermost and stages `world_size / pp` ranks
    apart.
    """

    schedule: str
    """As in `parallelism.pipeline_parallel_schedule`."""
    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int
    ep: int
    """Divides the dp_shard x tp ranks of a stage."""
    microbatch_size: int
    """Sequences."""
    microbatches: int
    """Per batch and data-parallel rank."""
    passes: int
    """Pipeline flushes per batch of a synchronous schedule (gradient accumulation); 1 for Async2BW."""
    seq_len: int
    lookahead: int
    overlap: bool = False
    """Whether stages run overlapped pairs."""
    steps: int
    """Optimizer updates of the whole run."""
    synchronous_steps: int = 0
    """Steps at the start that drain the pipeline."""
    stages: tuple[tuple[str, ...], ...]
    """The names of the parts on each stage; see `traced_parts`."""

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def data_parallel(self) -> int:
        """Data-parallel ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def tokens_per_microbatch(self) -> int:
        return self.microbatch_size * self.seq_len

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks."""
        return self.tokens_per_microbatch * self.microbatches * self.data_parallel

    @property
    def delayed(self) -> bool:
        """Whether gradients are delayed by one update."""
        return self.schedule == ASYNC_SCHEDULE and self.pp > 1

    @property
    def degrees(self) -> str:
        """The degrees above one, as text."""
        degrees = {
            "stages": self.pp,
            "replicas": self.dp_replicate,
            "shards": self.dp_shard,
            "tensor": self.tp,
        }
        words = " x ".join(f"{size} {name}" for name, size in degrees.items() if size > 1) or "one rank"
        return f"{words}, experts over {self.ep}" if self.ep > 1 else words

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """The stage indices of a pipeline rank, in ascending order."""
        if len(self.stages) == self.pp:
            return (pp_rank,)
        if self.schedule in V_SHAPED:
            return (pp_rank, 2 * self.pp - 1 - pp_rank)
        return tuple(range(pp_rank, len(self.stages), self.pp))

    def rank_of(self, stage: int) -> int:
        """The pipeline rank of a stage."""
        return next(rank for rank in range(self.pp) if stage in self.stages_of(rank))

    def programs(self, microbatches: int, batches: int, drains: bool = False) -> list[list[Task]]:
        """Each pipeline rank's tasks.

        Args:
            microbatches: of each batch.
            batches: how many.
            drains: whether they belong to a synchronous start.

        Raises:
            ValueError: if the schedule does not support these numbers.
        """
        schedule = self.schedule if self.pp > 1 else "1F1B"  # equivalent for one stage
        each = len(self.stages) // self.pp
        return schedule_programs(
            schedule, self.pp, microbatches, batches, self.lookahead, self.passes, each, self.overlap, drains
        )


def layout_of(config: Trainer.Config, world_size: int) -> Layout:
    """The layout of a configuration that has passed `preflight.check`.

    Args:
        config: the resolved configuration.
        world_size: of the run; determines `data_parallel_shard_degree` if that is -1.

    Examples:
        >>> from titan_async.config.recipe_file import resolve
        >>> layout = layout_of(resolve(["debug_cpu.toml"]), world_size=2)
        >>> layout.delayed, layout.tokens_per_microbatch, layout.stages_of(0)
        (True, 512, (0,))
    """
    parallelism, training = config.parallelism, config.training
    shards = parallelism.data_parallel_shard_degree
    if shards == -1:
        shards = max(world_size // ranks_without_shards(parallelism), 1)
    passes = accumulation_of(training, shards * parallelism.data_parallel_replicate_degree)
    size = microbatch_size_of(config)
    name = parallelism.pipeline_parallel_schedule
    return Layout(
        schedule=ASYNC_SCHEDULE if is_async(parallelism) else name,
        pp=parallelism.pipeline_parallel_degree,
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=shards,
        tp=parallelism.tensor_parallel_degree,
        ep=parallelism.expert_parallel_degree,
        microbatch_size=size,
        microbatches=training.local_batch_size // size * passes,
        passes=1 if delays_gradients(parallelism) else passes,
        seq_len=training.seq_len,
        lookahead=config.pipeline.lookahead if delays_gradients(parallelism) else 0,
        overlap=overlaps(config),
        steps=training.steps,
        synchronous_steps=(
            config.pipeline.resolved_synchronous_steps(training.steps) if delays_gradients(parallelism) else 0
        ),
        stages=split_of(parallelism, len(config.model_spec.model.layers)),
    )


def microbatch_size_of(config: Trainer.Config) -> int:
    """Sequences per microbatch; without a pipeline, the local batch size."""
    parallelism, training = config.parallelism, config.training
    pipelined = parallelism.pipeline_parallel_degree > 1
    return parallelism.pipeline_parallel_microbatch_size if pipelined else training.local_batch_size


def ranks_without_shards(parallelism: ParallelismConfig) -> int:
    """The product of all degrees except that of FSDP."""
    return (
        parallelism.pipeline_parallel_degree
        * parallelism.data_parallel_replicate_degree
        * parallelism.tensor_parallel_degree
        * parallelism.context_parallel_degree
    )


def split_of(parallelism: ParallelismConfig, num_layers: int) -> tuple[tuple[str, ...], ...]:
    """The parts of each stage: "tok_embeddings", "layers.0", ..., "head".

    A split by times measured at the start of training is assumed to balance the number of layers.

    Raises:
        ValueError: if there are fewer layers than stages need.
    """
    if parallelism.pipeline_parallel_degree == 1:
        modules = [["tok_embeddings", *(f"layers.{i}" for i in range(num_layers)), "norm", "lm_head"]]
    elif parallelism.module_fqns_per_model_part is not None:
        modules = parallelism.module_fqns_per_model_part
    else:
        first = parallelism.pipeline_parallel_first_stage_less_layers
        last = parallelism.pipeline_parallel_last_stage_less_layers
        stages, each = count_stages(parallelism), parallelism.pipeline_parallel_layers_per_stage
        if each is not None:
            stages = math.ceil((num_layers + first + last) / each)
        modules = split_layers(stages, num_layers, first, last)
    return tuple(
        tuple("head" if name == "lm_head" else name for name in stage if name != "norm") for stage in modules
    )
