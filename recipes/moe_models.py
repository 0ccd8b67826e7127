"""MoE models for recipes: Qwen3's attention with DeepSeek-V3's routing, built from torchtitan's modules.

transformers has the same model as `Dots1ForCausalLM` (dots.llm1, arXiv 2506.05767), for export; its Qwen3 MoE
model has neither a balancing bias nor shared experts.
"""

from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import CosSinRoPE, RMSNorm
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.moe import MoE
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec

from titan_async.recipes.dense_models import LINEAR, MAX_SEQ_LEN, NORM, depth_scaled, embedding, head
from titan_async.training.models.hf_architecture import Dots1StateDictAdapter

__all__ = ["moe", "moe_spec"]


def moe_spec(flavor: str, model: Qwen3Model.Config) -> ModelSpec:
    """torchtitan's spec of an MoE model, with an update of the routers' biases in each optimizer step."""
    return ModelSpec(
        name="qwen3",
        flavor=flavor,
        model=model,
        parallelize_fn=parallelize_qwen3,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=register_moe_load_balancing_hook,
        state_dict_adapter=Dots1StateDictAdapter,
    )


def moe(
    *,
    vocab_size: int,
    dim: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    n_experts: int,
    top_k: int,
    expert_dim: int,
    n_shared_experts: int,
    rope_theta: float = 10_000,
    balance_rate: float = 1e-3,
) -> Qwen3Model.Config:
    """A model with experts in every layer.

    - Grouped-query attention with QK norm, which bounds attention logits, so that neither a soft cap nor
      QK-clip is needed; separate matrices for query, key and value, because Muon orthogonalizes each matrix
      separately.
    - Sigmoid scores; the weights of the selected experts are normalized to the sum sqrt(top_k). With equal
      weights of 1 / top_k, the sum of top_k independent experts would have 1 / sqrt(top_k) of one expert's
      RMS; for six of 64 experts Moonlight computes 2.446 this way (arXiv 2502.16982).
    - Load balancing by a bias on the scores for selection, and not by a loss, which would interfere with the
      language model's (arXiv 2408.15664). Each update changes it by `balance_rate`, which is 1e-3 there, in
      DeepSeek-V3 and in Moonlight.
    - Shared experts process all tokens, so that the others can specialize (arXiv 2401.06066). They are one
      feed-forward layer of `n_shared_experts` times an expert's width.

    torchtitan supports neither DeepSeek-V3's auxiliary loss within a sequence (weight 1e-4) nor a z-loss. The
    latter prevents a common drift of logits, to which a softmax is invariant. A router's sigmoid is not
    invariant, and is computed in float32; the head's logits are limited by weight decay only.

    Args:
        vocab_size: rows of the embedding and of the head, which are not tied.
        dim: width of the residual stream.
        n_layers: layers.
        n_heads: query heads, of size dim / n_heads.
        n_kv_heads: key and value heads.
        n_experts: experts in each layer.
        top_k: selected experts per token, without the shared ones.
        expert_dim: width inside an expert.
        n_shared_experts: experts that process every token.
        rope_theta: base of the rotary frequencies.
        balance_rate: change of a router's bias per update.
    """
    head_dim = dim // n_heads
    layers = [
        Qwen3TransformerBlock.Config(
            attention_norm=_norm(dim),
            ffn_norm=_norm(dim),
            attention=make_gqa_config(
                dim=dim,
                n_heads=n_heads,
                n_kv_heads=n_kv_heads,
                head_dim=head_dim,
                wqkv_param_init=LINEAR,
                wo_param_init=depth_scaled(layer),
                inner_attention=get_attention_config("flex"),
                fuse_qkv=False,
                rope=CosSinRoPE.Config(dim=head_dim, max_seq_len=MAX_SEQ_LEN, theta=rope_theta),
                qk_norm=_norm(head_dim),
            ),
            moe=_experts(
                layer,
                dim=dim,
                n_experts=n_experts,
                top_k=top_k,
                expert_dim=expert_dim,
                n_shared_experts=n_shared_experts,
                balance_rate=balance_rate,
            ),
        )
        for layer in range(n_layers)
    ]
    return Qwen3Model.Config(
        dim=dim,
        vocab_size=vocab_size,
        tok_embeddings=embedding(vocab_size, dim),
        norm=_norm(dim),
        lm_head=head(vocab_size, dim),
        layers=layers,
    )


def _experts(
    layer: int,
    *,
    dim: int,
    n_experts: int,
    top_k: int,
    expert_dim: int,
    n_shared_experts: int,
    balance_rate: float,
) -> MoE.Config:
    residual = depth_scaled(layer)
    return make_moe_config(
        num_experts=n_experts,
        router=make_router_config(
            dim=dim,
            num_experts=n_experts,
            gate_param_init=LINEAR,
            top_k=top_k,
            score_func="sigmoid",
            route_norm=True,
            route_scale=top_k**0.5,
        ),
        routed_experts=make_routed_experts_config(
            dim=dim,
            hidden_dim=expert_dim,
            num_experts=n_experts,
            top_k=top_k,
            param_init={
                "w1_EFD": LINEAR["weight"],
                "w2_EDF": residual["weight"],
                "w3_EFD": residual["weight"],
            },
            comm_backend="standard",
        ),
        shared_experts=make_ffn_config(
            dim=dim,
            hidden_dim=n_shared_experts * expert_dim,
            w1_param_init=LINEAR,
            w2w3_param_init=residual,
        ),
        load_balance_coeff=balance_rate,
    )


def _norm(size: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, param_init=NORM)
