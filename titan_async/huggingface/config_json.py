"""Hugging Face's `config.json`: read, compared with a recipe's model, converted to a recipe's `[model]`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.protocols.model_spec import ModelSpec

from titan_async.config.field_values import NONE_WORD
from titan_async.errors import UserError
from titan_async.file_io import read_json
from titan_async.training.models.hf_architecture import LLAMA3_SCALING, YARN_SCALING, describe
from titan_async.training.models.hf_models import MOST_LAYERS, spec_of

__all__ = ["KEPT_DTYPE", "check_same_model", "model_section", "read_hf_config", "spec_of_section"]

KEPT_DTYPE = (".mlp.gate.weight", ".mlp.gate.e_score_correction_bias")
"""Suffixes of tensors whose dtype is not converted: transformers keeps routers in float32."""

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_SIGMOID_ROUTER: dict[str, Any] = {
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"mlp_bias": False},
    "qwen3": _COMMON | {"head_dim": 128},
    "qwen3_moe": _COMMON | {"norm_topk_prob": False},
    "dots1": _COMMON | _SIGMOID_ROUTER | {"n_shared_experts": None},
    "deepseek_v3": {
        **_COMMON,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 1,
        "q_lora_rank": 1536,
        "rope_interleave": True,
        "num_nextn_predict_layers": 0,
    },
}
"""transformers' defaults, by model type."""

_FIXED = {
    "quantization_config": None,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
"""Values that all models of torchtitan have, and that `describe` leaves out."""

_DEFAULT_THETA = 10_000.0
_SCALINGS = {"llama3": LLAMA3_SCALING, "yarn": YARN_SCALING}
_NONE_IS_WRITTEN = ("q_lora_rank",)
"""Fields whose default in transformers is not None, so that None has to be written."""
_NOT_COMPARED = ("architectures", "max_position_embeddings", "max_window_layers")


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Reads a folder's `config.json`, with transformers' defaults for missing fields.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    file = folder / "config.json"
    try:
        config = read_json(file)
    except FileNotFoundError:
        raise UserError(f"{folder} has no config.json: name a folder with a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); fetch it again") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} is not a JSON object: fetch it again")
    try:
        return _with_defaults(config)
    except (AttributeError, TypeError) as error:
        raise UserError(f"{file} does not describe a model ({error}); fetch it again") from error


def _with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    full = {**_DEFAULTS.get(str(config.get("model_type")), {}), **config}
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if full.get("num_key_value_heads") is None:
        full["num_key_value_heads"] = heads
    if full.get("head_dim") is None and isinstance(heads, int) and isinstance(width, int) and heads > 0:
        full["head_dim"] = width // heads
    if config.get("model_type") == "qwen3_moe":
        full |= {"mlp_only_layers": _dense_layers(full), "decoder_sparse_step": 1}
        full.setdefault("num_experts", full.get("num_local_experts"))  # the name in transformers 5
    # transformers 5 replaces `rope_theta` and `rope_scaling` by `rope_parameters`.
    rope = full.get("rope_scaling") or full.get("rope_parameters") or {}
    full["rope_theta"] = rope.get("rope_theta", full.get("rope_theta", _DEFAULT_THETA))
    full["rope_scaling"] = _scaling(rope, full)
    layers = config.get("num_hidden_layers")
    has_sliding = "sliding_attention" in (full.get("layer_types") or [])
    if not has_sliding and ("layer_types" in config or full.get("max_window_layers", 62) >= (layers or 0)):
        full["sliding_window"] = None
    return full


def _scaling(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    given = {key: value for key, value in rope.items() if key not in ("type", "rope_theta")}
    if kind not in _SCALINGS:
        return given | {"rope_type": kind}
    length = "original_max_position_embeddings"
    full = dict.fromkeys(_SCALINGS[kind])
    full[length] = config.get(length, config.get("max_position_embeddings"))
    if kind == "yarn":
        full |= {"beta_fast": 32, "beta_slow": 1, "truncate": True}
    return full | {key: value for key, value in given.items() if value is not None} | {"rope_type": kind}


def _dense_layers(config: Mapping[str, Any]) -> list[int]:
    """The dense layers of a Qwen3 MoE model."""
    layers = range(min(config.get("num_hidden_layers") or 0, MOST_LAYERS))
    listed, sparse_step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step") or 1
    return [layer for layer in layers if layer in listed or (layer + 1) % sparse_step]


def check_same_model(theirs: dict[str, Any], ours: dict[str, Any], *, folder: Path, recipe: str) -> None:
    """Raises if a Hugging Face model computes another function than a recipe's.

    Args:
        theirs: from `read_hf_config`.
        ours: from `describe`.
        folder: of the model, for the message.
        recipe: for the message.

    Raises:
        UserError: they differ; the message names the first field.
    """
    difference = _difference(theirs, ours)
    if difference:
        name, found, expected = difference
        raise UserError(
            f"{folder / 'config.json'} has {name} = {found}, where the model of {recipe} has {expected}: "
            "name a recipe of the same model"
        )


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The first field that differs, `model_type` before all others, with both values."""
    expected = {name: value for name, value in ours.items() if name not in _NOT_COMPARED}
    expected |= {name: value for name, value in _FIXED.items() if name in theirs}
    for name in sorted(expected, key=lambda name: name != "model_type"):
        if theirs.get(name) != expected[name]:
            return name, *(json.dumps(value, default=str) for value in (theirs.get(name), expected[name]))
    return None


def model_section(description: dict[str, Any]) -> dict[str, Any]:
    """Converts a `config.json` to the section `[model]` of a recipe.

    Args:
        description: from `read_hf_config`.

    Raises:
        ValueError: torchtitan has no such model; the message begins with the field's name.
    """
    ours = describe(_spec_of(description), description["max_position_embeddings"])
    kept = {name: value for name, value in ours.items() if value is not None or name in _NONE_IS_WRITTEN}
    return {name: NONE_WORD if value is None else value for name, value in kept.items()}


def spec_of_section(section: Mapping[str, Any]) -> ModelSpec:
    """The model of a recipe's section `[model]`.

    Raises:
        ValueError: as `model_section`.
    """
    try:
        description = _with_defaults({k: None if v == NONE_WORD else v for k, v in section.items()})
    except (AttributeError, TypeError) as error:
        raise ValueError(f"the section [model] does not describe a model ({error})") from error
    spec = _spec_of(description)
    known = {**_FIXED, **describe(spec, 1)}
    for name in section:
        if name not in known:
            raise ValueError(f"{name} is not a field of [model] for a model of this type: remove it")
    return spec


def _spec_of(description: dict[str, Any]) -> ModelSpec:
    spec = spec_of(description)
    difference = _difference(description, describe(spec, 1))
    if difference:
        name, found, expected = difference
        raise ValueError(
            f"{name} is {found}, and torchtitan's {spec.name} supports only {expected}: this model cannot be "
            "trained"
        )
    return spec
