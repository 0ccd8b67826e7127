"""What can be known to be wrong before any process starts: names, files, and sizes that do not fit."""

import copy
import os
import tempfile
from pathlib import Path

import torch
from torch import nn
from torchtitan.trainer import Trainer

from titan_async.checkpoint.safetensors_files import SafetensorsFolder
from titan_async.config.edit import unknown_name
from titan_async.data import DocumentEncoder
from titan_async.errors import UserError
from titan_async.training.balance import KNOWN_MODULES, count_stages, measures_balance
from titan_async.training.checkpoint import check_index, complete_steps
from titan_async.training.data_preflight import check_data
from titan_async.training.layout_preflight import check_layout
from titan_async.training.optimizer_preflight import check_optimizer

__all__ = ["build_on_meta", "check"]

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


def _check_balance(config: Trainer.Config, model: nn.Module) -> None:
    if not measures_balance(config):
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
