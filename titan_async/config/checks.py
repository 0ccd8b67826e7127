"""Checks of single values of a configuration: ranges of numbers, folders outside of the run's folder."""

import dataclasses
import math
import os
from collections.abc import Iterator
from typing import Any

from titan_async.config.device import has_accelerator
from titan_async.errors import UserError

__all__ = ["check_folders", "check_numbers"]

_MAX = 2**31 - 1
"""Maximum of integers that have no range below: steps, tokens, seconds."""

_AT_LEAST_0 = """
    training.steps training.max_norm lr_scheduler.warmup_steps pipeline.synchronous_steps
    optimizer.sgd.lr optimizer.sgd.momentum optimizer.sgd.weight_decay
    parallelism.pipeline_parallel_first_stage_less_layers parallelism.pipeline_parallel_last_stage_less_layers
    profiler.profiler_repeat profiler.profiler_skip_first profiler.profiler_skip_first_wait
    profiler.profiler_warmup comm.trace_buf_size debug.seed
"""

_AT_LEAST_1 = """
    metrics.log_freq training.seq_len training.local_batch_size training.gc_freq max_skipped_updates
    lr_scheduler.total_steps parallelism.pipeline_parallel_degree parallelism.data_parallel_replicate_degree
    parallelism.tensor_parallel_degree parallelism.context_parallel_degree
    parallelism.pipeline_parallel_microbatch_size parallelism.pipeline_parallel_layers_per_stage
    profiler.profile_freq profiler.profiler_active profiler.memory_snapshot_freq
    profiler.memory_snapshot_max_entries comm.init_timeout_seconds comm.train_timeout_seconds
    loss.global_vocab_size loss.num_chunks validator.freq
"""

_FRACTIONS = """
    lr_scheduler.warmup_ratio lr_scheduler.decay_ratio lr_scheduler.min_lr_factor pipeline.synchronous_ratio
"""

_LOADER_RANGES = {
    "num_workers": (0, 1024),
    "prefetch_factor": (1, 1024),
    "data_seed": (0, 2**63 - 1),
}

_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(_AT_LEAST_0.split(), (0, _MAX)),
    **dict.fromkeys(_AT_LEAST_1.split(), (1, _MAX)),
    **dict.fromkeys(_FRACTIONS.split(), (0, 1)),
    **{
        f"{loader}.{name}": limits
        for loader in ("dataloader", "validator.dataloader")
        for name, limits in _LOADER_RANGES.items()
    },
    "training.local_batch_size": (1, 2**20),
    "training.max_norm": (0, math.inf),
    "debug.seed": (0, 2**63 - 1),
}
"""Minimum and maximum of numbers that neither torchtitan nor torch checks; other modules check their own."""

_SUBFOLDERS = """
    checkpoint.folder metrics.save_tb_folder profiler.save_traces_folder profiler.save_memory_snapshot_folder
    comm.save_traces_folder comm.save_traces_file_prefix debug.save_config_file
"""
"""Fields that torchtitan appends to `dump_folder`."""


def check_numbers(config: Any) -> None:
    """Checks the range of each number.

    Args:
        config: a resolved configuration; the model is not checked.

    Raises:
        UserError: a number is out of range.
    """
    for name, value in _numbers(config, ""):
        if name == "validator.freq" and not config.validator.enable:
            continue
        least, most = _RANGES.get(name, (-_MAX, _MAX if isinstance(value, int) else math.inf))
        if math.isnan(value) or (math.isinf(value) and name != "training.max_norm"):
            raise UserError(f"{name} is {value}: set it to a finite number")
        if value < least:
            raise UserError(f"{name} is {value}: set it to at least {least}")
        if value > most:
            raise UserError(f"{name} is {value}: set it to at most {most}")
    if config.parallelism.data_parallel_shard_degree == 0:
        raise UserError(
            "parallelism.data_parallel_shard_degree is 0: set it to at least 1, or to -1 for all remaining "
            "ranks"
        )
    profiler = config.profiler
    window = profiler.profiler_warmup + profiler.profiler_active
    if profiler.enable_profiling and profiler.profile_freq < window:
        raise UserError(
            f"profiler.profile_freq is {profiler.profile_freq}, less than the {window} steps of "
            f"profiler_warmup and profiler_active: set it to at least {window}"
        )
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


def _check_workers(name: str, loader: Any) -> None:
    workers = getattr(loader, "num_workers", 1)
    if workers or (workers is None and has_accelerator()):
        return
    for field in ("prefetch_factor", "persistent_workers"):
        if getattr(loader, field, None):
            raise UserError(
                f"{name}.{field} needs worker processes, but there are none: set {name}.num_workers to at "
                f"least 1, or omit {field}"
            )


def check_folders(config: Any) -> None:
    """Checks that paths relative to the run's folder are inside it.

    Raises:
        UserError: a path is outside.
    """
    for name in _SUBFOLDERS.split():
        section, field = name.split(".")
        path = getattr(getattr(config, section), field, None)
        if path is None or "://" in path:  # a URL is not a path in a folder
            continue
        if os.path.isabs(path) or os.path.normpath(path).split(os.sep)[0] == os.pardir:
            raise UserError(
                f"{name} is {path}, which is outside of the run's folder: use a path inside it, or change "
                "dump_folder"
            )
