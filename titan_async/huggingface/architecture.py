"""What a model computes, in the words of Hugging Face's `config.json`: written from a recipe, and compared.

Two families: Llama 3 is `LlamaForCausalLM`, and the mixtures of experts are `Dots1ForCausalLM`.
"""

import json
from pathlib import Path
from typing import Any

from torchtitan.models.common import ComplexRoPE, CosSinRoPE
from torchtitan.models.common.rope import RoPE
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from titan_async.errors import UserError
from titan_async.training.moe_adapter import Dots1StateDictAdapter
from titan_async.whole_files import read_json

__all__ = ["KEPT_TYPE", "check_same", "describe", "read_description"]

KEPT_TYPE = (".mlp.gate.weight", ".mlp.gate.e_score_correction_bias")
"""Endings of tensors that no change of type touches: transformers keeps routers in float32."""

_LLAMA3_SCALING = {
    "factor": "scaling_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    },
    "dots1": {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "n_shared_experts": None,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
}
"""What transformers takes for a field that a `config.json` leaves out."""

_DEFAULT_THETA = 10_000.0
_NOT_COMPARED = ("architectures", "max_position_embeddings", "max_window_layers")


def describe(spec: ModelSpec, seq_len: int) -> dict[str, Any]:
    """The fields of `config.json` that say what the model computes.

    Args:
        spec: of the recipe.
        seq_len: the longest sequence that the model has seen, which becomes `max_position_embeddings`.

    Raises:
        UserError: transformers has no such model, as far as is known here.

    Examples:
        >>> from titan_async.config.recipe_file import resolve
        >>> fields = describe(resolve(["debug_cpu.toml"]).model_spec, seq_len=256)
        >>> fields["architectures"], fields["num_hidden_layers"], fields["max_position_embeddings"]
        (['LlamaForCausalLM'], 6, 256)
    """
    adapter = spec.state_dict_adapter
    if adapter is Llama3StateDictAdapter:
        make = _llama
    elif adapter is Dots1StateDictAdapter:
        make = _dots1
    else:
        raise _unknown(spec, "its family is not one of Llama 3 and dots.llm1")
    described = [make(spec, layer) for layer in spec.model.layers]
    if any(other != described[0] for other in described):
        raise _unknown(spec, "its layers differ")
    if getattr(spec.model, "enable_weight_tying", False):
        raise _unknown(spec, "its embedding and head are one weight")
    return {**described[0], "max_position_embeddings": seq_len}


def _llama(spec: ModelSpec, layer: Any) -> dict[str, Any]:
    if layer.feed_forward is None or layer.attention.qk_norm is not None:
        raise _unknown(spec, "its layers are not Llama's")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_common(spec, layer, ComplexRoPE.Config),
        "intermediate_size": layer.feed_forward.w1.out_features,
        "mlp_bias": False,
    }


def _dots1(spec: ModelSpec, layer: Any) -> dict[str, Any]:
    moe, router = layer.moe, getattr(layer.moe, "router", None)
    if (
        moe is None
        or moe.shared_experts is None
        or moe.load_balance_coeff is None
        or layer.attention.qk_norm is None
        or layer.attention.qk_norm.eps != layer.attention_norm.eps
        or router.score_func != "sigmoid"
        or router.num_expert_groups is not None
    ):
        raise _unknown(spec, "its layers are not those of dots.llm1")
    width = moe.routed_experts.inner_experts.hidden_dim
    shared, rest = divmod(moe.shared_experts.w1.out_features, width)
    if rest:
        raise _unknown(spec, "its shared experts are not a multiple of the others' width")
    return {
        "architectures": ["Dots1ForCausalLM"],
        "model_type": "dots1",
        **_common(spec, layer, CosSinRoPE.Config),
        "moe_intermediate_size": width,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": shared,
        "num_experts_per_tok": router.top_k,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": router.route_norm,
        "routed_scaling_factor": router.route_scale,
        "sliding_window": None,
        "max_window_layers": len(spec.model.layers),
    }


def _common(spec: ModelSpec, layer: Any, rope: type[RoPE.Config]) -> dict[str, Any]:
    model, attention = spec.model, layer.attention
    if not isinstance(attention.rope, rope):
        raise _unknown(spec, f"its positions are {type(attention.rope).__qualname__}")
    if not layer.attention_norm.eps == layer.ffn_norm.eps == model.norm.eps:
        raise _unknown(spec, "its norms have different epsilons")
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_heads if attention.n_kv_heads is None else attention.n_kv_heads,
        "head_dim": attention.head_dim or model.dim // attention.n_heads,
        "hidden_act": "silu",
        "rms_norm_eps": layer.attention_norm.eps,
        "rope_theta": float(attention.rope.theta),
        "rope_scaling": _scaling(spec, attention.rope),
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def _scaling(spec: ModelSpec, rope: RoPE.Config) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    if rope.scaling != "llama":
        raise _unknown(spec, f"its positions are scaled by {rope.scaling}")
    return {"rope_type": "llama3"} | {theirs: getattr(rope, ours) for theirs, ours in _LLAMA3_SCALING.items()}


def _unknown(spec: ModelSpec, why: str) -> UserError:
    return UserError(f"the model {spec.name} {spec.flavor} has no form in Hugging Face's format here: {why}")


def read_description(folder: Path) -> dict[str, Any]:
    """The fields of a folder's `config.json`, with transformers' defaults for those that it leaves out.

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


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    full = {**_DEFAULTS.get(str(config.get("model_type")), {}), **config}
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if full.get("num_key_value_heads") is None:
        full["num_key_value_heads"] = heads
    if full.get("head_dim") is None and isinstance(heads, int) and isinstance(width, int) and heads > 0:
        full["head_dim"] = width // heads
    # transformers 5 has `rope_parameters` where 4 has `rope_theta` and `rope_scaling`.
    rope = full.get("rope_scaling") or full.get("rope_parameters") or {}
    full["rope_theta"] = rope.get("rope_theta", full.get("rope_theta", _DEFAULT_THETA))
    kind = rope.get("rope_type", rope.get("type", "default"))
    full["rope_scaling"] = (
        None if kind == "default" else {"rope_type": kind} | {key: rope.get(key) for key in _LLAMA3_SCALING}
    )
    layers = config.get("num_hidden_layers")
    slides = "sliding_attention" in (full.get("layer_types") or [])
    if not slides and ("layer_types" in config or full.get("max_window_layers", 62) >= (layers or 0)):
        full["sliding_window"] = None
    return full


def check_same(theirs: dict[str, Any], ours: dict[str, Any], *, folder: Path, recipe: str) -> None:
    """Refuses a Hugging Face model that computes something else than a recipe's.

    Args:
        theirs: from `read_description`.
        ours: from `describe`.
        folder: of the model, for the message.
        recipe: for the message.

    Raises:
        UserError: they differ; the sentence names the first field.
    """
    names = [name for name in ours if name not in _NOT_COMPARED]
    for name in sorted(names, key=lambda name: name != "model_type"):
        if theirs.get(name) != ours[name]:
            raise UserError(
                f"{folder / 'config.json'} has {name} = {json.dumps(theirs.get(name))}, where the model of "
                f"{recipe} has {json.dumps(ours[name])}: name a recipe of the same model"
            )
