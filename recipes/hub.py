"""A recipe for models of the Hub: which one, the section `[model]` of the recipe file says."""

from collections.abc import Mapping
from typing import Any

import torch
from torchtitan.protocols.model_spec import ModelSpec

from titan_async.huggingface.config_json import spec_of_section
from titan_async.recipes._training import from_the_hub
from titan_async.training.trainer import AsyncTrainer


def hub(model: Mapping[str, Any]) -> AsyncTrainer.Config:
    """The model of the Hub that `[model]` describes; titan-async import writes that section.

    - Its fields have the names and meanings of `config.json`.
    - Settings as on a laptop, on Shakespeare's plays: two stages, 300 steps, sequences of 256 in float32. The
      text, and what GPUs are for, its user sets: bfloat16, longer sequences, more of them, `compile`.
    - Peak learning rate 1e-4, about a tenth of what such models are pretrained with; not swept.
    - Stages are even by multiplications: the head counts as so many layers as do its work.
    """
    spec = spec_of_section(model)
    seq_len = min(256, spec.model.max_seq_len)
    return from_the_hub(spec, seq_len=seq_len, lr=1e-4, head_layers=_head_in_layers(spec, seq_len))


def _head_in_layers(spec: ModelSpec, seq_len: int) -> int:
    """How many of its last layers do as many multiplications for a token as the head; at most all layers."""
    config = spec.model.layers[-1]
    with torch.device("meta"):
        layer = config.build()
    work = 0.0
    for name, parameter in layer.named_parameters():
        share = config.moe.router.top_k / config.moe.num_experts if ".routed_experts." in name else 1
        work += share * parameter.numel()
    attention = config.attention
    width = getattr(attention, "v_head_dim", None) or attention.head_dim
    work += seq_len * attention.n_heads * width  # with half of the keys, and of the values
    return min(round(spec.model.vocab_size * spec.model.dim / work), len(spec.model.layers))
