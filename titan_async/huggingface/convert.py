"""From a run's checkpoint to a folder that transformers loads, one tensor at a time."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from titan_async.checkpoint.atomic_folder import new_folder
from titan_async.checkpoint.safetensors_files import write_folder
from titan_async.checkpoint.tensors import TensorInfo
from titan_async.errors import UserError
from titan_async.huggingface.config_json import KEPT_TYPE
from titan_async.huggingface.model_card import model_card
from titan_async.huggingface.saved_model import SavedModel
from titan_async.huggingface.tokenizer_files import export_tokenizer, special_tokens
from titan_async.training.hf_architecture import describe
from titan_async.training.saved_recipe import RECIPE

__all__ = ["Converted", "convert"]


@dataclass(frozen=True)
class Converted:
    """What a conversion has written."""

    files: list[str]
    """Of weights, and their index."""
    parameters: int
    nbytes: int
    """Of the tensors."""
    description: dict
    """The content of `config.json`."""


def convert(
    saved: SavedModel,
    out: str,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5 * 10**9,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Converted:
    """Writes a checkpoint's model in Hugging Face's format, with its tokenizer and recipe.

    Args:
        saved: what to write.
        out: a folder that does not exist, or is empty.
        dtype: of the weights; None for what the checkpoint has. Routers of mixtures of experts keep theirs.
        max_shard_size: bytes of tensors in a file, at most.
        progress: called after each tensor with the bytes written and those to write.

    Raises:
        UserError: the model has no such format, or something cannot be read or written; `out` is then not
            there.
    """
    config = saved.config
    tensors = _outputs(saved, dtype)
    total = sum(info.nbytes for info in tensors.values())
    parameters = sum(math.prod(info.shape) for info in tensors.values())
    main_type = max(tensors.values(), key=lambda info: math.prod(info.shape)).dtype
    tokens = special_tokens(config.hf_assets_path)
    longest = (saved.resolved.model or {}).get("max_position_embeddings", 0)  # before it was imported
    description = {
        **describe(config.model_spec, max(config.training.seq_len, longest)),
        **tokens,
        "torch_dtype": str(main_type).removeprefix("torch."),
    }
    recipe = saved.resolved.to_toml(portable=True)
    with new_folder(out) as folder:
        _check_room(folder, total, out)
        _write_json(folder / "config.json", description)
        _write_json(folder / "generation_config.json", {"_from_model_config": True, **tokens})
        export_tokenizer(config.hf_assets_path, folder)
        (folder / RECIPE).write_text(recipe, encoding="utf-8")
        card = model_card(saved, description, recipe, parameters)
        (folder / "README.md").write_text(card, encoding="utf-8")
        files = write_folder(folder, tensors, _values(saved, tensors, total, progress), limit=max_shard_size)
    return Converted(files, parameters, total, description)


def _outputs(saved: SavedModel, dtype: torch.dtype | None) -> dict[str, TensorInfo]:
    """Every tensor that is to be written, in the model's order."""
    outputs = {}
    for key, names in saved.layout.names.items():
        there = saved.info(key).dtype
        for name, shape in names.items():
            changes = dtype is not None and there.is_floating_point and not name.endswith(KEPT_TYPE)
            outputs[name] = TensorInfo(shape, dtype if changes else there)
    return outputs


def _values(
    saved: SavedModel, tensors: dict[str, TensorInfo], total: int, progress: Callable[[int, int], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    done = 0
    for key in saved.layout.names:
        parts = saved.layout.to_hf(key, saved.read(key))
        for name in list(parts):
            yield name, parts.pop(name).to(tensors[name].dtype)
            done += tensors[name].nbytes
            progress(done, total)


def _check_room(folder: Path, needed: int, out: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{out} takes {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB of its disk are free: make room, or "
            "name a folder on another disk"
        )


def _write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
