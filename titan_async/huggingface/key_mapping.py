"""Which tensors of Hugging Face's format each tensor of a model becomes, and back, one at a time."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.config import ParallelismConfig
from torchtitan.trainer import Trainer

from titan_async.checkpoint.safetensors_files import SafetensorsFolder
from titan_async.checkpoint.tensors import TensorInfo
from titan_async.errors import UserError
from titan_async.training.preflight import build_on_meta
from titan_async.training.tying import HEAD, is_tied, untied

__all__ = ["Layout", "layout_of", "read_from", "tensors_in"]

_NO_WEIGHT = ".rotary_emb.inv_freq"
"""The ending of what old folders hold beside weights: it follows from `config.json`."""

_TIED_IN_HF = ("lm_head.weight", "model.embed_tokens.weight")


@dataclass(frozen=True)
class Layout:
    """A model's tensors under both kinds of names."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of every tensor that a checkpoint of the model holds, in the model's order."""
    names: Mapping[str, Mapping[str, tuple[int, ...]]]
    """For each of these the tensors that it becomes, with their shapes. An expert has its own."""
    buffers: frozenset[str]
    """Those that are no parameters."""
    whole: frozenset[str]
    """Those that hold whole numbers, such as counts; the others hold weights."""
    adapter: Any
    """torchtitan's."""
    tied: bool
    """Whether the head is the embedding, of which there is one tensor then."""

    def to_hf(self, key: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """One of the model's tensors in Hugging Face's format."""
        return self.adapter.to_hf({key: value})

    def from_hf(self, key: str, values: dict[str, torch.Tensor]) -> torch.Tensor:
        """Back: from all tensors that it has become."""
        [value] = self.adapter.from_hf(values).values()
        return value


def layout_of(config: Trainer.Config) -> Layout:
    """The layout of the model that a configuration describes, which is not built.

    Raises:
        UserError: the model has tensors that Hugging Face's format does not know.
    """
    spec = config.model_spec
    # Whole, whatever its stages.
    model = build_on_meta(dataclasses.replace(config, parallelism=ParallelismConfig()))
    tied = is_tied(spec.model)
    # A tied model's adapter would want the embedding with every other tensor.
    adapter = spec.state_dict_adapter(untied(spec.model) if tied else spec.model, None)
    tensors = {key: value for key, value in model.state_dict().items() if not (tied and key == HEAD)}
    names = {
        key: {name: tuple(part.shape) for name, part in adapter.to_hf({key: value}).items()}
        for key, value in tensors.items()
    }
    lost = [key for key, becomes in names.items() if not becomes]
    if lost:
        raise UserError(
            f"the model {spec.name} {spec.flavor} has no form in Hugging Face's format here: "
            f"there is no place for {lost[0]}"
        )
    buffers = frozenset(tensors) - {name for name, _ in model.named_parameters()}
    shapes = {key: tuple(value.shape) for key, value in tensors.items()}
    whole = frozenset(key for key, value in tensors.items() if not value.is_floating_point())
    return Layout(shapes, names, buffers, whole, adapter, tied)


def tensors_in(files: SafetensorsFolder, layout: Layout) -> dict[str, TensorInfo]:
    """The model's tensors that a folder in Hugging Face's format holds, by the model's own names.

    Raises:
        UserError: a part of one is missing or of the wrong shape, or there are others.
    """
    tensors = {}
    for key, names in layout.names.items():
        for name, shape in names.items():
            found = files.tensors.get(name)
            if found is None:
                raise UserError(f"{files.folder} has no tensor {name}: fetch the whole model")
            if found.shape != shape:
                raise UserError(
                    f"{name} in {files.folder} is {list(found.shape)}, where the recipe's model has "
                    f"{list(shape)}: name a recipe of the same model"
                )
            if found.dtype.is_floating_point == (key in layout.whole):
                raise UserError(
                    f"{name} in {files.folder} is of the type {found.dtype}, which no such weights have: "
                    "fetch the model again"
                )
        types = {files.tensors[name].dtype for name in names}
        if len(types) > 1:
            raise UserError(f"the parts of {key} in {files.folder} are of different types: give them one")
        tensors[key] = TensorInfo(layout.shapes[key], types.pop())
    known = {name for names in layout.names.values() for name in names}
    if layout.tied and set(_TIED_IN_HF) <= files.tensors.keys():
        known.add(_TIED_IN_HF[0])
        if not torch.equal(*map(files.read, _TIED_IN_HF)):
            raise UserError(
                f"{files.folder} has a lm_head.weight other than model.embed_tokens.weight, where the "
                "recipe's model has one weight for both: remove it, or set tie_word_embeddings to false in "
                "config.json"
            )
    for name in files.tensors:
        if name not in known and not name.endswith(_NO_WEIGHT):
            raise UserError(
                f"{files.folder} has a tensor {name}, which the recipe's model does not have: name a recipe "
                "of the same model"
            )
    return tensors


def read_from(files: SafetensorsFolder, layout: Layout, key: str) -> torch.Tensor:
    """Reads one of the model's tensors from a folder in Hugging Face's format.

    Raises:
        UserError: a file is damaged.
    """
    return layout.from_hf(key, {name: files.read(name) for name in layout.names[key]})
