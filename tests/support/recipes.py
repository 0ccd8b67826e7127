"""Recipes of tiny models, for tests of the whole trainer.

Labels are left out in uneven numbers, so that every run shows how the loss is normalized.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.models.common import CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.qwen3 import model_registry
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec

from titan_async.recipes._training import SHAKESPEARE_VOCAB as VOCAB_SIZE
from titan_async.recipes.debug import debug
from titan_async.recipes.dense_models import llama
from titan_async.training.data import Batch, TextDataLoader
from titan_async.training.optimizer_config import HIDDEN_MATRICES, ErrorFeedbackConfig, SGDConfig
from titan_async.training.trainer import AsyncTrainer

STEPS = 6
LR = 0.5
MOMENTUM = 0.9
MAX_NORM = 0.25  # clips every batch
BALANCE = 0.01  # as large as the differences of scores, so that it changes who gets which token

MUON = {
    "lr": 0.02,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "adjust_lr": "match_rms_adamw",
    "compute_dtype": "float32",  # else rounding would be all that a comparison shows
}

DIM, HEAD, EXPERTS = 32, 16, 4
NORMAL = {"weight": partial(nn.init.normal_, std=0.1), "bias": nn.init.zeros_}
ONES = {"weight": nn.init.ones_}


def mask_labels(labels: torch.Tensor) -> torch.Tensor:
    """The labels [B, L] without the first few of each row; how many depends on the row alone."""
    first = (labels.sum(dim=1) % (labels.shape[1] // 2))[:, None]
    return torch.where(torch.arange(labels.shape[1]) < first, IGNORE_INDEX, labels)


class MaskedLoader(TextDataLoader):
    """Text whose rows have different numbers of valid labels."""

    @dataclass(kw_only=True, slots=True)
    class Config(TextDataLoader.Config):
        pass

    def __iter__(self) -> Iterator[Batch]:
        for fields, labels in super().__iter__():
            yield fields, mask_labels(labels)


def tiny_llama() -> AsyncTrainer.Config:
    """The debug recipe's Llama, small, under SGD."""
    spec = debug().model_spec
    model = llama(vocab_size=VOCAB_SIZE, dim=DIM, n_layers=4, n_heads=DIM // HEAD, hidden_dim=2 * DIM)
    return _tiny(dataclasses.replace(spec, model=model))


def tiny_moe() -> AsyncTrainer.Config:
    """torchtitan's Qwen3 with four experts in each of its four layers."""
    return _tiny(_qwen3([True, True, True, True]))


def tiny_mixed() -> AsyncTrainer.Config:
    """The same, whose first two layers are dense: of two stages, one has no experts."""
    return _tiny(_qwen3([False, False, True, True]))


def muon_llama() -> AsyncTrainer.Config:
    """`tiny_llama` with Muon for the matrices inside the layers."""
    return _with_muon(tiny_llama())


def muon_moe() -> AsyncTrainer.Config:
    """`tiny_moe` with Muon for matrices and experts, and the parts of fused projections by themselves."""
    return _with_muon(tiny_moe())


def fused_split(name: str) -> tuple[int, ...]:
    """Rows of the logical matrices of which a weight is made: query, key and value of each head."""
    return (HEAD,) * 6 if "wqkv" in name else ()


def tied() -> AsyncTrainer.Config:
    """A model whose embedding is its head."""
    spec = model_registry("debugmodel")
    assert spec.model.enable_weight_tying
    return _tiny(spec)


def _tiny(spec: ModelSpec) -> AsyncTrainer.Config:
    config = debug()
    return dataclasses.replace(
        config,
        model_spec=spec,
        training=dataclasses.replace(
            config.training, steps=STEPS, seq_len=32, local_batch_size=4, max_norm=MAX_NORM
        ),
        parallelism=dataclasses.replace(config.parallelism, pipeline_parallel_microbatch_size=1),
        lr_scheduler=dataclasses.replace(config.lr_scheduler, warmup_steps=3),
        optimizer=dataclasses.replace(
            config.optimizer,
            name="sgd",
            sgd=SGDConfig(lr=LR, momentum=MOMENTUM),
            error_feedback=ErrorFeedbackConfig(strength=1.0),
        ),
        dataloader=MaskedLoader.Config(),
        metrics=dataclasses.replace(config.metrics, log_freq=1),
        validator=dataclasses.replace(config.validator, freq=3, steps=1),
        checkpoint=dataclasses.replace(config.checkpoint, interval=2),
    )


def _with_muon(config: AsyncTrainer.Config) -> AsyncTrainer.Config:
    groups = [
        ParamGroupConfig(
            pattern=r"\.wqkv\.",
            optimizer_name="Muon",
            optimizer_kwargs={**MUON, "split_sizes": fused_split("wqkv")},
        ),
        ParamGroupConfig(pattern=HIDDEN_MATRICES, optimizer_name="Muon", optimizer_kwargs=MUON),
        ParamGroupConfig(
            pattern=".*", optimizer_name="SGD", optimizer_kwargs={"lr": LR, "momentum": MOMENTUM}
        ),
    ]
    if not any(hasattr(layer.attention.qkv_linear, "wqkv") for layer in config.model_spec.model.layers):
        groups.pop(0)
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, param_groups=groups))


def _qwen3(has_experts: list[bool]) -> ModelSpec:
    return dataclasses.replace(
        model_registry("debugmodel_moe"),
        model=Qwen3Model.Config(
            dim=DIM,
            vocab_size=VOCAB_SIZE,
            tok_embeddings=Embedding.Config(
                num_embeddings=VOCAB_SIZE, embedding_dim=DIM, param_init={"weight": nn.init.normal_}
            ),
            norm=_norm(DIM),
            lm_head=Linear.Config(in_features=DIM, out_features=VOCAB_SIZE, param_init=NORMAL),
            layers=[_layer(moe) for moe in has_experts],
        ),
    )


def _norm(size: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, param_init=ONES)


def _layer(moe: bool) -> Qwen3TransformerBlock.Config:
    feed_forward = make_ffn_config(dim=DIM, hidden_dim=2 * DIM, w1_param_init=NORMAL, w2w3_param_init=NORMAL)
    return Qwen3TransformerBlock.Config(
        attention_norm=_norm(DIM),
        ffn_norm=_norm(DIM),
        attention=make_gqa_config(
            dim=DIM,
            n_heads=2,
            n_kv_heads=2,
            head_dim=HEAD,
            wqkv_param_init=NORMAL,
            wo_param_init=NORMAL,
            inner_attention=get_attention_config("flex"),
            fuse_qkv=True,
            rope=CosSinRoPE.Config(dim=HEAD, max_seq_len=512, theta=10_000.0),
            qk_norm=_norm(HEAD),
        ),
        feed_forward=None if moe else feed_forward,
        moe=_experts() if moe else None,
    )


def _experts():
    return make_moe_config(
        num_experts=EXPERTS,
        router=make_router_config(
            dim=DIM,
            num_experts=EXPERTS,
            gate_param_init=NORMAL,
            top_k=2,
            score_func="softmax",
            route_norm=True,
        ),
        routed_experts=make_routed_experts_config(
            dim=DIM,
            hidden_dim=DIM,
            num_experts=EXPERTS,
            top_k=2,
            param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), NORMAL["weight"]),
            comm_backend="standard",
        ),
        load_balance_coeff=BALANCE,
    )
