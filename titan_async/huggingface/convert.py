"""Export: a run's checkpoint becomes a folder that transformers loads, one tensor at a time."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from titan_async import __version__
from titan_async.checkpoint import TensorInfo
from titan_async.checkpoint.atomic_folder import atomic_folder
from titan_async.checkpoint.safetensors_files import write_folder
from titan_async.errors import UserError
from titan_async.huggingface.config_json import KEPT_DTYPE
from titan_async.huggingface.saved_model import SavedModel
from titan_async.huggingface.tokenizer_files import export_tokenizer, special_tokens
from titan_async.training.models.hf_architecture import describe
from titan_async.training.process.run_folder import RECIPE

__all__ = ["Converted", "convert"]


_WEIGHTS = {
    "newest": "The weights are the newest ones",
    "stale": "The weights are one update older than the newest ones",
    "ema": "The weights are an exponential moving average over training",
}


@dataclass(frozen=True)
class Converted:
    """The result of a conversion."""

    files: list[str]
    """Names of the weights' files, and of their index."""
    parameters: int
    nbytes: int
    """Of all tensors."""
    description: dict[str, Any]
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
        saved: the model to write.
        out: a folder that does not exist, or is empty.
        dtype: of the weights; None for that of the checkpoint. MoE routers keep theirs.
        max_shard_size: maximum bytes of tensors per file.
        progress: called after each tensor with the bytes written and the total.

    Raises:
        UserError: the model cannot be converted, or a file cannot be read or written; `out` is then not
            created.
    """
    config = saved.config
    tensors = _output_infos(saved, dtype)
    total = sum(info.nbytes for info in tensors.values())
    parameters = sum(math.prod(info.shape) for info in tensors.values())
    main_dtype = max(tensors.values(), key=lambda info: math.prod(info.shape)).dtype
    tokens = special_tokens(config.hf_assets_path)
    imported_length = (saved.resolved.model or {}).get("max_position_embeddings", 0)
    description = {
        **describe(config.model_spec, max(config.training.seq_len, imported_length)),
        **tokens,
        "torch_dtype": str(main_dtype).removeprefix("torch."),
    }
    recipe = saved.resolved.to_toml(portable=True)
    with atomic_folder(out) as folder:
        _check_free_space(folder, total, out)
        _write_json(folder / "config.json", description)
        _write_json(folder / "generation_config.json", {"_from_model_config": True, **tokens})
        export_tokenizer(config.hf_assets_path, folder)
        (folder / RECIPE).write_text(recipe, encoding="utf-8")
        card = _model_card(saved, description, recipe, parameters)
        (folder / "README.md").write_text(card, encoding="utf-8")
        files = write_folder(folder, tensors, _values(saved, tensors, total, progress), limit=max_shard_size)
    return Converted(files, parameters, total, description)


def _output_infos(saved: SavedModel, dtype: torch.dtype | None) -> dict[str, TensorInfo]:
    """Shape and dtype of each tensor to write, in the model's order."""
    outputs = {}
    for key, names in saved.mapping.names.items():
        saved_dtype = saved.info(key).dtype
        for name, shape in names.items():
            keep = dtype is None or not saved_dtype.is_floating_point or name.endswith(KEPT_DTYPE)
            outputs[name] = TensorInfo(shape, saved_dtype if keep else dtype)
    return outputs


def _values(
    saved: SavedModel, tensors: dict[str, TensorInfo], total: int, progress: Callable[[int, int], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    done = 0
    for key in saved.mapping.names:
        values = saved.mapping.to_hf(key, saved.read(key))
        for name in list(values):
            yield name, values.pop(name).to(tensors[name].dtype)
            done += tensors[name].nbytes
            progress(done, total)


def _check_free_space(folder: Path, needed: int, out: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{out} needs {needed / 1e9:.2f} GB, and its disk has {free / 1e9:.2f} GB available: free "
            "space, or name a folder on another disk"
        )


def _model_card(saved: SavedModel, description: dict[str, Any], recipe: str, parameters: int) -> str:
    """The text of `README.md`: a stub of a model card, with the recipe."""
    name, architecture = saved.resolved.recipe, description["architectures"][0]
    config = saved.config
    return f"""\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- titan_async
---

# {name}

A language model of {parameters:,} parameters (`{architecture}`), trained with titan_async {__version__}
under the schedule {config.parallelism.pipeline_parallel_schedule}, by the recipe below, up to step
{saved.step:,} of {config.training.steps:,}, on sequences of {config.training.seq_len:,} tokens.
{_WEIGHTS[saved.weights]}.

To be added by its authors: intended use, evaluation, limitations, and license.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```

In training each document began with the token `bos_token_id` of `config.json`, if there is one; the tokenizer
adds it to the beginning of each prompt.

## Recipe

```toml
{recipe.rstrip()}
```
"""


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
