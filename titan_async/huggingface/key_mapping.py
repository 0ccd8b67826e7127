"""Mapping between a model's state dict and Hugging Face's, one tensor at a time."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.config import ParallelismConfig
from torchtitan.trainer import Trainer

from titan_async.checkpoint import TensorInfo
from titan_async.checkpoint.safetensors_files import SafetensorsFolder
from titan_async.errors import UserError
from titan_async.training.models.tying import HEAD, is_tied, untied
from titan_async.training.preflight.check import build_on_meta

__all__ = ["KeyMapping", "key_mapping_of", "read_tensor", "tensor_infos"]

_DERIVED_SUFFIX = ".rotary_emb.inv_freq"
"""Of tensors in old folders that are computed from `config.json`."""

_TIED_IN_HF = ("lm_head.weight", "model.embed_tokens.weight")


@dataclass(frozen=True)
class KeyMapping:
    """The keys of a model's state dict, and Hugging Face's names for them."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of each tensor in the state dict, in the model's order."""
    names: Mapping[str, Mapping[str, tuple[int, ...]]]
    """For each key, the names and shapes of the tensors in Hugging Face's format: one per expert."""
    buffers: frozenset[str]
    """Keys of buffers."""
    integers: frozenset[str]
    """Keys of integer tensors, such as counts."""
    adapter: Any
    """torchtitan's `StateDictAdapter`."""
    tied: bool
    """Whether head and embedding are tied. The state dict then holds one tensor for both."""

    def to_hf(self, key: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """Converts one tensor to Hugging Face's format."""
        return self.adapter.to_hf({key: value})

    def from_hf(self, key: str, values: dict[str, torch.Tensor]) -> torch.Tensor:
        """Converts one tensor from Hugging Face's format; `values` has all tensors of `names[key]`."""
        [value] = self.adapter.from_hf(values).values()
        return value


def key_mapping_of(config: Trainer.Config) -> KeyMapping:
    """The key mapping of a configuration's model, which is built on the meta device.

    Raises:
        UserError: Hugging Face's format has no place for some tensor.
    """
    spec = config.model_spec
    # All layers, without pipeline stages.
    model = build_on_meta(dataclasses.replace(config, parallelism=ParallelismConfig()))
    tied = is_tied(spec.model)
    # The adapter of a tied model would require the embedding with every other tensor.
    adapter = spec.state_dict_adapter(untied(spec.model) if tied else spec.model, None)
    tensors = {key: value for key, value in model.state_dict().items() if not (tied and key == HEAD)}
    names = {
        key: {name: tuple(part.shape) for name, part in adapter.to_hf({key: value}).items()}
        for key, value in tensors.items()
    }
    unmapped = [key for key, mapped in names.items() if not mapped]
    if unmapped:
        raise UserError(
            f"the model {spec.name} {spec.flavor} cannot be converted to Hugging Face's format: "
            f"{unmapped[0]} has no name there"
        )
    buffers = frozenset(tensors) - {name for name, _ in model.named_parameters()}
    shapes = {key: tuple(value.shape) for key, value in tensors.items()}
    integers = frozenset(key for key, value in tensors.items() if not value.is_floating_point())
    return KeyMapping(shapes, names, buffers, integers, adapter, tied)


def tensor_infos(files: SafetensorsFolder, mapping: KeyMapping) -> dict[str, TensorInfo]:
    """Shapes and dtypes, by key, of the model in a folder of Hugging Face's format.

    Raises:
        UserError: a tensor is missing, unexpected, or of the wrong shape or dtype.
    """
    tensors = {}
    for key, names in mapping.names.items():
        for name, shape in names.items():
            found = files.tensors.get(name)
            if found is None:
                raise UserError(f"{files.folder} has no tensor {name}: fetch the complete model")
            if found.shape != shape:
                raise UserError(
                    f"{name} in {files.folder} is {list(found.shape)}, where the recipe's model has "
                    f"{list(shape)}: name a recipe of the same model"
                )
            if found.dtype.is_floating_point == (key in mapping.integers):
                raise UserError(
                    f"{name} in {files.folder} has dtype {found.dtype}, which does not fit this tensor: "
                    "fetch the model again"
                )
        dtypes = {files.tensors[name].dtype for name in names}
        if len(dtypes) > 1:
            raise UserError(
                f"the tensors of {key} in {files.folder} have different dtypes: convert them to one"
            )
        tensors[key] = TensorInfo(mapping.shapes[key], dtypes.pop())
    known = {name for names in mapping.names.values() for name in names}
    if mapping.tied and set(_TIED_IN_HF) <= files.tensors.keys():
        known.add(_TIED_IN_HF[0])
        if not torch.equal(*map(files.read, _TIED_IN_HF)):
            raise UserError(
                f"{files.folder} has a lm_head.weight other than model.embed_tokens.weight, where the "
                "recipe's model has one weight for both: remove it, or set tie_word_embeddings to false in "
                "config.json"
            )
    for name in files.tensors:
        if name not in known and not name.endswith(_DERIVED_SUFFIX):
            raise UserError(
                f"{files.folder} has a tensor {name}, which the recipe's model does not have: name a recipe "
                "of the same model"
            )
    return tensors


def read_tensor(files: SafetensorsFolder, mapping: KeyMapping, key: str) -> torch.Tensor:
    """Reads one tensor of the model from a folder of Hugging Face's format.

    Raises:
        UserError: a file is damaged.
    """
    return mapping.from_hf(key, {name: files.read(name) for name in mapping.names[key]})
