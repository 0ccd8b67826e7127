"""A model part alone, as on a pipeline stage: without the modules of other stages."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper
from torchtitan.config import TORCH_DTYPE_MAP, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder

from titan_async.training._titan_internals import keep_modules, leave_head_to

__all__ = ["PartInputs", "PartMaker", "alike_layers"]


@dataclass(frozen=True)
class PartInputs:
    """The inputs of a part for one microbatch."""

    tokens: Tensor
    """[microbatch size, sequence]"""
    hidden: Tensor
    """[microbatch size, sequence, model], the output of the previous part."""
    keywords: dict[str, Any]
    loss_fn: Callable[..., tuple[Tensor, Any]] | None
    """The loss function, for the part with the head."""
    output_gradient: Tensor | None
    """The gradient of the output; None if the backward starts from a loss."""

    def start(self, part: nn.Module) -> Tensor:
        """The input of the part: tokens, or a hidden state that requires a gradient."""
        return self.hidden.detach().requires_grad_() if part.tok_embeddings is None else self.tokens

    def forward(self, part: nn.Module, start: Tensor) -> tuple[Tensor, Tensor]:
        """The part's output, and the root of its backward: its loss, or the output itself."""
        output = part(start, **self.keywords)
        if self.loss_fn is None:
            return output, output
        valid_tokens = torch.tensor(self.tokens.numel(), device=self.tokens.device)
        return output, self.loss_fn(output, self.tokens, valid_tokens)[0]


@dataclass(frozen=True, kw_only=True)
class PartMaker:
    """Builds parts of a model with the run's activation checkpointing and dtype, without parallelism."""

    model: nn.Module
    """A decoder on the meta device; not changed."""
    model_config: Decoder.Config
    device: torch.device
    training: TrainingConfig
    parallelism: ParallelismConfig
    ac_config: ActivationCheckpointingConfig
    dump_folder: str
    loss_fn: BaseLoss

    def make(self, modules: list[str]) -> nn.Module:
        """A part on the meta device.

        Args:
            modules: the names of its modules: "tok_embeddings", "layers.0", ..., "norm", "lm_head".
        """
        part = keep_modules(self.model, modules)
        if self.ac_config is not None:
            self.ac_config.build(dump_folder=self.dump_folder).apply(part)
        return part

    def materialize(self, part: nn.Module) -> None:
        """Allocate a part's memory on the device."""
        part.to_empty(device=self.device)

    def cast(self, part: nn.Module) -> None:
        """Cast its parameters to the dtype in which it computes."""
        for parameter in part.parameters():
            parameter.data = parameter.data.to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPE_MAP[self.training.mixed_precision_param]

    def inputs(self, part: nn.Module) -> PartInputs:
        """Random inputs for the part."""
        shape = (self.parallelism.pipeline_parallel_microbatch_size, self.training.seq_len)
        tokens = torch.randint(self.model_config.vocab_size, shape, device=self.device)
        hidden = torch.randn(*shape, self.model_config.dim, dtype=self.dtype, device=self.device)
        last = part.lm_head is not None
        return PartInputs(
            tokens=tokens,
            hidden=hidden,
            keywords=self._attention_inputs(part, shape),
            loss_fn=self._loss_of(part) if last else None,
            output_gradient=None if last else torch.randn_like(hidden),
        )

    def _attention_inputs(self, part: nn.Module, shape: tuple[int, int]) -> dict[str, Any]:
        positions = torch.arange(shape[1], device=self.device).repeat(shape[0], 1)
        inputs: dict[str, Any] = {"positions": positions}
        attention = getattr(self.model_config.first_attention, "inner_attention", None)
        if isinstance(attention, FlexAttention.Config | VarlenAttention.Config):
            inputs["attention_masks"] = part.get_attention_masks(positions=positions)
        return inputs

    def _loss_of(self, part: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
        if not isinstance(self.loss_fn, ChunkedLossWrapper):
            return self.loss_fn
        chunked = copy.copy(self.loss_fn)  # the run's own loss must not keep this head alive
        leave_head_to(chunked, part)
        return chunked


def alike_layers(layers: Sequence[Any]) -> list[int]:
    """For each layer's configuration, the index of the first one that differs in initial weights only."""
    kinds: list[tuple[Any, int]] = []
    first = []
    for index, layer in enumerate(layers):
        config = _without_init(layer)
        known = next((number for kind, number in kinds if kind == config), None)
        if known is None:
            known = index
            kinds.append((config, index))
        first.append(known)
    return first


def _without_init(config: Any) -> Any:
    """A module's configuration without weight initialization, which often depends on the depth, for `==`."""
    if dataclasses.is_dataclass(config):
        fields = [field.name for field in dataclasses.fields(config) if field.name != "param_init"]
        return type(config), [(name, _without_init(getattr(config, name))) for name in fields]
    if isinstance(config, list | tuple):
        return [_without_init(item) for item in config]
    return config
