"""Which tensors of Hugging Face's format each tensor of a model becomes, and back, one at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.trainer import Trainer

from titan_async.errors import UserError
from titan_async.training.preflight import build_on_meta

__all__ = ["Layout", "layout_of"]


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
    model = build_on_meta(config)
    adapter = spec.state_dict_adapter(spec.model, None)
    tensors = model.state_dict()
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
    return Layout(shapes, names, buffers, whole, adapter)
