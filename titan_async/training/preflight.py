"""What can be known to be wrong before any process starts: names, files, and sizes that do not fit."""

import copy
import os
import tempfile
from pathlib import Path

import torch
from torch import nn
from torchtitan.trainer import Trainer

from titan_async.checkpoint.safetensors_files import SafetensorsFolder
from titan_async.data import DocumentEncoder
from titan_async.errors import UserError
from titan_async.training._titan_internals import split_layers
from titan_async.training.balance import KNOWN_MODULES, count_stages
from titan_async.training.checkpoint import check_index, complete_steps
from titan_async.training.data_preflight import check_data
from titan_async.training.edit import unknown_name
from titan_async.training.number_ranges import check_numbers
from titan_async.training.optimizer_preflight import check_optimizer
from titan_async.training.pipeline import (
    ASYNC_SCHEDULE,
    accumulation_of,
    check_microbatches,
    delays_gradients,
)

__all__ = ["SCHEDULES", "build_on_meta", "check", "check_layout"]

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
"""The schedules that `parallelism.pipeline_parallel_schedule` can name."""

_STATES = ("optimizer", "lr_scheduler", "dataloader", "train_state")
"""What a checkpoint holds beside the model."""

_TOKENIZER = "SmolLM2-135M"
"""The folder in which the recipes for GPUs expect their tokenizer."""

_DOWNLOAD = f"hf download HuggingFaceTB/{_TOKENIZER} tokenizer.json tokenizer_config.json --local-dir"


def check(config: Trainer.Config, *, world_size: int) -> None:
    """Refuse a configuration that cannot train.

    Args:
        config: the resolved configuration; not changed.
        world_size: processes of the whole run.

    Raises:
        UserError: one sentence that names the cause and the mend.
    """
    check_layout(config, world_size=world_size)
    _check_checkpoints(config)
    _check_tokenizer(config)
    model = build_on_meta(config)
    _check_balance(config, model)
    check_optimizer(config.optimizer, model)
    check_data(config)
    _check_folders(config)  # last, since it makes one


def check_layout(config: Trainer.Config, *, world_size: int) -> None:
    """Refuse numbers that do not go together: of ranks, stages, microbatches and experts. Opens no file.

    Args:
        config: the resolved configuration; not changed.
        world_size: processes of the whole run.

    Raises:
        UserError: one sentence that names the cause and the mend.
    """
    _check_numbers(config)
    _check_schedule(config)
    _check_processes(config, world_size)
    _check_stages(config)


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
    rest = (
        parallelism.pipeline_parallel_degree
        * parallelism.data_parallel_replicate_degree
        * parallelism.tensor_parallel_degree
        * parallelism.context_parallel_degree
    )
    shards = parallelism.data_parallel_shard_degree
    if shards == -1:
        shards = max(world_size // rest, 1)
    if rest * shards != world_size:
        raise UserError(
            f"{world_size} processes were started, but the degrees of parallelism multiply to "
            f"{rest * shards}: start as many, or change the degrees"
        )
    _check_experts(config, shards)
    _check_batch(config, shards * parallelism.data_parallel_replicate_degree)


def _check_experts(config: Trainer.Config, shards: int) -> None:
    parallelism, degree = config.parallelism, config.parallelism.expert_parallel_degree
    # Expert parallelism takes no processes of its own.
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


def _check_schedule(config: Trainer.Config) -> None:
    name = config.parallelism.pipeline_parallel_schedule
    table = config.parallelism.pipeline_parallel_schedule_csv
    if table:
        if not os.path.isfile(table):
            raise UserError(
                f"parallelism.pipeline_parallel_schedule_csv is {table}, which is no file: name one with a "
                "schedule, or leave it out"
            )
        return
    if name.lower() not in {known.lower() for known in SCHEDULES}:
        raise UserError(unknown_name("parallelism.pipeline_parallel_schedule", name, SCHEDULES))


def _check_stages(config: Trainer.Config) -> None:
    parallelism = config.parallelism
    stages = parallelism.pipeline_parallel_degree
    if stages > 1 and getattr(config.model_spec.model, "enable_weight_tying", False):
        raise UserError(
            "the model's embedding and head are one weight, which cannot lie on two pipeline stages: set "
            "parallelism.pipeline_parallel_degree to 1, or choose a model that does not tie them"
        )
    layers = getattr(config.model_spec.model, "layers", None)
    if stages < 2 or layers is None or parallelism.module_fqns_per_model_part is not None:
        return
    if parallelism.pipeline_parallel_layers_per_stage is not None:
        return  # torchtitan judges this one
    if _measures_balance(config):
        return  # counts no layers: see `_check_balance`
    first = parallelism.pipeline_parallel_first_stage_less_layers
    last = parallelism.pipeline_parallel_last_stage_less_layers
    try:
        split_layers(stages, len(layers), first, last)
    except ValueError:
        raise UserError(
            f"a model of {len(layers)} layers does not split into {stages} stages (the embedding counts as "
            f"{first} layers and the head as {last}): lower parallelism.pipeline_parallel_degree"
        ) from None


def _check_checkpoints(config: Trainer.Config) -> None:
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        return
    unknown = [name for name in checkpoint.exclude_from_loading if name not in _STATES]
    if unknown:
        raise UserError(unknown_name("checkpoint.exclude_from_loading", unknown[0], _STATES))
    folder = Path(config.dump_folder, checkpoint.folder)
    step, saved = checkpoint.load_step, complete_steps(folder)
    if step != -1 and step not in saved:
        there = f"there are steps {', '.join(map(str, saved))}" if saved else "there is none"
        raise UserError(f"checkpoint.load_step is {step}, but {folder} has no such checkpoint: {there}")
    if step == -1 and saved and saved[-1] > config.training.steps:
        raise UserError(
            f"training.steps is {config.training.steps}, but {folder} has a checkpoint "
            f"of step {saved[-1]}: raise training.steps to go on from it, or choose another dump_folder"
        )
    path = checkpoint.initial_load_path
    if path and os.path.isabs(path) and not os.path.isdir(path):
        raise UserError(f"checkpoint.initial_load_path is {path}, which is not a folder: give a checkpoint's")
    if saved:
        check_index(folder / f"step-{saved[-1] if step == -1 else step}")
    elif checkpoint.initial_load_in_hf:
        if "://" not in (path or ""):
            SafetensorsFolder(path or config.hf_assets_path)  # which refuses pickled weights
    elif path and "://" not in path:
        check_index(Path(path))


def _check_folders(config: Trainer.Config) -> None:
    folder, checkpoint = Path(config.dump_folder), config.checkpoint
    _check_writable(folder, "dump_folder", make=False)
    if checkpoint.enable and not checkpoint.load_only and "://" not in checkpoint.folder:
        _check_writable(folder / checkpoint.folder, "checkpoint.folder", make=False)
    _check_writable(folder, "dump_folder", make=True)


def _check_writable(folder: Path, flag: str, *, make: bool) -> None:
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        existing = folder
        while not existing.exists():
            existing = existing.parent
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write to the folder {folder}: {error.strerror}; choose another with --{flag}"
        ) from None


def _check_tokenizer(config: Trainer.Config) -> None:
    folder = Path(config.hf_assets_path)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json", "vocab.txt")):
        command = f"; the recipe's own comes with: {_DOWNLOAD} {folder}" if folder.name == _TOKENIZER else ""
        raise UserError(
            f"hf_assets_path is {folder}, which holds no tokenizer: set it to a folder with a "
            f"tokenizer.json{command}"
        )
    size = getattr(config.model_spec.model, "vocab_size", None)
    if size is not None and (folder / "tokenizer.json").is_file():
        entries = DocumentEncoder(folder).vocab_size
        if entries > size:
            raise UserError(
                f"the tokenizer in {folder} has {entries} entries but the model has room for {size}: choose "
                "another hf_assets_path or a recipe of that vocabulary"
            )


def build_on_meta(config: Trainer.Config) -> nn.Module:
    """The model that a configuration describes, without memory and without parallelism.

    Raises:
        UserError: the model does not go with other settings.
    """
    config = copy.deepcopy(config)
    try:
        config.model_spec.model.update_from_config(config=config)
        with torch.device("meta"):
            return config.model_spec.model.build()
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"the model: {' '.join(str(error).split())}") from error


def _measures_balance(config: Trainer.Config) -> bool:
    pipeline = getattr(config, "pipeline", None)  # torchtitan's own trainer has no such section
    return (
        pipeline is not None
        and pipeline.balance == "measured"
        and config.parallelism.pipeline_parallel_degree > 1
    )


def _check_balance(config: Trainer.Config, model: nn.Module) -> None:
    if not _measures_balance(config):
        return
    parallelism = config.parallelism
    for name in ("module_fqns_per_model_part", "pipeline_parallel_layers_per_stage"):
        if getattr(parallelism, name) is not None:
            raise UserError(
                f'pipeline.balance = "measured" chooses itself what parallelism.{name} prescribes: '
                f'unset {name}, or set pipeline.balance to "layers"'
            )
    if parallelism.expert_parallel_degree > 1:
        raise UserError(
            'pipeline.balance = "measured" times layers on one process, which does not work with '
            f"parallelism.expert_parallel_degree = {parallelism.expert_parallel_degree}: set it to 1, or "
            'pipeline.balance to "layers"'
        )
    children = {name for name, child in model.named_children() if any(True for _ in child.parameters())}
    if children != set(KNOWN_MODULES):
        raise UserError(
            f'pipeline.balance = "measured" needs a model of {", ".join(KNOWN_MODULES)}, but '
            f'{config.model_spec.name} has {", ".join(sorted(children))}: set it to "layers"'
        )
    layers, stages = len(config.model_spec.model.layers), count_stages(parallelism)
    if stages > layers + 2:
        raise UserError(
            f"a model of {layers} layers does not split into {stages} stages, at least one on each but the "
            "first and the last: lower parallelism.pipeline_parallel_degree"
        )
