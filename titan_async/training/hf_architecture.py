"""What a recipe's model computes, in the words of Hugging Face's `config.json`.

Two families: Llama 3 is `LlamaForCausalLM`, and the mixtures of experts are `Dots1ForCausalLM`.
"""

import dataclasses
from typing import Any

from torchtitan.models.common import ComplexRoPE, CosSinRoPE
from torchtitan.models.common.rope import RoPE
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from titan_async.errors import UserError
from titan_async.training.moe_adapter import Dots1StateDictAdapter
from titan_async.training.tying import is_tied

__all__ = ["LLAMA3_SCALING", "describe", "export_warning"]

LLAMA3_SCALING = {
    "factor": "scaling_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
"""The fields of a `rope_scaling`, and torchtitan's names for them."""


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
    if _has_bias(spec.model):
        raise _unknown(spec, "its projections have biases")
    return {**described[0], "max_position_embeddings": seq_len}


def _has_bias(config: Any) -> bool:
    """Whether a linear map in a tree of configurations has one."""
    if isinstance(config, list | tuple):
        return any(map(_has_bias, config))
    if not dataclasses.is_dataclass(config):
        return False
    fields = [getattr(config, field.name) for field in dataclasses.fields(config)]
    return getattr(config, "bias", None) is True or any(map(_has_bias, fields))


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
        "tie_word_embeddings": is_tied(model),
    }


def _scaling(spec: ModelSpec, rope: RoPE.Config) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    if rope.scaling != "llama":
        raise _unknown(spec, f"its positions are scaled by {rope.scaling}")
    return {"rope_type": "llama3"} | {theirs: getattr(rope, ours) for theirs, ours in LLAMA3_SCALING.items()}


def _unknown(spec: ModelSpec, why: str) -> UserError:
    return UserError(f"the model {spec.name} {spec.flavor} has no form in Hugging Face's format here: {why}")


def export_warning(config: Trainer.Config) -> str | None:
    """What to say before a run starts of which `titan-async convert` will refuse the checkpoints."""
    try:
        describe(config.model_spec, config.training.seq_len)
    except UserError as error:
        return (
            f"{error}; titan-async convert will refuse its checkpoints" if config.checkpoint.enable else None
        )
    return None
