"""`titan-async import` without a recipe: round trips of models that transformers has created."""

from __future__ import annotations

import copy
import json
import re
import shutil
import tomllib
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.saved_runs import logits, torchtitan_model
from tests.support.selection import slow
from tests.support.training import train
from titan_async.checkpoint.dcp import SavedTensors
from titan_async.cli.main import main
from titan_async.config.recipe_file import resolve_model, resolve_recipe
from titan_async.data import shakespeare_tokenizer_folder
from titan_async.errors import UserError
from titan_async.huggingface.config_json import model_section, read_hf_config
from titan_async.planning.layout import split_of
from titan_async.training.models.hf_architecture import describe

VOCAB, LENGTH = 2048, 48

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 400,
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
    """Saves a model by transformers with a tokenizer. Its random weights all affect the logits."""
    import transformers

    kind, fields = MODELS[name]
    if kind == "deepseek_v3":
        fields = {**fields, "num_nextn_predict_layers": 0}
    fields = copy.deepcopy({**COMMON, **fields})  # transformers writes into dictionaries that it is given
    config = transformers.AutoConfig.for_model(kind, **fields, attn_implementation="eager")
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


# Everything in a slow case is also in another case.
SLOW = ("qwen3", "qwen3 moe", "dots1", "deepseek, whole queries")
NAMES = pytest.mark.parametrize("name", [slow(name, id=name) if name in SLOW else name for name in MODELS])


@NAMES
def test_import_and_export_keep_the_model(
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
    assert description["max_position_embeddings"] == 400
    # The exported folder can be imported again: its recipe names no local folder.
    assert main(["import", str(out), str(tmp_path / "again")]) == 0
    assert model_section(read_hf_config(out)) == tomllib.loads((out / "recipe.toml").read_text())["model"]


DESCRIPTIONS = {name: {"model_type": kind, **COMMON, **fields} for name, (kind, fields) in MODELS.items()}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_model_section_round_trip(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DESCRIPTIONS[name]))
    section = model_section(read_hf_config(tmp_path))
    resolved = resolve_model("hub", section, shown="config.json", flags=["--training.steps", "7"])
    (tmp_path / "recipe.toml").write_text(resolved.to_toml())
    again = resolve_recipe([str(tmp_path / "recipe.toml")])
    assert (again.model, again.config.training.steps) == (section, 7)
    assert describe(again.config.model_spec, 64) == describe(resolved.config.model_spec, 64)


def test_stages_are_balanced_by_flops() -> None:
    """SmolLM2-135M's head has the FLOPs of eight layers at short lengths: 30 layers are split 19 and 11."""
    smollm2 = {**COMMON, "model_type": "llama", "tie_word_embeddings": True, "vocab_size": 49_152,
               "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
               "num_attention_heads": 9, "num_key_value_heads": 3}  # fmt: skip
    parallelism = resolve_model("hub", smollm2, shown="x", flags=[]).config.parallelism
    stages = split_of(parallelism, 30)
    assert [sum(name.startswith("layers") for name in stage) for stage in stages] == [19, 11]
    layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 256 * 576
    costs = 19 * layer, 11 * layer + 576 * 49_152
    assert abs(costs[0] - costs[1]) < layer


@pytest.mark.parametrize(
    ("name", "changed", "sentence"),
    [
        ("llama", {"model_type": "gpt2"}, "model_type is gpt2, and only models of the types deepseek_v3, "),
        ("llama", {"attention_bias": True}, "attention_bias is true, and torchtitan's llama3 supports only"),
        ("llama", {"mlp_bias": True}, "mlp_bias is true, "),
        ("llama", {"hidden_act": "gelu"}, 'hidden_act is "gelu", and torchtitan\'s llama3 supports only "s'),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling is {"),
        ("llama", {"rope_scaling": {**LLAMA3, "factor": "8"}}, "rope_scaling.factor is '8', and must be "),
        ("llama", {"rope_scaling": YARN}, "rope_scaling is {"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is {"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout is 0.1, "),
        ("llama", {"hidden_size": None}, "hidden_size is missing, and must be an integer from 1 to "),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, and must be "),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide "),
        ("llama", {"head_dim": 7}, "head_dim is 7, and must be even"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, and must be a number above 0"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window is true, "),
        ("qwen3", {"attention_bias": True}, "attention_bias is true, "),
        ("qwen3", {"rope_scaling": YARN}, "rope_scaling is {"),
        ("qwen3 moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, which exceeds num_experts, 8"),
        ("dots1", {"sliding_window": 8, "max_window_layers": 1}, "sliding_window is 8, "),
        ("dots1", {"n_group": 3}, "n_group is 3, which does not divide n_routed_experts, 8"),
        ("dots1", {"n_shared_experts": None}, "n_shared_experts is missing"),
        ("dots1", {"topk_group": 5}, "topk_group is 5, which exceeds n_group, 4"),
        ("deepseek", {"num_key_value_heads": 2}, "num_key_value_heads is 2, "),
        ("deepseek", {"rope_interleave": False}, "rope_interleave is false, "),
        ("deepseek", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1, "),
        ("deepseek", {"rope_scaling": {**YARN, "mscale_all_dim": 1.0}}, "rope_scaling is {"),
        ("deepseek", {"tie_word_embeddings": True}, "tie_word_embeddings is true, "),
        ("deepseek", {"topk_method": "greedy"}, 'topk_method is "greedy", '),
        ("deepseek", {"scoring_func": "softmax"}, 'scoring_func is "softmax", '),
    ],
)  # fmt: skip
def test_field_that_torchtitan_does_not_support_is_named(
    name: str, changed: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**DESCRIPTIONS[name], **changed}))
    with pytest.raises(ValueError, match="^" + re.escape(sentence)) as caught:
        model_section(read_hf_config(tmp_path))
    assert "\n" not in str(caught.value)


def test_refused_import_creates_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**DESCRIPTIONS["llama"], "attention_bias": True}))
    assert main(["import", str(model), str(run)]) == 2
    assert capsys.readouterr().err.startswith(f"{model} has no tokenizer.json: fetch the model's tokenizer")
    tokenizer = ["--hf_assets_path", str(shakespeare_tokenizer_folder())]
    assert main(["import", str(model), str(run), *tokenizer]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"{model}/config.json: attention_bias is true, and ") and err.count("\n") == 1
    assert not run.exists()


def test_head_of_a_tied_model_must_equal_the_embedding(
    saved: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some folders of tied models contain both tensors."""
    model = tmp_path / "model"
    shutil.copytree(saved("qwen3 tied"), model)
    weights = load_file(model / "model.safetensors")
    copied = weights["model.embed_tokens.weight"].clone()
    save_file({**weights, "lm_head.weight": copied}, model / "model.safetensors")
    assert main(["import", str(model), str(tmp_path / "run")]) == 0
    assert "lm_head.weight" not in SavedTensors(tmp_path / "run/checkpoint/step-0").tensors
    save_file({**weights, "lm_head.weight": torch.zeros(VOCAB, 32)}, model / "model.safetensors")
    capsys.readouterr()
    assert main(["import", str(model), str(tmp_path / "other")]) == 2
    assert "has a lm_head.weight other than model.embed_tokens.weight" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('recipe = "hub"', ":1: the recipe hub needs a section [model], such as titan-async import writes"),
        ('recipe = "hub"\nmodel = 3', ":2: model is a section, as in [model]"),
        ('recipe = "hub"\n[model]\nmodel_type = "llama"', ": num_attention_heads is missing"),
        ('recipe = "debug"\n[model]\nmodel_type = "llama"', ":2: unknown section model"),
    ],
)
def test_invalid_model_section_is_a_user_error(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(UserError, match="^" + re.escape(f"{tmp_path}/x.toml{sentence}")):
        resolve_recipe([str(tmp_path / "x.toml")])


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"hidden_sizes": 3}, "hidden_sizes is not a field of [model] for a model of this type: remove it"),
        ({"hidden_act": date(2026, 1, 1)}, 'hidden_act is "2026-01-01", and torchtitan'),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rope_scaling": 3}, "the section [model] does not describe a model ("),
        ({"model_type": ["llama"]}, "model_type is ['llama'], and only models of the types"),
    ],
)
def test_invalid_values_of_a_model_section_are_user_errors(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"x: {sentence}")):
        resolve_model("hub", {**DESCRIPTIONS["llama"], **changed}, shown="x", flags=[])


@pytest.mark.parametrize(
    "name", ["llama", *(slow(name, id=name) for name in ("smollm2", "qwen3 moe", "deepseek"))]
)
def test_imported_model_trains_and_exports(
    name: str, saved: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    model, run, out = saved(name), tmp_path / "run", tmp_path / "out"
    flags = ("--training.steps", "2", "--lr_scheduler.warmup_steps", "0", "--optimizer.muon.lr", "1e-3")
    assert main(["import", str(model), str(run), *flags]) == 0
    section = tomllib.loads((run / "recipe.toml").read_text())["model"]
    done = train(tmp_path, "--metrics.log_freq", 1, recipe=run / "recipe.toml")
    assert done.status == 0, done.err
    assert done.steps == [1, 2] and "2 stages" in done.out
    assert tomllib.loads((run / "recipe.toml").read_text())["model"] == section
    assert main(["plan", str(run / "recipe.toml"), "--json"]) == 0
    assert main(["convert", str(run), str(out)]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (model, out))
    assert before.keys() == after.keys()
    moved = [key for key, value in before.items() if not torch.equal(after[key], value)]
    assert len(moved) > 0.8 * len(before)

    prompt, count = "ROMEO: I love", 12
    write = transformers.pipeline("text-generation", model=str(out))
    theirs = write(prompt, max_new_tokens=count, do_sample=False)[0]["generated_text"]
    capsys.readouterr()
    greedy = ("--temperature", "0", "--tokens", str(count))
    assert main(["sample", str(run), "--prompt", prompt, *greedy]) == 0
    assert capsys.readouterr().out == theirs + "\n"
