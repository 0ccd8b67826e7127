"""Describes a recipe's model by the fields of Hugging Face's `config.json`; `hf_models` is the inverse.

torchtitan's Llama 3 is `LlamaForCausalLM`, its Qwen3 `Qwen3ForCausalLM` or, with experts,
`Qwen3MoeForCausalLM`, its DeepSeek-V3 `DeepseekV3ForCausalLM`; the project's own mixtures of experts are
`Dots1ForCausalLM`.
"""

import dataclasses
from typing import Any

from torchtitan.models.common import ComplexRoPE, CosSinRoPE
from torchtitan.models.common.rope import RoPE
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from titan_async.errors import UserError
from titan_async.training.models.tying import is_tied

__all__ = [
    "LATENT_EPS",
    "LLAMA3_SCALING",
    "YARN_SCALING",
    "Dots1StateDictAdapter",
    "describe",
    "export_warning",
]

LLAMA3_SCALING = {
    "factor": "scaling_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
"""The fields of a `rope_scaling`, and torchtitan's names for them."""

YARN_SCALING = {
    "factor": "rope_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "original_max_position_embeddings": "original_seq_len",
    "truncate": "truncate",
}
"""The same for YaRN; `mscale` is a field of the attention."""

LATENT_EPS = 1e-6
"""The epsilon of the norms inside DeepSeek-V3's attention in transformers, whatever `rms_norm_eps` is."""


def describe(spec: ModelSpec, seq_len: int) -> dict[str, Any]:
    """The fields of `config.json` that define what the model computes.

    Args:
        spec: of the recipe.
        seq_len: of training, which becomes `max_position_embeddings`.

    Raises:
        UserError: no architecture of transformers that is known here computes the same.

    Examples:
        >>> from titan_async.config.recipe_file import resolve
        >>> fields = describe(resolve(["debug_cpu.toml"]).model_spec, seq_len=256)
        >>> fields["architectures"], fields["num_hidden_layers"], fields["max_position_embeddings"]
        (['LlamaForCausalLM'], 6, 256)
    """
    has_experts = any(getattr(layer, "moe", None) is not None for layer in getattr(spec.model, "layers", []))
    families = {
        Llama3StateDictAdapter: _llama,
        Qwen3StateDictAdapter: _qwen3_moe if has_experts else _qwen3,
        Dots1StateDictAdapter: _dots1,
        DeepSeekV3StateDictAdapter: _deepseek_v3,
    }
    make = families.get(spec.state_dict_adapter)
    if make is None:
        raise _unknown(spec, "its family is not one of Llama 3, Qwen3, dots.llm1 and DeepSeek-V3")
    if _has_bias(spec.model):
        raise _unknown(spec, "its projections have biases")
    # A field that only layers with experts have, or only those without, must agree among these.
    described: dict[str, Any] = {}
    for layer in spec.model.layers:
        fields = make(spec, layer)
        if any(described.setdefault(name, value) != value for name, value in fields.items()):
            raise _unknown(spec, "its layers differ")
    return {**described, "max_position_embeddings": seq_len}


def _has_bias(config: Any) -> bool:
    """Whether a linear layer in a tree of configurations has a bias."""
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
        **_heads(spec, layer),
        "intermediate_size": layer.feed_forward.w1.out_features,
        "mlp_bias": False,
    }


def _qwen3(spec: ModelSpec, layer: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **_normalized_heads(spec, layer),
        "intermediate_size": layer.feed_forward.w1.out_features,
    }


def _qwen3_moe(spec: ModelSpec, layer: Any) -> dict[str, Any]:
    common = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **_normalized_heads(spec, layer),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, layer in enumerate(spec.model.layers) if layer.moe is None],
    }
    if layer.moe is None:
        return {**common, "intermediate_size": layer.feed_forward.w1.out_features}
    moe, router = layer.moe, layer.moe.router
    if (
        moe.shared_experts is not None
        or moe.load_balance_coeff is not None
        or router.score_func != "softmax"
        or router.num_expert_groups is not None
        or router.route_scale != 1.0
    ):
        raise _unknown(spec, "its experts are not Qwen3's, which have no shared expert and no balancing bias")
    return {
        **common,
        "moe_intermediate_size": moe.routed_experts.inner_experts.hidden_dim,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": router.top_k,
        "norm_topk_prob": router.route_norm,
    }


def _dots1(spec: ModelSpec, layer: Any) -> dict[str, Any]:
    return {
        "architectures": ["Dots1ForCausalLM"],
        "model_type": "dots1",
        **_normalized_heads(spec, layer),
        **_sigmoid_experts(spec, layer, "dots.llm1"),
        "sliding_window": None,
        "max_window_layers": len(spec.model.layers),
    }


def _deepseek_v3(spec: ModelSpec, layer: Any) -> dict[str, Any]:
    attention = layer.attention
    norms = [attention.kv_norm, *([attention.q_norm] if attention.q_lora_rank else [])]
    if any(norm.eps != LATENT_EPS for norm in norms):
        raise _unknown(spec, f"the epsilon of the norms inside its attention is not {LATENT_EPS}")
    if spec.model.mtp_layers:
        raise _unknown(spec, "it has layers that predict several tokens")
    if spec.model.enable_weight_tying:
        raise _unknown(spec, "torchtitan does not support tied embeddings of DeepSeek-V3")
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **_common(spec, layer, ComplexRoPE.Config, mscale=attention.mscale),
        "num_key_value_heads": attention.n_heads,
        "q_lora_rank": attention.q_lora_rank or None,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_nope_head_dim": attention.qk_nope_head_dim,
        "qk_rope_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim,
        "rope_interleave": True,
        "num_nextn_predict_layers": 0,
        **_sigmoid_experts(spec, layer, "DeepSeek-V3"),
    }


def _sigmoid_experts(spec: ModelSpec, layer: Any, family: str) -> dict[str, Any]:
    """The fields of the experts of dots.llm1 and DeepSeek-V3, whose first layers have none."""
    layers = spec.model.layers
    dense = [layer.moe is None for layer in layers]
    common = {"first_k_dense_replace": sum(dense)}
    if dense != sorted(dense, reverse=True):
        raise _unknown(spec, "layers without experts follow layers with experts")
    if layer.moe is None:
        return {**common, "intermediate_size": layer.feed_forward.w1.out_features}
    moe, router = layer.moe, layer.moe.router
    if moe.shared_experts is None or moe.load_balance_coeff is None or router.score_func != "sigmoid":
        raise _unknown(spec, f"its layers are not those of {family}")
    width = moe.routed_experts.inner_experts.hidden_dim
    shared, rest = divmod(moe.shared_experts.w1.out_features, width)
    if rest:
        raise _unknown(spec, "its shared experts are not a multiple of the others' width")
    return {
        **common,
        "moe_intermediate_size": width,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": shared,
        "num_experts_per_tok": router.top_k,
        "n_group": router.num_expert_groups or 1,
        "topk_group": router.num_limited_groups or 1,
        "norm_topk_prob": router.route_norm,
        "routed_scaling_factor": router.route_scale,
    }


def _normalized_heads(spec: ModelSpec, layer: Any) -> dict[str, Any]:
    """The fields of Qwen3's attention, which dots.llm1 uses too."""
    norm = layer.attention.qk_norm
    if norm is None or norm.eps != layer.attention_norm.eps:
        raise _unknown(spec, "its layers are not those of dots.llm1 and Qwen3, which normalize queries")
    return {**_common(spec, layer, CosSinRoPE.Config), **_heads(spec, layer)}


def _heads(spec: ModelSpec, layer: Any) -> dict[str, Any]:
    attention = layer.attention
    return {
        "num_key_value_heads": attention.n_heads if attention.n_kv_heads is None else attention.n_kv_heads,
        "head_dim": attention.head_dim or spec.model.dim // attention.n_heads,
    }


def _common(
    spec: ModelSpec, layer: Any, rope: type[RoPE.Config], mscale: float | None = None
) -> dict[str, Any]:
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
        "hidden_act": "silu",
        "rms_norm_eps": layer.attention_norm.eps,
        "rope_theta": float(attention.rope.theta),
        "rope_scaling": _scaling(spec, attention.rope, mscale),
        "attention_bias": False,
        "tie_word_embeddings": is_tied(model),
    }


def _scaling(spec: ModelSpec, rope: RoPE.Config, mscale: float | None) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    if rope.scaling == "llama":
        return {"rope_type": "llama3", **_fields_of(rope, LLAMA3_SCALING)}
    if mscale is None:  # torchtitan's other attentions do not apply YaRN's scale of the logits
        raise _unknown(spec, f"its positions are scaled by {rope.scaling}")
    both = {"mscale": mscale, "mscale_all_dim": mscale}
    return {"rope_type": "yarn", **_fields_of(rope, YARN_SCALING), **both}


def _fields_of(rope: RoPE.Config, names: dict[str, str]) -> dict[str, Any]:
    return {theirs: getattr(rope, ours) for theirs, ours in names.items()}


def _unknown(spec: ModelSpec, why: str) -> UserError:
    return UserError(f"the model {spec.name} {spec.flavor} cannot be written in Hugging Face's format: {why}")


def export_warning(config: Trainer.Config) -> str | None:
    """A warning, if `titan-async convert` will not support the run's checkpoints."""
    try:
        describe(config.model_spec, config.training.seq_len)
    except UserError as error:
        return (
            f"{error}; titan-async convert will refuse its checkpoints" if config.checkpoint.enable else None
        )
    return None


class Dots1StateDictAdapter(Qwen3StateDictAdapter):
    """To and from the checkpoint format of transformers' `Dots1ForCausalLM`."""

    def __init__(self, model_config: Qwen3Model.Config, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self.from_hf_map |= {
            "model.layers.{}.mlp.shared_experts.gate_proj.weight": "layers.{}.moe.shared_experts.w1.weight",
            "model.layers.{}.mlp.shared_experts.up_proj.weight": "layers.{}.moe.shared_experts.w3.weight",
            "model.layers.{}.mlp.shared_experts.down_proj.weight": "layers.{}.moe.shared_experts.w2.weight",
            "model.layers.{}.mlp.gate.e_score_correction_bias": "layers.{}.moe.expert_bias_E",
        }
