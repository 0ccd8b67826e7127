"""`titan-async import` without a recipe: models of transformers' own making, there and back."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.saved_runs import logits, torchtitan_model
from titan_async.checkpoint.distributed import SavedTensors
from titan_async.cli.main import main
from titan_async.config.recipe_file import resolve_recipe
from titan_async.data import shakespeare_tokenizer_folder
from titan_async.huggingface.architecture import model_section, read_description

VOCAB, LENGTH = 2048, 48

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 16, "norm_topk_prob": True}
ROUTED = {**EXPERTS, "n_routed_experts": 8, "n_shared_experts": 2, "routed_scaling_factor": 1.5}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_theta": 500_000.0, "rope_scaling": LLAMA3, "head_dim": 16}),
    "smollm2": ("llama", {"rope_theta": 100_000.0, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16, "rms_norm_eps": 1e-6}),
    "qwen3 tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 moe": ("qwen3_moe", {**EXPERTS, "head_dim": 16, "num_experts": 8}),
    "qwen3 moe, some dense": ("qwen3_moe", {**EXPERTS, "num_experts": 8, "decoder_sparse_step": 2}),
    "dots1": ("dots1", {**ROUTED, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}),
    "deepseek": (
        "deepseek_v3",
        {**ROUTED, **LATENT, "q_lora_rank": 20, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
         "rope_scaling": YARN},
    ),
    "deepseek, whole queries": (
        "deepseek_v3",
        {**ROUTED, **LATENT, "q_lora_rank": None, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    ),
}  # fmt: skip


def save_model(name: str, folder: Path) -> None:
    """A model of random weights that all make a difference, as transformers saves it, with a tokenizer."""
    import transformers

    kind, fields = MODELS[name]
    if kind == "deepseek_v3":
        fields = {**fields, "num_nextn_predict_layers": 0}
    config = transformers.AutoConfig.for_model(kind, **{**COMMON, **fields}, attn_implementation="eager")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, value in model.state_dict().items():
            value.normal_(1.0 if "norm" in key else 0.0, 0.2)
    model.save_pretrained(folder)
    shutil.copy(shakespeare_tokenizer_folder() / "tokenizer.json", folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models")

    def saved(name: str) -> Path:
        if not (folder / name).exists():
            save_model(name, folder / name)
        return folder / name

    return saved


def transformers_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    import transformers

    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    with torch.no_grad():
        return loaded.eval()(tokens).logits


@pytest.mark.parametrize("name", MODELS)
def test_in_and_out_it_is_the_same_model(
    name: str, saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, run, out = saved(name), tmp_path / "run", tmp_path / "out"
    tokens = torch.randint(VOCAB, (2, LENGTH))
    theirs = transformers_logits(model, tokens)
    assert theirs.std() > 0.5

    assert main(["import", str(model), str(run)]) == 0
    config = resolve_recipe([str(run / "recipe.toml")]).config
    ours = torchtitan_model(config.model_spec, LENGTH, monkeypatch)
    checkpoint = SavedTensors(run / "checkpoint/step-0")
    assert ("lm_head.weight" in checkpoint.tensors) == (not MODELS[name][1].get("tie_word_embeddings"))
    weights = {key: checkpoint.read(key) for key in checkpoint.tensors}
    missing, unexpected = ours.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"} - weights.keys() and not unexpected
    assert float((logits(ours, tokens) - theirs).abs().max()) < 1e-4

    assert main(["convert", str(run), str(out)]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (model, out))
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(after[key], value) and after[key].dtype == value.dtype, key
    assert torch.equal(transformers_logits(out, tokens), theirs)
    description = json.loads((out / "config.json").read_text())
    assert description["architectures"] == json.loads((model / "config.json").read_text())["architectures"]
    assert description["max_position_embeddings"] == 64
    # And once more, from what was converted, whose recipe names no folder of this machine.
    assert main(["import", str(out), str(tmp_path / "again")]) == 0
    assert model_section(read_description(out)) == tomllib.loads((out / "recipe.toml").read_text())["model"]
