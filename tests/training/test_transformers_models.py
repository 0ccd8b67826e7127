"""transformers loads what the recipes' models train, and computes the same logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from titan_async.recipes.dense_models import dense_spec, llama
from titan_async.recipes.moe_models import moe, moe_spec
from titan_async.training import cpu

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
    """A recipe's model on the CPU, with weights and biases that all make a difference."""
    from torchtitan.config.override import apply_overrides
    from torchtitan.trainer import Trainer

    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)  # torchtitan's experts compute in it
    config = cpu.adapt_config(Trainer.Config(model_spec=spec))
    config.training.seq_len = LENGTH
    config.model_spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    model = config.model_spec.model.build()
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


@MODELS
def test_keys_make_the_round_trip(spec: Any, described: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = build(spec, monkeypatch).state_dict()
    adapter = spec.state_dict_adapter(spec.model, None)
    back = adapter.from_hf(adapter.to_hf(weights))
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], value) for name, value in weights.items())


@MODELS
def test_transformers_computes_the_same_logits(
    spec: Any, described: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    model = build(spec, monkeypatch)
    weights = spec.state_dict_adapter(spec.model, None).to_hf(model.state_dict())
    save_file(
        {name: value.contiguous() for name, value in weights.items()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    (tmp_path / "config.json").write_text(json.dumps(described))
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report

    tokens = torch.randint(VOCAB, (2, LENGTH))
    positions = torch.arange(LENGTH).expand(2, -1)
    with torch.no_grad():
        masks = model.get_attention_masks(positions=positions)
        ours = model(tokens, positions=positions, attention_masks=masks)
        theirs = loaded.eval()(tokens).logits
    assert ours.std() > 0.5
    difference = float((ours - theirs).abs().max())
    print(difference)
    assert difference < 1e-4
