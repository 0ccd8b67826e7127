"""`config.json`: transformers computes the same logits from it, and other models are refused."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.trainer import Trainer

from tests.support.saved_runs import logits
from tests.support.transformers_models import DENSE, EXPERTS, LENGTH, MODELS, VOCAB, build
from titan_async.checkpoint.dcp import SavedTensors
from titan_async.checkpoint.safetensors_files import SafetensorsFolder
from titan_async.config.recipe_file import Resolved
from titan_async.data import shakespeare_tokenizer_folder
from titan_async.errors import UserError
from titan_async.huggingface.config_json import check_same_model, read_hf_config
from titan_async.huggingface.convert import convert
from titan_async.huggingface.key_mapping import key_mapping_of
from titan_async.huggingface.saved_model import SavedModel
from titan_async.training.models.hf_architecture import describe, export_warning


def changed(spec: Any, **attention: Any) -> Any:
    """A copy of the model with changed settings of attention in every layer."""
    spec = copy.deepcopy(spec)
    for layer in spec.model.layers:
        layer.attention = dataclasses.replace(layer.attention, **attention)
    return spec


def scaled(spec: Any) -> Any:
    """With Llama 3.1's scaled RoPE, from a short original length so that scaling has an effect."""
    rope = dataclasses.replace(
        spec.model.layers[0].attention.rope, scaling="llama", scaling_factor=4.0, low_freq_factor=1.0,
        high_freq_factor=3.0, original_max_position_embeddings=16,
    )  # fmt: skip
    return changed(spec, rope=rope)


def tied(spec: Any) -> Any:
    """With tied embedding and head."""
    return dataclasses.replace(spec, model=dataclasses.replace(spec.model, enable_weight_tying=True))


def save(spec: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SavedModel, torch.nn.Module]:
    from titan_async.training.trainer import AsyncTrainer

    model = build(spec, monkeypatch)
    weights = model.state_dict()
    if spec.model.enable_weight_tying:
        del weights["lm_head.weight"]
    dcp.save(weights, checkpoint_id=folder / "step-1")
    config = AsyncTrainer.Config(model_spec=spec, hf_assets_path=str(shakespeare_tokenizer_folder()))
    config.training.seq_len = LENGTH
    resolved = Resolved(config=config, recipe="tiny", base=config, module=None, dry_run=False)
    saved = SavedTensors(folder / "step-1")
    return SavedModel(resolved, folder / "step-1", 1, key_mapping_of(config), saved, "newest"), model


@pytest.mark.parametrize(
    "spec",
    [DENSE, EXPERTS, scaled(DENSE), tied(DENSE), tied(EXPERTS)],
    ids=["dense", "experts", "scaled positions", "tied", "tied experts"],
)
def test_transformers_computes_the_same_logits(
    spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    saved, model = save(spec, tmp_path, monkeypatch)
    convert(saved, str(tmp_path / "hf"), max_shard_size=20_000)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    assert loaded.config.tie_word_embeddings == spec.model.enable_weight_tying
    assert ("lm_head.weight" in SafetensorsFolder(tmp_path / "hf").tensors) != spec.model.enable_weight_tying
    tokens = torch.randint(VOCAB, (2, LENGTH))
    ours = logits(model, tokens)
    with torch.no_grad():
        theirs = loaded.eval()(tokens).logits
    assert ours.std() > 0.5
    assert float((ours - theirs).abs().max()) < 1e-4


@MODELS
def test_describe_matches_a_config_written_by_hand(spec: Any, described: dict[str, Any]) -> None:
    ours = describe(spec, LENGTH)
    by_hand = {**described, "rope_theta": described["rope_parameters"]["rope_theta"], "rope_scaling": None}
    for name in ("rope_parameters", "bos_token_id", "eos_token_id", "torch_dtype"):
        del by_hand[name]
    assert {name: ours[name] for name in by_hand} == by_hand


@MODELS
def test_config_saved_by_transformers_is_the_same_model(spec: Any, described: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    described = {name: value for name, value in described.items() if name != "torch_dtype"}
    transformers.AutoConfig.for_model(**described, sliding_window=None).save_pretrained(tmp_path)
    check_same_model(read_hf_config(tmp_path), describe(spec, LENGTH), folder=tmp_path, recipe="r")


@pytest.mark.parametrize(
    ("spec", "field", "value"),
    [
        (DENSE, "hidden_size", 64),
        (DENSE, "num_key_value_heads", None),
        (DENSE, "rope_theta", 1000.0),
        (DENSE, "rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        (DENSE, "rms_norm_eps", 1e-6),
        (DENSE, "tie_word_embeddings", True),
        (DENSE, "attention_bias", True),
        (DENSE, "hidden_act", "gelu"),
        (DENSE, "model_type", "mistral"),
        (EXPERTS, "norm_topk_prob", False),
        (EXPERTS, "routed_scaling_factor", 1.0),
        (EXPERTS, "num_experts_per_tok", 2),
        (EXPERTS, "sliding_window", 8),
        (EXPERTS, "first_k_dense_replace", 1),
        (EXPERTS, "n_group", 2),
    ],
)
def test_first_different_field_is_named(spec: Any, field: str, value: Any, tmp_path: Path) -> None:
    ours = describe(spec, LENGTH)
    theirs = {**ours, field: value}
    if field == "sliding_window":
        theirs["max_window_layers"] = 1
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    with pytest.raises(UserError, match=rf"config.json has {field} = .*, where the model of r has "):
        check_same_model(read_hf_config(tmp_path), ours, folder=tmp_path, recipe="r")


def test_missing_fields_have_transformers_defaults(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "dots1", "num_hidden_layers": 62}')
    ours, theirs = read_hf_config(tmp_path), transformers.Dots1Config()
    for name in ("rms_norm_eps", "hidden_act", "n_group", "norm_topk_prob", "routed_scaling_factor"):
        assert ours[name] == getattr(theirs, name)
    assert ours["rope_theta"] == theirs.rope_parameters["rope_theta"]
    assert ours["sliding_window"] is None and "sliding_attention" not in theirs.layer_types
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8}'
    )
    ours, theirs = read_hf_config(tmp_path), transformers.LlamaConfig(hidden_size=64, num_attention_heads=8)
    for name in ("rms_norm_eps", "hidden_act", "head_dim", "num_key_value_heads", "mlp_bias"):
        assert ours[name] == getattr(theirs, name)
    assert ours["rope_theta"] == theirs.rope_parameters["rope_theta"]


def test_missing_or_invalid_config_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no config.json: name a folder with a Hugging Face model"):
        read_hf_config(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match="config.json (cannot be read|is not a JSON object)"):
            read_hf_config(tmp_path)


def wrong_models() -> dict[str, Any]:
    layers, softmax, unbalanced = (copy.deepcopy(spec) for spec in (DENSE, EXPERTS, EXPERTS))
    layers.model.layers[1].attention_norm.eps = layers.model.layers[1].ffn_norm.eps = 1e-6
    softmax.model.layers[0].moe.router.score_func = "softmax"
    unbalanced.model.layers[0].moe.load_balance_coeff = None
    biased = copy.deepcopy(DENSE)
    biased.model.layers[1].feed_forward.w1.bias = biased.model.layers[0].feed_forward.w1.bias = True
    yarn = dataclasses.replace(DENSE.model.layers[0].attention.rope, scaling="yarn")
    return {
        "its norms have different epsilons": layers,
        "not those of dots.llm1": softmax,
        "layers are not those of dots": unbalanced,
        "its projections have biases": biased,
        "scaled by yarn": changed(DENSE, rope=yarn),
        "its positions are CosSinRoPE": changed(DENSE, rope=EXPERTS.model.layers[0].attention.rope),
        "its family is not": dataclasses.replace(DENSE, state_dict_adapter=None),
    }


@pytest.mark.parametrize("why", wrong_models())
def test_model_unknown_to_transformers_is_refused(why: str) -> None:
    with pytest.raises(UserError, match=f"cannot be written in Hugging Face's format: .*{why}"):
        describe(wrong_models()[why], LENGTH)
    config = Trainer.Config(model_spec=wrong_models()[why])
    assert export_warning(config) is None  # it saves nothing
    config.checkpoint.enable = True
    warning = export_warning(config)
    assert warning is not None and why in warning
    assert warning.endswith("; titan-async convert will refuse its checkpoints")


@MODELS
def test_supported_models_give_no_warning(spec: Any, described: Any) -> None:
    config = Trainer.Config(model_spec=spec)
    config.checkpoint.enable = True
    assert export_warning(config) is None


def test_unmapped_tensor_is_refused() -> None:
    from titan_async.training.trainer import AsyncTrainer

    spec = copy.deepcopy(DENSE)
    for layer in spec.model.layers:
        layer.feed_forward.w1.bias = True
    config = AsyncTrainer.Config(model_spec=spec)
    config.training.seq_len = LENGTH
    with pytest.raises(UserError, match=r"layers.0.feed_forward.w1.bias has no name there"):
        key_mapping_of(config)
