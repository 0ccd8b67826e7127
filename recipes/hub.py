"""A recipe for models of the Hub, which the section `[model]` of the recipe file describes."""

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
    - Settings for a laptop, on Shakespeare's plays: two stages, 300 steps, sequences of 256 in float32. For
      GPUs, set the text, bfloat16, longer and more sequences, and `compile`.
    - Peak learning rate 1e-4, about a tenth of that of pretraining; not swept.
    - Stages are balanced by FLOPs: the head counts as the number of layers with its FLOPs.
    """
    spec = spec_of_section(model)
    seq_len = min(256, spec.model.max_seq_len)
    return from_the_hub(spec, seq_len=seq_len, lr=1e-4, head_layers=_head_in_layers(spec, seq_len))


def _head_in_layers(spec: ModelSpec, seq_len: int) -> int:
    """The number of layers with the head's FLOPs per token; at most all layers."""
    config = spec.model.layers[-1]
    with torch.device("meta"):
        layer = config.build()
    flops = 0.0
    for name, parameter in layer.named_parameters():
        share = config.moe.router.top_k / config.moe.num_experts if ".routed_experts." in name else 1
        flops += share * parameter.numel()
    attention = config.attention
    width = getattr(attention, "v_head_dim", None) or attention.head_dim
    flops += seq_len * attention.n_heads * width  # causal: half of the keys and values
    return min(round(spec.model.vocab_size * spec.model.dim / flops), len(spec.model.layers))
