"""Dense models for recipes: Llama 3's architecture in any shape, built from torchtitan's modules."""

import dataclasses
from collections.abc import Callable
from functools import partial

import torch.nn as nn
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.common.param_init import depth_scaled_std, skip_param_init
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

__all__ = ["LINEAR", "NORM", "dense_spec", "depth_scaled", "embedding", "head", "llama"]

MAX_SEQ_LEN = 8192
"""The maximum of `training.seq_len` in a recipe: the length of the RoPE cache."""

LINEAR: dict[str, Callable] = {"weight": partial(nn.init.trunc_normal_, std=0.02), "bias": nn.init.zeros_}
"""Initialization in torchtitan's Llama 3 and DeepSeek-V3 of matrices that do not write to the residual
stream."""

NORM: dict[str, Callable] = {"weight": nn.init.ones_}


def depth_scaled(layer: int) -> dict[str, Callable]:
    """torchtitan's initialization of matrices that write to the residual stream, smaller in deeper layers."""
    std = depth_scaled_std(0.02, layer)
    return {"weight": partial(nn.init.trunc_normal_, std=std), "bias": nn.init.zeros_}


def embedding(vocab_size: int, dim: int) -> Embedding.Config:
    """torchtitan's token embedding, with unit variance, comparable to the layers' outputs."""
    return Embedding.Config(
        num_embeddings=vocab_size, embedding_dim=dim, param_init={"weight": partial(nn.init.normal_, std=1.0)}
    )


def head(vocab_size: int, dim: int) -> Linear.Config:
    """torchtitan's output projection."""
    std = dim**-0.5
    return Linear.Config(
        in_features=dim,
        out_features=vocab_size,
        param_init={"weight": partial(nn.init.trunc_normal_, std=std, a=-3 * std, b=3 * std)},
    )


def dense_spec(flavor: str, model: Llama3Model.Config) -> ModelSpec:
    """torchtitan's spec of a Llama, which can be exported as Hugging Face's `LlamaForCausalLM`."""
    return ModelSpec(
        name="llama3",
        flavor=flavor,
        model=model,
        parallelize_fn=parallelize_llama,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=Llama3StateDictAdapter,
    )


def llama(
    *,
    vocab_size: int,
    dim: int,
    n_layers: int,
    n_heads: int,
    hidden_dim: int,
    n_kv_heads: int | None = None,
    rope_theta: float = 10_000,
    tied: bool = False,
) -> Llama3Model.Config:
    """A Llama without biases: grouped-query attention, SwiGLU, RMSNorm, rotary positions.

    Query, key and value have separate matrices, because Muon orthogonalizes each matrix separately.

    Args:
        vocab_size: rows of the embedding and of the head.
        dim: width of the residual stream.
        n_layers: layers.
        n_heads: query heads, of size dim / n_heads.
        hidden_dim: width inside the feed-forward layers.
        n_kv_heads: key and value heads; by default as many as query heads.
        rope_theta: base of the rotary frequencies.
        tied: whether embedding and head are tied; the weight is initialized as a head.
    """
    layers = [
        Llama3TransformerBlock.Config(
            attention_norm=RMSNorm.Config(normalized_shape=dim, param_init=NORM),
            ffn_norm=RMSNorm.Config(normalized_shape=dim, param_init=NORM),
            attention=make_gqa_config(
                dim=dim,
                n_heads=n_heads,
                n_kv_heads=n_kv_heads,
                wqkv_param_init=LINEAR,
                wo_param_init=depth_scaled(layer),
                inner_attention=get_attention_config("flex"),
                rope=ComplexRoPE.Config(dim=dim // n_heads, max_seq_len=MAX_SEQ_LEN, theta=rope_theta),
            ),
            feed_forward=make_ffn_config(
                dim=dim, hidden_dim=hidden_dim, w1_param_init=LINEAR, w2w3_param_init=depth_scaled(layer)
            ),
        )
        for layer in range(n_layers)
    ]
    tokens = embedding(vocab_size, dim)
    if tied:
        tokens = dataclasses.replace(tokens, param_init={"weight": skip_param_init})
    return Llama3Model.Config(
        dim=dim,
        vocab_size=vocab_size,
        enable_weight_tying=tied,
        tok_embeddings=tokens,
        norm=RMSNorm.Config(normalized_shape=dim, param_init=NORM),
        lm_head=head(vocab_size, dim),
        layers=layers,
    )
