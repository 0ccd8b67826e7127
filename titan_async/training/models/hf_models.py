"""Builds torchtitan's models from Hugging Face's `config.json`; `hf_architecture` is the inverse."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.moe import MoE
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.rope import RoPE
from torchtitan.models.deepseek_v3 import DeepSeekV3Model, parallelize_deepseekv3
from torchtitan.models.deepseek_v3.model import Attention, DeepSeekV3TransformerBlock
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from titan_async.training.models.hf_architecture import (
    LATENT_EPS,
    LLAMA3_SCALING,
    YARN_SCALING,
    Dots1StateDictAdapter,
)

__all__ = ["MOST_LAYERS", "spec_of"]

MOST_LAYERS = 1000
_MOST = 2**31 - 1

# Weights are loaded from a checkpoint; these initialize parameters that it may lack.
_WEIGHT = partial(nn.init.trunc_normal_, std=0.02)
_LINEAR: dict[str, Callable[..., Any]] = {"weight": _WEIGHT, "bias": nn.init.zeros_}
_EXPERTS: dict[str, Callable[..., Any]] = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), _WEIGHT)
_BALANCE_RATE = 1e-3
"""The step of a balancing bias after an update, as in DeepSeek-V3; transformers has no field for it."""


def spec_of(description: Mapping[str, Any]) -> ModelSpec:
    """The torchtitan model of a description.

    Fields for which torchtitan's models have no option (biases, other activations, sliding windows) are
    ignored: compare the description with `describe` of the result.

    Args:
        description: as `huggingface.config_json.with_defaults` returns it.

    Raises:
        ValueError: a sentence that begins with the name of the wrong field.
    """
    families = dict.fromkeys(("qwen3", "qwen3_moe", "dots1"), _qwen3)
    families |= {"llama": _llama, "deepseek_v3": _deepseek}
    kind = str(description.get("model_type"))
    if kind not in families:
        known = ", ".join(sorted(families))
        raise ValueError(f"model_type is {kind}, and only models of the types {known} can be trained here")
    return families[kind](_Fields(description))


class _Fields:
    """The fields of a description, validated when they are read."""

    def __init__(self, fields: Mapping[str, Any], inside: str = "") -> None:
        self._fields, self._inside = fields, inside

    def get(self, name: str) -> Any:
        return self._fields.get(name)

    def integer(self, name: str, *, least: int = 1, most: int = _MOST) -> int:
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self._wrong(name, f"an integer from {least} to {most}")
        return value

    def number(self, name: str) -> float:
        value = self.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _MOST:
            raise self._wrong(name, f"a number above 0, of at most {_MOST}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def divides(self, name: str, other: str) -> None:
        if self.integer(other) % self.integer(name):
            raise ValueError(f"{name} is {self.get(name)}, which does not divide {other}, {self.get(other)}")

    def scaling(self, kind: str) -> "_Fields | None":
        """The fields of `rope_scaling`, if it is of this kind."""
        scaling = self.get("rope_scaling")
        wanted = isinstance(scaling, Mapping) and scaling.get("rope_type") == kind
        return _Fields(scaling, "rope_scaling.") if wanted else None

    def _wrong(self, name: str, what: str) -> ValueError:
        value = self.get(name)
        found = "is missing" if value is None else f"is {value!r}"
        return ValueError(f"{self._inside}{name} {found}, and must be {what}")


def _llama(fields: _Fields) -> ModelSpec:
    rope = _rope(fields, ComplexRoPE.Config, _head_dim(fields))
    scaling = fields.scaling("llama3")
    if scaling is not None:
        found = {ours: scaling.number(theirs) for theirs, ours in LLAMA3_SCALING.items()}
        if found["low_freq_factor"] == found["high_freq_factor"]:
            raise ValueError("rope_scaling.low_freq_factor must differ from its high_freq_factor")
        found["original_max_position_embeddings"] = scaling.integer("original_max_position_embeddings")
        rope = dataclasses.replace(rope, scaling="llama", **found)
    layers = [
        Llama3TransformerBlock.Config(
            attention_norm=_norm(fields),
            ffn_norm=_norm(fields),
            attention=_heads(fields, rope),
            feed_forward=_dense(fields),
        )
        for _ in range(_layers(fields))
    ]
    model = Llama3Model.Config(layers=layers, **_ends(fields, tied=fields.flag("tie_word_embeddings")))
    return _spec("llama3", model, parallelize_llama, Llama3StateDictAdapter, None)


def _qwen3(fields: _Fields) -> ModelSpec:
    """Qwen3, its mixtures of experts, and dots.llm1: Qwen3's attention with DeepSeek-V3's experts."""
    kind, head_dim = fields.get("model_type"), _head_dim(fields)
    experts = {"qwen3": _no_experts, "qwen3_moe": _softmax_experts, "dots1": _sigmoid_experts}[kind]
    layers = [
        Qwen3TransformerBlock.Config(
            attention_norm=_norm(fields),
            ffn_norm=_norm(fields),
            attention=_heads(
                fields, _rope(fields, CosSinRoPE.Config, head_dim), qk_norm=_norm(fields, head_dim)
            ),
            **_feed_forward(fields, experts(fields, layer)),
        )
        for layer in range(_layers(fields))
    ]
    model = Qwen3Model.Config(layers=layers, **_ends(fields, tied=fields.flag("tie_word_embeddings")))
    adapter = Dots1StateDictAdapter if kind == "dots1" else Qwen3StateDictAdapter
    return _spec("qwen3", model, parallelize_qwen3, adapter, register_moe_load_balancing_hook)


def _deepseek(fields: _Fields) -> ModelSpec:
    rope = _rope(fields, ComplexRoPE.Config, fields.integer("qk_rope_head_dim"), name="qk_rope_head_dim")
    mscale, scaling = 1.0, fields.scaling("yarn")
    if scaling is not None:
        found = {ours: scaling.get(theirs) for theirs, ours in YARN_SCALING.items()}
        found |= {YARN_SCALING[name]: scaling.number(name) for name in ("factor", "beta_fast", "beta_slow")}
        found["original_seq_len"] = scaling.integer("original_max_position_embeddings")
        found["truncate"] = scaling.flag("truncate")
        rope, mscale = dataclasses.replace(rope, scaling="yarn", **found), scaling.number("mscale_all_dim")
    layers = [
        DeepSeekV3TransformerBlock.Config(
            attention_norm=_norm(fields),
            ffn_norm=_norm(fields),
            attention=_latent_attention(fields, rope, mscale),
            **_feed_forward(fields, _sigmoid_experts(fields, layer)),
        )
        for layer in range(_layers(fields))
    ]
    model = DeepSeekV3Model.Config(layers=layers, **_ends(fields, tied=False))
    balance = register_moe_load_balancing_hook
    return _spec("deepseek_v3", model, parallelize_deepseekv3, DeepSeekV3StateDictAdapter, balance)


def _spec(
    name: str,
    model: Any,
    parallelize_fn: Callable[..., Any],
    adapter: type[Any],
    after_optimizer: Callable[..., Any] | None,
) -> ModelSpec:
    return ModelSpec(
        name=name,
        flavor="of [model]",
        model=model,
        parallelize_fn=parallelize_fn,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=after_optimizer,
        state_dict_adapter=adapter,
    )


def _ends(fields: _Fields, *, tied: bool) -> dict[str, Any]:
    """The fields of a decoder's configuration other than its layers."""
    width, vocabulary = fields.integer("hidden_size"), fields.integer("vocab_size")
    return {
        "dim": width,
        "vocab_size": vocabulary,
        "enable_weight_tying": tied,
        "tok_embeddings": Embedding.Config(
            num_embeddings=vocabulary,
            embedding_dim=width,
            param_init={"weight": skip_param_init if tied else _WEIGHT},
        ),
        "norm": _norm(fields),
        "lm_head": _linear(width, vocabulary),
    }


def _layers(fields: _Fields) -> int:
    return fields.integer("num_hidden_layers", most=MOST_LAYERS)


def _linear(inputs: int, outputs: int) -> Linear.Config:
    return Linear.Config(in_features=inputs, out_features=outputs, param_init=_LINEAR)


def _norm(fields: _Fields, size: int | None = None, eps: float | None = None) -> RMSNorm.Config:
    return RMSNorm.Config(
        normalized_shape=size or fields.integer("hidden_size"),
        eps=eps or fields.number("rms_norm_eps"),
        param_init={"weight": nn.init.ones_},
    )


def _head_dim(fields: _Fields) -> int:
    fields.divides("num_key_value_heads", "num_attention_heads")
    return fields.integer("head_dim")


def _rope(fields: _Fields, rope: type[RoPE.Config], size: int, name: str = "head_dim") -> RoPE.Config:
    if size % 2:
        raise ValueError(f"{name} is {size}, and must be even")
    return rope(
        dim=size, max_seq_len=fields.integer("max_position_embeddings"), theta=fields.number("rope_theta")
    )


def _heads(fields: _Fields, rope: RoPE.Config, qk_norm: RMSNorm.Config | None = None) -> GQAttention.Config:
    # Separate matrices for query, key and value, because Muon orthogonalizes each matrix by itself.
    return make_gqa_config(
        dim=fields.integer("hidden_size"),
        n_heads=fields.integer("num_attention_heads"),
        n_kv_heads=fields.integer("num_key_value_heads"),
        head_dim=fields.integer("head_dim"),
        wqkv_param_init=_LINEAR,
        wo_param_init=_LINEAR,
        inner_attention=get_attention_config("flex"),
        rope=rope,
        qk_norm=qk_norm,
    )


def _latent_attention(fields: _Fields, rope: RoPE.Config, mscale: float) -> Attention.Config:
    width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    plain, values = fields.integer("qk_nope_head_dim"), fields.integer("v_head_dim")
    rank = fields.integer("q_lora_rank") if fields.get("q_lora_rank") is not None else 0
    latent, queries = fields.integer("kv_lora_rank"), heads * (plain + rope.dim)
    return Attention.Config(
        n_heads=heads,
        dim=width,
        wq=None if rank else _linear(width, queries),
        wq_a=_linear(width, rank) if rank else None,
        wq_b=_linear(rank, queries) if rank else None,
        q_norm=_norm(fields, rank or 1, LATENT_EPS),
        wkv_a=_linear(width, latent + rope.dim),
        kv_norm=_norm(fields, latent, LATENT_EPS),
        wkv_b=_linear(latent, heads * (plain + values)),
        wo=_linear(heads * values, width),
        q_lora_rank=rank,
        kv_lora_rank=latent,
        qk_nope_head_dim=plain,
        qk_rope_head_dim=rope.dim,
        v_head_dim=values,
        inner_attention=get_attention_config("flex"),
        rope=dataclasses.replace(rope),
        mscale=mscale,
    )


def _feed_forward(fields: _Fields, experts: MoE.Config | None) -> dict[str, Any]:
    return {"feed_forward": _dense(fields)} if experts is None else {"moe": experts}


def _dense(fields: _Fields, name: str = "intermediate_size", times: int = 1) -> FeedForward.Config:
    return make_ffn_config(
        dim=fields.integer("hidden_size"),
        hidden_dim=times * fields.integer(name),
        w1_param_init=_LINEAR,
        w2w3_param_init=_LINEAR,
    )


def _no_experts(fields: _Fields, layer: int) -> None:
    return None


def _softmax_experts(fields: _Fields, layer: int) -> MoE.Config | None:
    dense = fields.get("mlp_only_layers")
    if not isinstance(dense, list | tuple):
        raise ValueError(f"mlp_only_layers is {dense!r}, and must be a list of layers")
    if layer in dense:
        return None
    # transformers' Qwen3 has no balancing bias: it balances by a loss.
    return _experts(fields, "num_experts", "softmax", load_balance_coeff=None)


def _sigmoid_experts(fields: _Fields, layer: int) -> MoE.Config | None:
    if layer < fields.integer("first_k_dense_replace", least=0):
        return None
    groups, chosen = fields.integer("n_group"), fields.integer("topk_group")
    fields.divides("n_group", "n_routed_experts")
    if groups > 1 and fields.integer("n_routed_experts") < 2 * groups:
        raise ValueError(f"n_group is {groups}, and must leave two experts or more in a group")
    if chosen > groups:
        raise ValueError(f"topk_group is {chosen}, which exceeds n_group, {groups}")
    return _experts(
        fields,
        "n_routed_experts",
        "sigmoid",
        route_scale=fields.number("routed_scaling_factor"),
        num_expert_groups=groups if groups > 1 else None,
        num_limited_groups=chosen if groups > 1 else None,
        shared_experts=_dense(fields, "moe_intermediate_size", fields.integer("n_shared_experts")),
        load_balance_coeff=_BALANCE_RATE,
    )


def _experts(
    fields: _Fields,
    number: str,
    score_func: Any,
    *,
    load_balance_coeff: float | None,
    shared_experts: FeedForward.Config | None = None,
    **routing: Any,
) -> MoE.Config:
    width, experts = fields.integer("hidden_size"), fields.integer(number)
    top_k = fields.integer("num_experts_per_tok")
    if top_k > experts:
        raise ValueError(f"num_experts_per_tok is {top_k}, which exceeds {number}, {experts}")
    return make_moe_config(
        num_experts=experts,
        router=make_router_config(
            dim=width,
            num_experts=experts,
            gate_param_init=_LINEAR,
            top_k=top_k,
            score_func=score_func,
            route_norm=fields.flag("norm_topk_prob"),
            **routing,
        ),
        routed_experts=make_routed_experts_config(
            dim=width,
            hidden_dim=fields.integer("moe_intermediate_size"),
            num_experts=experts,
            top_k=top_k,
            param_init=_EXPERTS,
            comm_backend="standard",
        ),
        shared_experts=shared_experts,
        load_balance_coeff=load_balance_coeff,
    )
