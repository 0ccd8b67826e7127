"""Checks of a configuration before any process starts: names, files, and sizes that do not fit."""

import copy
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import Configurable
from torchtitan.config.override import apply_overrides
from torchtitan.models.common import dist_gemm
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.common.token_dispatcher import (
    DeepEPTokenDispatcher,
    HybridEPTokenDispatcher,
    MinimalAsyncEPTokenDispatcher,
)
from torchtitan.trainer import Trainer

from titan_async.checkpoint.safetensors_files import SafetensorsFolder
from titan_async.config.device import has_accelerator
from titan_async.config.suggestions import unknown_name
from titan_async.data import DocumentEncoder
from titan_async.data.encoder import entries_of
from titan_async.errors import UserError
from titan_async.training.checkpoint.folders import check_index, complete_steps
from titan_async.training.models.tying import update_model
from titan_async.training.pipeline.balance import KNOWN_MODULES, count_stages, measures_balance
from titan_async.training.pipeline.schedule import delays_gradients
from titan_async.training.preflight.data import check_data
from titan_async.training.preflight.layout import check_layout, data_parallel_degree, takes_stages
from titan_async.training.preflight.optimizer import check_optimizer

__all__ = ["build_on_meta", "check", "check_messages"]

_STATES = ("optimizer", "lr_scheduler", "dataloader", "train_state")
"""The parts of a checkpoint other than the model."""

_FOR_GPUS = (
    DeepEPTokenDispatcher.Config,
    HybridEPTokenDispatcher.Config,
    MinimalAsyncEPTokenDispatcher.Config,
)
"""Token dispatchers that need GPUs."""

_COMPILED = ("model", "loss")
"""The values of `compile.components`."""

_TOKENIZER = "SmolLM2-135M"
"""The folder of the tokenizer of the recipes for GPUs."""

_DOWNLOAD = f"hf download HuggingFaceTB/{_TOKENIZER} tokenizer.json tokenizer_config.json --local-dir"


def check(config: Trainer.Config, *, world_size: int, make_folder: bool = True) -> nn.Module:
    """Refuse a configuration that cannot train.

    Args:
        config: the resolved configuration; not changed.
        world_size: processes of the whole run.
        make_folder: whether to create the folder of the run.

    Returns:
        The model, on the meta device.

    Raises:
        UserError: one sentence that names the cause and the fix.
    """
    check_layout(config, world_size=world_size)
    _check_libraries(config)
    _check_checkpoints(config)
    tokenizer = _check_tokenizer(config)
    _check_modules(config)
    model = build_on_meta(config)
    _check_overrides(config)
    _check_balance(config, model)
    _check_parts(config, model)
    replicas = config.parallelism.data_parallel_replicate_degree
    check_optimizer(config.optimizer, model, is_divided=world_size > replicas)
    check_data(config, tokenizer, data_parallel=data_parallel_degree(config, world_size))
    _check_folders(config, make=make_folder)  # last, since it creates one
    return model


def check_messages(config: Trainer.Config) -> None:
    """Refuse a pipeline and checkpoints with the fake backend, which sends no messages.

    Raises:
        UserError: the configuration has one of them.
    """
    if config.comm.mode != "fake_backend":
        return
    if config.checkpoint.enable and not config.checkpoint.load_only:
        raise UserError(
            'comm.mode "fake_backend" runs one rank, which cannot save a whole checkpoint: turn '
            "checkpoint.enable off"
        )
    if config.parallelism.pipeline_parallel_degree > 1:
        raise UserError(
            'comm.mode "fake_backend" sends nothing, and a pipeline waits for messages: set it to "default", '
            "or use titan-async rehearse, which generates them"
        )


def _check_libraries(config: Trainer.Config) -> None:
    """Refuse settings that need a package that is not installed, or a device that is missing."""
    if config.metrics.enable_wandb and not _is_installed("wandb"):
        raise UserError(
            "metrics.enable_wandb needs the package wandb, which is not installed: pip install wandb, or "
            "turn it off"
        )
    if config.comm.mode == "torchcomms" and not _is_installed("torchcomms"):
        raise UserError(
            'comm.mode "torchcomms" needs the package torchcomms, which is not installed: install it, or set '
            'comm.mode to "default"'
        )
    if config.comm.mode == "local_tensor":
        raise UserError('comm.mode "local_tensor" is not for training: set it to "default"')
    if not has_accelerator() and config.profiler.enable_memory_snapshot:
        raise UserError(
            "profiler.enable_memory_snapshot records the memory of GPUs, and this machine has none: turn it "
            "off"
        )
    _check_compile(config)


def _check_modules(config: Trainer.Config) -> None:
    """Refuse modules that this machine, or context parallelism, does not support."""
    parallelism, model = config.parallelism, config.model_spec.model
    kinds = {type(node) for _, node, _, _ in model.traverse(Configurable.Config, recurse=True)}
    if parallelism.context_parallel_degree > 1 and VarlenAttention.Config in kinds:
        raise UserError(
            f"parallelism.context_parallel_degree is {parallelism.context_parallel_degree}, but "
            "VarlenAttention does not support it: set it to 1, or choose a recipe with FlexAttention"
        )
    if has_accelerator():
        return
    if parallelism.context_parallel_degree > 1 and parallelism.context_parallel_load_balancer == "ptrr":
        raise UserError(
            'parallelism.context_parallel_load_balancer "ptrr" needs block masks, which are for GPUs: set it '
            'to "headtail" or none'
        )
    for kind in sorted(kinds, key=lambda kind: kind.__qualname__):
        spread = kind in _FOR_GPUS and parallelism.expert_parallel_degree > 1
        fused = kind.__module__ == dist_gemm.__name__ and parallelism.tensor_parallel_degree > 1
        if spread or fused:
            name = kind.__qualname__.removesuffix(".Config")
            raise UserError(
                f"the model's {name} needs GPUs, and this machine has none: choose another recipe"
            )


def _is_installed(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


def _check_compile(config: Trainer.Config) -> None:
    if not config.compile.enable:
        return
    for component in config.compile.components:
        if component not in _COMPILED:
            raise UserError(unknown_name("compile.components", component, _COMPILED))
    backend = config.compile.backend
    if backend != "inductor":
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise UserError(unknown_name("compile.backend", backend, known))


def _check_checkpoints(config: Trainer.Config) -> None:
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        for name in ("initial_load_path", "initial_load_in_hf"):
            if getattr(checkpoint, name):
                raise UserError(
                    f"checkpoint.{name} is set, but nothing is loaded while checkpoint.enable is off: turn "
                    "that on (with checkpoint.load_only nothing is saved)"
                )
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
            f"of step {saved[-1]}: raise training.steps to continue it, or choose another dump_folder"
        )
    path = checkpoint.initial_load_path
    if path and os.path.isabs(path) and not os.path.isdir(path):
        raise UserError(
            f"checkpoint.initial_load_path is {path}, not a folder: set it to a checkpoint's folder"
        )
    if saved:
        check_index(folder / f"step-{saved[-1] if step == -1 else step}")
    elif checkpoint.initial_load_in_hf:
        if "://" not in (path or ""):
            SafetensorsFolder(path or config.hf_assets_path)  # which refuses pickled weights
    elif path and "://" not in path:
        check_index(Path(path))
    if config.model_spec.state_dict_adapter is None:
        for name in ("initial_load_in_hf", "last_save_in_hf"):
            if getattr(checkpoint, name):
                raise UserError(
                    f"checkpoint.{name} is on, but {config.model_spec.name} cannot be converted to Hugging "
                    "Face's format: turn it off"
                )


def _check_folders(config: Trainer.Config, *, make: bool = True) -> None:
    folder, checkpoint = Path(config.dump_folder), config.checkpoint
    _check_writable(folder, "dump_folder", make=False)
    if checkpoint.enable and not checkpoint.load_only and "://" not in checkpoint.folder:
        _check_writable(folder / checkpoint.folder, "checkpoint.folder", make=False)
    _check_writable(folder, "dump_folder", make=make)


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


def _check_tokenizer(config: Trainer.Config) -> BaseTokenizer:
    folder = Path(config.hf_assets_path)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json", "vocab.txt")):
        command = f", for example with: {_DOWNLOAD} {folder}" if folder.name == _TOKENIZER else ""
        raise UserError(
            f"hf_assets_path is {folder}, which holds no tokenizer: set it to a folder with a "
            f"tokenizer.json{command}"
        )
    if (folder / "tokenizer.json").is_file():
        DocumentEncoder(folder)  # raises errors that explain what is wrong with it
    try:
        tokenizer = config.tokenizer.build(tokenizer_path=str(folder))
    except Exception as error:  # tokenizers raises nothing more specific
        raise UserError(
            f"the tokenizer in {folder} cannot be read ({error}): fetch it again, or set hf_assets_path to "
            "another folder"
        ) from error
    size = getattr(config.model_spec.model, "vocab_size", None)
    backend = getattr(tokenizer, "tokenizer", None)
    if size is not None and isinstance(backend, Tokenizer):
        entries = entries_of(backend)
        if entries > size:
            raise UserError(
                f"the tokenizer in {folder} has {entries} entries but the model has room for {size}: choose "
                "another hf_assets_path or a recipe of that vocabulary"
            )
    return tokenizer


def build_on_meta(config: Trainer.Config) -> nn.Module:
    """The model of a configuration on the meta device, without parallelism.

    Raises:
        UserError: the model does not support other settings.
    """
    config = copy.deepcopy(config)
    try:
        update_model(config, tied_stages=delays_gradients(config.parallelism))
        with torch.device("meta"):
            return config.model_spec.model.build()
    except (ValueError, NotImplementedError, ImportError) as error:
        raise UserError(f"the model: {' '.join(str(error).split())}") from error


def _check_overrides(config: Trainer.Config) -> None:
    if not config.override.imports:
        return
    config = copy.deepcopy(config)
    update_model(config, tied_stages=delays_gradients(config.parallelism))
    try:
        apply_overrides(config.override, config)
    except Exception as error:  # the user's own code may raise anything
        raise UserError(f"override.imports: {' '.join(str(error).split())}") from error


def _check_parts(config: Trainer.Config, model: nn.Module) -> None:
    """Refuse a list of parts that is not one for each stage, or not a partition of the model."""
    parallelism, field = config.parallelism, "parallelism.module_fqns_per_model_part"
    parts, degree = parallelism.module_fqns_per_model_part, parallelism.pipeline_parallel_degree
    if parts is None or degree < 2 or parallelism.pipeline_parallel_schedule_csv:
        return
    if not takes_stages(parallelism, len(parts)):
        raise UserError(
            f"{field} lists {len(parts)} parts, but {parallelism.pipeline_parallel_schedule} on {degree} "
            f"ranks has {count_stages(parallelism)} stages: list as many"
        )
    names = []
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleDict | nn.ModuleList):
            names += [f"{name}.{inner}" for inner, _ in child.named_children()]
        else:
            names.append(name)
    listed = [name for part in parts for name in part]
    for name in listed:
        if name not in names:
            raise UserError(unknown_name(field, name, names))
        if listed.count(name) > 1:
            raise UserError(f"{field} lists {name} more than once: list each of the model's modules once")
    for name in names:
        if name not in listed and any(True for _ in model.get_submodule(name).parameters()):
            raise UserError(f"{field} does not list {name}: list each of the model's modules once")


def _check_balance(config: Trainer.Config, model: nn.Module) -> None:
    if not measures_balance(config):
        return
    parallelism = config.parallelism
    for name in ("module_fqns_per_model_part", "pipeline_parallel_layers_per_stage"):
        if getattr(parallelism, name) is not None:
            raise UserError(
                f'pipeline.balance = "measured" chooses the split that parallelism.{name} sets: '
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
