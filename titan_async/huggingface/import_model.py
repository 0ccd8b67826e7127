"""Import: converts a folder of Hugging Face's format to a run at step 0, one tensor at a time.

The run's checkpoint of step 0 holds the model only. torchtitan loads such a checkpoint into the model, and
training starts with a new optimizer state.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torchtitan.trainer import Trainer

from titan_async.checkpoint.atomic_folder import atomic_folder
from titan_async.checkpoint.dcp import save_tensors
from titan_async.checkpoint.safetensors_files import SafetensorsFolder
from titan_async.config.recipe_file import Resolved, resolve_model, resolve_recipe
from titan_async.errors import UserError
from titan_async.huggingface.config_json import check_same_model, model_section, read_hf_config
from titan_async.huggingface.key_mapping import key_mapping_of, read_tensor, tensor_infos
from titan_async.training.models.hf_architecture import describe
from titan_async.training.process.run_folder import RECIPE, recipe_text

__all__ = ["import_model"]


def import_model(
    model: str,
    run: str,
    *,
    recipe: str | None = None,
    flags: Sequence[str] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Trainer.Config:
    """Writes a run's folder with a checkpoint of step 0 and a `recipe.toml` that trains from it.

    The checkpoint keeps the dtype of the weights; training converts them to its own.

    Args:
        model: a folder with `config.json` and safetensors. If it has a tokenizer, the run uses it.
        run: a folder that does not exist, or is empty.
        recipe: a recipe file with the same model; None for the folder's own `recipe.toml` or, if it has none,
            the recipe `hub` with the model that `config.json` describes.
        flags: for `resolve_recipe`, after the recipe file.
        progress: called after each tensor with the bytes written and the total.

    Returns:
        The run's configuration.

    Raises:
        UserError: the folder has no such model, or a file cannot be read or written; `run` is then not
            created.
    """
    folder = Path(model)
    description = read_hf_config(folder)
    resolved = _resolve(folder, run, description, recipe, flags)
    config = resolved.config
    if not config.checkpoint.enable:
        raise UserError("checkpoint.enable is false, so training would not load the weights: set it to true")
    ours = describe(config.model_spec, config.training.seq_len)
    check_same_model(description, ours, folder=folder, recipe=recipe or resolved.recipe)
    mapping, files = key_mapping_of(config), SafetensorsFolder(folder)
    tensors = tensor_infos(files, mapping)
    total, done = sum(info.nbytes for info in tensors.values()), 0

    def load(key: str) -> torch.Tensor:
        nonlocal done
        value = read_tensor(files, mapping, key)
        done += tensors[key].nbytes
        progress(done, total)
        return value

    with atomic_folder(run) as partial:
        checkpoint = partial / config.checkpoint.folder / "step-0"
        checkpoint.mkdir(parents=True)
        save_tensors(checkpoint, tensors, load)
        (partial / RECIPE).write_text(recipe_text(resolved), encoding="utf-8")
    return config


def _resolve(
    folder: Path, run: str, description: dict[str, Any], recipe: str | None, flags: Sequence[str]
) -> Resolved:
    own = ["--dump_folder", os.path.abspath(run)]
    named = {flag.partition("=")[0].replace("-", "_") for flag in flags}
    has_tokenizer = "__hf_assets_path" in named
    if (folder / "tokenizer.json").is_file() and not has_tokenizer:
        own += ["--hf_assets_path", os.path.abspath(folder)]
        has_tokenizer = True
    if recipe is not None or (folder / RECIPE).is_file():
        return resolve_recipe([recipe or str(folder / RECIPE), *flags, *own])
    if not has_tokenizer:
        raise UserError(
            f"{folder} has no tokenizer.json: fetch the model's tokenizer as well, or name its folder with "
            "--hf_assets_path"
        )
    try:
        section = model_section(description)
    except ValueError as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from error
    return resolve_model("hub", section, shown=str(folder / "config.json"), flags=[*flags, *own])
