"""Recipes of tiny models, for tests of the whole trainer.

Rows have different numbers of ignored labels, so that every run tests the normalization of the loss.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.validate import Validator
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.qwen3 import model_registry
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from titan_async.recipes._training import SHAKESPEARE_VOCAB as VOCAB_SIZE
from titan_async.recipes.debug import debug, debug_moe
from titan_async.recipes.dense_models import LINEAR, llama
from titan_async.recipes.moe_models import moe
from titan_async.training.dataloader import Batch, TextDataLoader
from titan_async.training.optimizer.config import HIDDEN_MATRICES, ErrorFeedbackConfig, SGDConfig
from titan_async.training.trainer import AsyncTrainer
from tools.bench._chunked_recipes import debug_in_chunks  # noqa: F401 - a recipe

STEPS = 6
LR = 0.5
MOMENTUM = 0.9
MAX_NORM = 0.25  # clips every batch
BALANCE = 0.01  # as large as differences of scores, so that it affects the routing

MUON = {
    "lr": 0.02,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "adjust_lr": "match_rms_adamw",
    "compute_dtype": "float32",  # otherwise rounding would dominate comparisons
}

DIM, HEAD, EXPERTS = 32, 16, 4


def mask_labels(labels: torch.Tensor) -> torch.Tensor:
    """Ignores the first few labels of each row of [B, L]; their number depends only on the row."""
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
    """The debug recipe's Llama, small, with SGD."""
    spec = debug().model_spec
    model = llama(vocab_size=VOCAB_SIZE, dim=DIM, n_layers=4, n_heads=DIM // HEAD, hidden_dim=2 * DIM)
    return _tiny(dataclasses.replace(spec, model=model))


def small() -> AsyncTrainer.Config:
    """The debug recipe with two narrow layers, for tests that do not depend on the quality of the model."""
    config = debug()
    model = llama(vocab_size=VOCAB_SIZE, dim=2 * DIM, n_layers=2, n_heads=4, hidden_dim=4 * DIM)
    return dataclasses.replace(config, model_spec=dataclasses.replace(config.model_spec, model=model))


def titan_llama() -> Trainer.Config:
    """`tiny_llama` with torchtitan's own trainer and sections, and a loss in chunks."""
    config = tiny_llama()
    return Trainer.Config(
        model_spec=config.model_spec,
        hf_assets_path=config.hf_assets_path,
        loss=ChunkedLossWrapper.Config(num_chunks=4, loss_fn=config.loss),
        optimizer=OptimizersContainer.Config(
            param_groups=[
                ParamGroupConfig(
                    pattern=".*", optimizer_name="SGD", optimizer_kwargs={"lr": LR, "momentum": MOMENTUM}
                )
            ]
        ),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=3, decay_type="cosine", min_lr_factor=0.1),
        training=dataclasses.replace(config.training, disable_cuda_graphs=False),
        dataloader=MaskedLoader.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        validator=Validator.Config(enable=True, freq=3, steps=1, dataloader=config.validator.dataloader),
        checkpoint=CheckpointManager.Config(enable=True, interval=4, last_save_model_only=False),
        activation_checkpoint=None,
        debug=config.debug,
    )


class FormattedMetrics(MetricsProcessor):
    """A user's metrics, which format the norm as a float, as torchtitan's signature permits."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step: int, loss: float, max_loss: float, norm: float, **_: Any) -> None:
        self.lines = [*getattr(self, "lines", []), f"{step} {loss:.3f} {norm:.3f}"]


def titan_metrics() -> Trainer.Config:
    """`titan_llama` with a user's metrics."""
    return dataclasses.replace(titan_llama(), metrics=FormattedMetrics.Config(log_freq=1))


def tiny_moe() -> AsyncTrainer.Config:
    """The MoE model of the recipe `debug_moe`, small, with SGD."""
    return _tiny(_moe())


def tiny_mixed() -> AsyncTrainer.Config:
    """`tiny_moe` with two dense layers first, so that one of two stages has no experts."""
    spec = _moe()
    first, second, *rest = spec.model.layers
    layers = [_without_experts(first), _without_experts(second), *rest]
    return _tiny(dataclasses.replace(spec, model=dataclasses.replace(spec.model, layers=layers)))


def muon_llama() -> AsyncTrainer.Config:
    """`tiny_llama` with Muon for the matrices inside the layers."""
    return _with_muon(tiny_llama())


def muon_moe() -> AsyncTrainer.Config:
    """`tiny_moe` with Muon for matrices and experts."""
    return _with_muon(tiny_moe())


def muon_mixed() -> AsyncTrainer.Config:
    """`tiny_mixed` with Muon, which splits fused projections."""
    return _with_muon(tiny_mixed())


def fused_split(name: str) -> tuple[int, ...]:
    """Rows of each logical matrix in a weight: query, key and value of each head."""
    return (HEAD,) * 6 if "wqkv" in name else ()


def tied() -> AsyncTrainer.Config:
    """A model of torchtitan with tied embeddings."""
    spec = model_registry("debugmodel")
    assert spec.model.enable_weight_tying
    return _tiny(spec)


def tied_llama() -> AsyncTrainer.Config:
    """`tiny_llama` with tied embeddings."""
    config = tiny_llama()
    model = dataclasses.replace(config.model_spec.model, enable_weight_tying=True)
    return dataclasses.replace(config, model_spec=dataclasses.replace(config.model_spec, model=model))


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
        checkpoint=dataclasses.replace(config.checkpoint, interval=4),
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


def _moe() -> ModelSpec:
    """The model of the recipe `debug_moe`, small: sigmoid routers with a bias, and a shared expert."""
    model = moe(
        vocab_size=VOCAB_SIZE,
        dim=DIM,
        n_layers=4,
        n_heads=2,
        n_kv_heads=1,
        n_experts=EXPERTS,
        top_k=2,
        expert_dim=DIM,
        n_shared_experts=1,
        balance_rate=BALANCE,
    )
    return dataclasses.replace(debug_moe().model_spec, model=model)


def _without_experts(layer: Qwen3TransformerBlock.Config) -> Qwen3TransformerBlock.Config:
    """A dense layer instead of `layer`, with query, key and value in one matrix."""
    return dataclasses.replace(
        layer,
        attention=make_gqa_config(
            dim=DIM,
            n_heads=2,
            n_kv_heads=2,
            head_dim=HEAD,
            wqkv_param_init=LINEAR,
            wo_param_init=LINEAR,
            inner_attention=get_attention_config("flex"),
            fuse_qkv=True,
            rope=layer.attention.rope,
            qk_norm=layer.attention.qk_norm,
        ),
        feed_forward=make_ffn_config(
            dim=DIM, hidden_dim=2 * DIM, w1_param_init=LINEAR, w2w3_param_init=LINEAR
        ),
        moe=None,
    )
