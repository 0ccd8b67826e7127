"""What can be known to be wrong before any process starts: names, files, and sizes that do not fit."""

import copy
import difflib
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from torchtitan.trainer import Trainer

from titan_async.data import open_documents
from titan_async.errors import UserError
from titan_async.training._titan_internals import split_layers
from titan_async.training.data import TextDataLoader
from titan_async.training.optimizer import FACTORIES, match_group
from titan_async.training.pipeline import ASYNC_SCHEDULE

__all__ = ["SCHEDULES", "check"]

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

_OPTIMIZERS = (*FACTORIES, "DistMuon")


def check(config: Trainer.Config) -> None:
    """Refuse a configuration that cannot train.

    Args:
        config: the resolved configuration; not changed.

    Raises:
        UserError: one sentence that names the cause and the mend.
    """
    _check_schedule(config)
    _check_stages(config)
    _check_folders(config)
    _check_tokenizer(config)
    _check_parameter_groups(config, _build_on_meta(config))
    _check_data(config)


def _check_schedule(config: Trainer.Config) -> None:
    name = config.parallelism.pipeline_parallel_schedule
    if config.parallelism.pipeline_parallel_schedule_csv:
        return
    if name.lower() not in {known.lower() for known in SCHEDULES}:
        raise UserError(_unknown("parallelism.pipeline_parallel_schedule", name, SCHEDULES))


def _check_stages(config: Trainer.Config) -> None:
    parallelism = config.parallelism
    stages = parallelism.pipeline_parallel_degree
    layers = getattr(config.model_spec.model, "layers", None)
    if stages < 2 or layers is None or parallelism.module_fqns_per_model_part is not None:
        return
    if parallelism.pipeline_parallel_layers_per_stage is not None:
        return  # torchtitan judges this one
    first = parallelism.pipeline_parallel_first_stage_less_layers
    last = parallelism.pipeline_parallel_last_stage_less_layers
    try:
        split_layers(stages, len(layers), first, last)
    except ValueError:
        raise UserError(
            f"a model of {len(layers)} layers does not split into {stages} stages (the embedding counts as "
            f"{first} layers and the head as {last}): lower parallelism.pipeline_parallel_degree"
        ) from None


def _check_folders(config: Trainer.Config) -> None:
    folder = Path(config.dump_folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write to the folder {folder}: {error.strerror}; choose another with --dump_folder"
        ) from None
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        return
    step = checkpoint.load_step
    if step != -1 and not (folder / checkpoint.folder / f"step-{step}").is_dir():
        steps = _saved_steps(folder / checkpoint.folder)
        there = f"there are steps {', '.join(map(str, steps))}" if steps else "there is none"
        raise UserError(
            f"checkpoint.load_step is {step}, but {folder / checkpoint.folder} has no such checkpoint: "
            f"{there}"
        )
    path = checkpoint.initial_load_path
    if path and os.path.isabs(path) and not os.path.isdir(path):
        raise UserError(f"checkpoint.initial_load_path is {path}, which is not a folder: give a checkpoint's")


def _saved_steps(folder: Path) -> list[int]:
    found = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in found if match)


def _check_tokenizer(config: Trainer.Config) -> None:
    folder = Path(config.hf_assets_path)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json", "vocab.txt")):
        raise UserError(
            f"hf_assets_path is {folder}, which holds no tokenizer: set it to a folder with a tokenizer.json"
        )
    size = getattr(config.model_spec.model, "vocab_size", None)
    if size is not None and (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        try:
            entries = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
        except Exception as error:
            raise UserError(f"cannot read the tokenizer {folder / 'tokenizer.json'}: {error}") from None
        if entries > size:
            raise UserError(
                f"the tokenizer in {folder} has {entries} entries but the model has room for {size}: choose "
                "another hf_assets_path or a recipe of that vocabulary"
            )


def _build_on_meta(config: Trainer.Config) -> nn.Module:
    config = copy.deepcopy(config)
    try:
        config.model_spec.model.update_from_config(config=config)
        with torch.device("meta"):
            return config.model_spec.model.build()
    except (ValueError, NotImplementedError) as error:
        raise UserError(" ".join(str(error).split())) from error


def _check_parameter_groups(config: Trainer.Config, model: nn.Module) -> None:
    optimizer = config.optimizer
    groups = optimizer.resolved_groups() if hasattr(optimizer, "resolved_groups") else optimizer.param_groups
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if groups is not None and not groups:
        raise UserError("optimizer.param_groups is empty: add a group with pattern '.*'")
    used = {match_group(name, groups) for name in names}
    for index, group in enumerate(groups):
        if group.optimizer_name not in _OPTIMIZERS:
            raise UserError(
                _unknown(f"optimizer.param_groups.{index}.optimizer_name", group.optimizer_name, _OPTIMIZERS)
            )
        if index not in used:
            taken = any(re.search(group.pattern, name) for name in names)
            why = "earlier groups take all that it matches" if taken else "matches no parameter of the model"
            raise UserError(
                f"optimizer.param_groups.{index}.pattern '{group.pattern}': {why}; parameters are named like "
                f"{names[len(names) // 2]}"
            )


def _check_data(config: Trainer.Config) -> None:
    loaders = [("dataloader", config.dataloader)]
    if config.validator.enable:
        loaders.append(("validator.dataloader", config.validator.dataloader))
    for name, loader in loaders:
        if isinstance(loader, TextDataLoader.Config):
            stream = open_documents(loader.text_source())
            if next(iter(stream), None) is None:
                raise UserError(
                    f"{name} reads no document: its {loader.split} split is empty; give more text"
                )


def _unknown(field: str, value: str, known: Iterable[str]) -> str:
    known = list(known)
    lowered = {name.lower(): name for name in known}
    close = difflib.get_close_matches(value.lower(), lowered, n=1, cutoff=0.4)
    hint = f"; did you mean {lowered[close[0]]}?" if close else ""
    return f'{field} is "{value}", which is none of {", ".join(known)}{hint}'
