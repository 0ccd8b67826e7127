"""The laptop-size recipe: a small Llama on Shakespeare, trained on CPU in minutes."""

from functools import partial

import torch.nn as nn
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.common.param_init import depth_scaled_std
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from titan_async.data import shakespeare_tokenizer_folder
from titan_async.training.checkpoint import AsyncCheckpointer
from titan_async.training.data import TextDataLoader
from titan_async.training.metrics import AsyncMetrics
from titan_async.training.optimizer import AsyncOptimizers
from titan_async.training.optimizer_config import AdamWConfig, MuonConfig
from titan_async.training.trainer import AsyncTrainer
from titan_async.training.validator import AsyncValidator

VOCAB_SIZE = 2048  # that of the tokenizer shipped with the project


def debug() -> AsyncTrainer.Config:
    """3.4 M parameters on Shakespeare's plays; two pipeline stages, minutes on a laptop's CPU.

    - Six layers of width 192: with embedding and head counted as a layer each, they split evenly over
      one, two and four stages.
    - Muon's learning rate with `match_rms_adamw` is on AdamW's scale. Of 5e-3, 1e-2 and 2e-2 the middle one
      gave the lowest validation loss after 300 delayed steps: 3.986, 3.976, 4.038 (one seed).
    - Warm-up over 10 % of the steps, cosine decay to 10 %, clip 1.0, weight decay 0.1: the settings of
      arXiv 2606.30634.
    - Separate query, key and value matrices, because Muon orthogonalizes each matrix by itself.
    """
    return AsyncTrainer.Config(
        model_spec=ModelSpec(
            name="llama3",
            flavor="debug-3.4M",
            model=_llama(dim=192, n_layers=6, n_heads=6, hidden_dim=512),
            parallelize_fn=parallelize_llama,
            pipelining_fn=pipeline_llm,
            post_optimizer_build_fn=None,
            state_dict_adapter=Llama3StateDictAdapter,
        ),
        hf_assets_path=str(shakespeare_tokenizer_folder()),
        dump_folder="./outputs/debug",
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCAB_SIZE),
        optimizer=AsyncOptimizers.Config(
            name="muon",
            muon=MuonConfig(lr=1e-2),
            adamw=AdamWConfig(lr=3e-3),
        ),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=30, decay_type="cosine", min_lr_factor=0.1),
        training=TrainingConfig(
            local_batch_size=8,
            seq_len=256,
            steps=300,
            max_norm=1.0,
            disable_cuda_graphs=True,  # torchtitan's do not support pipelines
            mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=2,
            pipeline_parallel_schedule="Async2BW",
            pipeline_parallel_microbatch_size=2,
        ),
        dataloader=TextDataLoader.Config(dataset="shakespeare"),
        validator=AsyncValidator.Config(
            enable=True,
            freq=100,
            steps=8,
            dataloader=TextDataLoader.Config(dataset="shakespeare", split="validation", shuffle=False),
        ),
        metrics=AsyncMetrics.Config(log_freq=10),
        # A checkpoint of the model alone could not be resumed.
        checkpoint=AsyncCheckpointer.Config(
            enable=True, interval=100, last_save_model_only=False, keep_latest_k=2
        ),
        activation_checkpoint=None,
        debug=DebugConfig(
            seed=0,  # the same run gives the same numbers
            enable_structured_logging=False,  # megabytes of trace spans a run
        ),
    )


def _llama(*, dim: int, n_layers: int, n_heads: int, hidden_dim: int) -> Llama3Model.Config:
    linear = {"weight": partial(nn.init.trunc_normal_, std=0.02), "bias": nn.init.zeros_}
    norm = {"weight": nn.init.ones_}

    def residual(layer: int) -> dict:
        std = depth_scaled_std(0.02, layer)
        return {"weight": partial(nn.init.trunc_normal_, std=std), "bias": nn.init.zeros_}

    layers = [
        Llama3TransformerBlock.Config(
            attention_norm=RMSNorm.Config(normalized_shape=dim, param_init=norm),
            ffn_norm=RMSNorm.Config(normalized_shape=dim, param_init=norm),
            attention=make_gqa_config(
                dim=dim,
                n_heads=n_heads,
                wqkv_param_init=linear,
                wo_param_init=residual(layer),
                inner_attention=get_attention_config("flex"),
                rope=ComplexRoPE.Config(dim=dim // n_heads, max_seq_len=8192, theta=10_000),
            ),
            feed_forward=make_ffn_config(
                dim=dim, hidden_dim=hidden_dim, w1_param_init=linear, w2w3_param_init=residual(layer)
            ),
        )
        for layer in range(n_layers)
    ]
    head_std = dim**-0.5
    return Llama3Model.Config(
        dim=dim,
        vocab_size=VOCAB_SIZE,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCAB_SIZE,
            embedding_dim=dim,
            param_init={"weight": partial(nn.init.normal_, std=1.0)},
        ),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=norm),
        lm_head=Linear.Config(
            in_features=dim,
            out_features=VOCAB_SIZE,
            param_init={
                "weight": partial(nn.init.trunc_normal_, std=head_std, a=-3 * head_std, b=3 * head_std)
            },
        ),
        layers=layers,
    )
