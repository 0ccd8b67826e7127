"""Small models of both of the recipes' families, and their `config.json` for transformers.

The descriptions are written by hand, from the papers and transformers, not by the project.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.saved_runs import torchtitan_model
from titan_async.recipes.dense_models import dense_spec, llama
from titan_async.recipes.moe_models import moe, moe_spec

__all__ = ["DENSE", "DOTS1", "EXPERTS", "LENGTH", "LLAMA", "MODELS", "VOCAB", "build"]

VOCAB, DIM, LAYERS, HEADS, KV_HEADS, LENGTH = 64, 32, 2, 4, 2, 24

DENSE = dense_spec(
    "tiny",
    llama(
        vocab_size=VOCAB,
        dim=DIM,
        n_layers=LAYERS,
        n_heads=HEADS,
        n_kv_heads=KV_HEADS,
        hidden_dim=48,
        rope_theta=100_000,
    ),
)
EXPERTS = moe_spec(
    "tiny",
    moe(
        vocab_size=VOCAB,
        dim=DIM,
        n_layers=LAYERS,
        n_heads=HEADS,
        n_kv_heads=KV_HEADS,
        n_experts=8,
        top_k=3,
        expert_dim=16,
        n_shared_experts=2,
    ),
)

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM // HEADS,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "torch_dtype": "float32",
}
LLAMA = COMMON | {
    "model_type": "llama",
    "intermediate_size": 48,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
}
DOTS1 = COMMON | {
    "model_type": "dots1",
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
    "routed_scaling_factor": 3**0.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}

MODELS = pytest.mark.parametrize(
    ("spec", "described"), [(DENSE, LLAMA), (EXPERTS, DOTS1)], ids=["dense", "experts"]
)


def build(spec: Any, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A recipe's model on the CPU, with random weights and biases, all of which affect the output."""
    model = torchtitan_model(spec, LENGTH, monkeypatch)
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
        for name, value in model.state_dict().items():
            if "norm" in name:
                value.normal_(1.0, 0.2)
            elif name.endswith("expert_bias_E"):
                value.normal_(0.0, 0.2)
            else:
                value.normal_(0.0, 0.3)
    return model
