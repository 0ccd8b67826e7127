"""Which numbers a configuration may hold: those that no run could use are refused before anything else."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from titan_async.config.device import has_accelerator
from titan_async.errors import UserError

__all__ = ["check_numbers"]

_MOST = 2**31 - 1
"""Of a whole number that is not below: of steps, tokens, seconds."""

_AT_LEAST_0 = (
    "training.steps",
    "training.max_norm",
    "lr_scheduler.warmup_steps",
    "pipeline.synchronous_steps",
    "optimizer.sgd.lr",
    "optimizer.sgd.momentum",
    "optimizer.sgd.weight_decay",
    "parallelism.pipeline_parallel_first_stage_less_layers",
    "parallelism.pipeline_parallel_last_stage_less_layers",
    "profiler.profiler_repeat",
    "profiler.profiler_skip_first",
    "profiler.profiler_skip_first_wait",
    "profiler.profiler_warmup",
    "comm.trace_buf_size",
    "debug.seed",
)

_AT_LEAST_1 = (
    "metrics.log_freq",
    "training.seq_len",
    "training.local_batch_size",
    "training.gc_freq",
    "max_skipped_updates",
    "lr_scheduler.total_steps",
    "parallelism.pipeline_parallel_degree",
    "parallelism.data_parallel_replicate_degree",
    "parallelism.tensor_parallel_degree",
    "parallelism.context_parallel_degree",
    "parallelism.pipeline_parallel_microbatch_size",
    "parallelism.pipeline_parallel_layers_per_stage",
    "profiler.profile_freq",
    "profiler.profiler_active",
    "profiler.memory_snapshot_freq",
    "profiler.memory_snapshot_max_entries",
    "comm.init_timeout_seconds",
    "comm.train_timeout_seconds",
    "loss.global_vocab_size",
    "loss.num_chunks",
    "validator.freq",
)

_OF_LOADERS = {
    "num_workers": (0, 1024),
    "prefetch_factor": (1, 1024),
    "data_seed": (0, 2**63 - 1),
}

_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(_AT_LEAST_0, (0, _MOST)),
    **dict.fromkeys(_AT_LEAST_1, (1, _MOST)),
    **{
        f"{loader}.{name}": limits
        for loader in ("dataloader", "validator.dataloader")
        for name, limits in _OF_LOADERS.items()
    },
    "lr_scheduler.warmup_ratio": (0, 1),
    "lr_scheduler.decay_ratio": (0, 1),
    "lr_scheduler.min_lr_factor": (0, 1),
    "pipeline.synchronous_ratio": (0, 1),
    "training.local_batch_size": (1, 2**20),
    "training.max_norm": (0, math.inf),
    "debug.seed": (0, 2**63 - 1),
}
"""The least and the most of what torchtitan and torch take unseen; other modules judge what they know."""


def check_numbers(config: Any) -> None:
    """Refuse numbers of which no run could make sense, whatever the others are.

    Args:
        config: a resolved configuration; the model, which recipes alone describe, is not looked at.

    Raises:
        UserError: one sentence that names the field and its limits.
    """
    for name, value in _numbers(config, ""):
        if name == "validator.freq" and not config.validator.enable:
            continue
        least, most = _RANGES.get(name, (-_MOST, _MOST if isinstance(value, int) else math.inf))
        if math.isnan(value) or (math.isinf(value) and name != "training.max_norm"):
            raise UserError(f"{name} is {value}: set it to a number that is finite")
        if value < least:
            raise UserError(f"{name} is {value}: set it to at least {least}")
        if value > most:
            raise UserError(f"{name} is {value}: set it to at most {most}")
    if config.parallelism.data_parallel_shard_degree == 0:
        raise UserError(
            "parallelism.data_parallel_shard_degree is 0: set it to at least 1, or to -1 for the ranks that "
            "the other degrees leave"
        )
    _check_profiler(config.profiler)
    _check_workers("dataloader", config.dataloader)
    if config.validator.enable:
        _check_workers("validator.dataloader", config.validator.dataloader)


def _numbers(section: Any, prefix: str) -> Iterator[tuple[str, int | float]]:
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if field.name == "model_spec" or isinstance(value, bool | type):
            continue
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{prefix}{field.name}.")
        elif isinstance(value, int | float):
            yield f"{prefix}{field.name}", value


def _check_profiler(profiler: Any) -> None:
    spans = profiler.profiler_warmup + profiler.profiler_active
    if profiler.enable_profiling and profiler.profile_freq < spans:
        raise UserError(
            f"profiler.profile_freq is {profiler.profile_freq}, less than the {spans} steps of "
            f"profiler_warmup and profiler_active: set it to at least {spans}"
        )


def _check_workers(name: str, loader: Any) -> None:
    workers = getattr(loader, "num_workers", 1)
    if workers or (workers is None and has_accelerator()):
        return
    for field in ("prefetch_factor", "persistent_workers"):
        if getattr(loader, field, None):
            raise UserError(
                f"{name}.{field} is for worker processes, of which there are none: set {name}.num_workers to "
                f"at least 1, or leave out {field}"
            )
