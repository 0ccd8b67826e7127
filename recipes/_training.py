"""Common settings of recipes: those of arXiv 2606.30634, on a laptop and on GPUs.

Cosine decay to 10 % of the peak after a warm-up over 10 % of the steps, clipping at 1.0, weight decay 0.1,
error feedback. Synchronous twins have the same hyperparameters, as in the paper. Muon for the matrices inside
the layers, including experts, with momentum 0.95 as in its first uses and in Moonlight, because a delay costs
less with a higher momentum; AdamW for embedding, head, norms and routers.

No synchronous start (`pipeline.synchronous_ratio`): in docs/study.md, the loss of Muon with error feedback
after 3000 updates is 0.008 +- 0.004 nats per byte above that of its synchronous run, and 0.001 +- 0.003 above
it with a synchronous first quarter, while the bubbles of that start cost time in every run.
"""

import dataclasses
from typing import Any

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.protocols.model_spec import ModelSpec

from titan_async.data import shakespeare_tokenizer_folder
from titan_async.training.checkpoint.checkpointer import AsyncCheckpointer
from titan_async.training.dataloader import TextDataLoader
from titan_async.training.optimizer.config import AdamWConfig, AsyncLRSchedulers, MuonConfig
from titan_async.training.optimizer.container import AsyncOptimizers
from titan_async.training.pipeline.schedule import PipelineConfig
from titan_async.training.telemetry.metrics import AsyncMetrics
from titan_async.training.trainer import AsyncTrainer
from titan_async.training.validator import AsyncValidator

SHAKESPEARE_VOCAB = 2048
"""Entries of the project's tokenizer."""

SMOLLM_VOCAB = 49_152
"""Entries of SmolLM2's tokenizer."""


def on_a_laptop(spec: ModelSpec, *, name: str, muon_lr: float, adamw_lr: float) -> AsyncTrainer.Config:
    """Trains a model of Shakespeare's vocabulary on the plays: two stages, 300 steps, float32."""
    return _config(
        spec,
        name=name,
        tokenizer=str(shakespeare_tokenizer_folder()),
        # Without bfloat16 instructions, which few laptops have, products take ten times as long.
        muon=MuonConfig(lr=muon_lr, compute_dtype="float32"),
        adamw_lr=adamw_lr,
        training={
            "local_batch_size": 8,
            "seq_len": 256,
            "steps": 300,
            "mixed_precision_param": "float32",
        },
        parallelism={"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2},
        text={"dataset": "shakespeare"},
        validation={"freq": 100, "steps": 8},
        checkpoint={"interval": 100},
    )


def from_the_hub(spec: ModelSpec, *, seq_len: int, lr: float, head_layers: int) -> AsyncTrainer.Config:
    """Trains a model of the Hub with the settings for a laptop; the user sets the text.

    Args:
        spec: the model.
        seq_len: sequence length.
        lr: peak learning rate.
        head_layers: cost of the head in layers; the embedding, which has no FLOPs, counts as none.
    """
    config = on_a_laptop(spec, name="hub", muon_lr=lr, adamw_lr=lr)
    return dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, seq_len=seq_len),
        parallelism=dataclasses.replace(
            config.parallelism,
            pipeline_parallel_first_stage_less_layers=0,
            pipeline_parallel_last_stage_less_layers=head_layers,
        ),
    )


def on_gpus(
    spec: ModelSpec,
    *,
    name: str,
    lr: float,
    steps: int,
    sequences: int,
    seq_len: int,
    stages: int,
    head_layers: int,
    shards: int = -1,
    local_sequences: int,
    microbatch: int,
    experts_over: int = 1,
    overlap: bool = False,
    subset: str,
) -> AsyncTrainer.Config:
    """Trains a model of SmolLM2's vocabulary on FineWeb-Edu: bfloat16, compiled, selective checkpointing.

    - Learning rate and batch follow the scaling law of DeepSeek LLM (arXiv 2401.02954): for C FLOPs, without
      embedding and head, the peak is 0.3118 C^-0.125 and the batch 0.2920 C^0.3271 tokens. It was fitted to
      dense models with AdamW. For Muon it agrees with Moonlight's scaling runs (9.5e-4 for 0.4 B parameters
      and 8.3e-4 for 1.5 B; the law gives 1.2e-3 and 8.4e-4), and with the best of four or three for the debug
      recipes (5e-3 and 1e-2; the law gives 8e-3 and 7e-3). No recipe for GPUs has been swept.
    - One learning rate for Muon and AdamW: with `match_rms_adamw` Muon's updates have the size of AdamW's,
      and rates and decay carry over (arXiv 2502.16982).
    - FineWeb-Edu, as in arXiv 2606.30634, streamed from the Hub. 5 % of its documents are reserved for
      validation: more than needed, but selecting fewer would require reading more of the others.
    - Documents are packed, with document masks.
    - The layout is the fastest pipeline that `titan-async plan` finds on H100s; among microbatch sizes within
      2 %, the smallest (docs/recipes.md). Nothing has been timed. On the largest number of GPUs, a pass of
      the pipeline is a whole batch, so that the synchronous twin flushes once per update.

    Args:
        spec: the model.
        name: of the recipe, and of the run's folder.
        lr: peak learning rate.
        steps: updates.
        sequences: per batch, over all GPUs.
        seq_len: sequence length.
        stages: of the pipeline.
        head_layers: cost of the head in layers; the embedding, which has no FLOPs, counts as none.
        shards: data-parallel ranks of each stage (FSDP2); -1 for all available GPUs.
        local_sequences: per batch on each data-parallel rank, in one pass of the pipeline.
        microbatch: sequences per microbatch.
        experts_over: expert-parallel degree.
        overlap: whether stages compute overlapped pairs (docs/overlap.md).
        subset: of FineWeb-Edu.
    """
    config = _config(
        spec,
        name=name,
        tokenizer="./assets/hf/SmolLM2-135M",
        muon=MuonConfig(lr=lr),
        adamw_lr=lr,
        training={
            "local_batch_size": local_sequences,
            "global_batch_size": sequences,
            "seq_len": seq_len,
            "steps": steps,
            "mixed_precision_param": "bfloat16",
        },
        parallelism={
            "pipeline_parallel_degree": stages,
            "pipeline_parallel_microbatch_size": microbatch,
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": head_layers,
            "data_parallel_shard_degree": shards,
            "expert_parallel_degree": experts_over,
        },
        text={"dataset": "HuggingFaceFW/fineweb-edu", "dataset_config": subset},
        # At least two million tokens, to resolve differences of 0.01.
        validation={"freq": 1000, "steps": max(2, 2**21 // (sequences * seq_len))},
        checkpoint={"interval": 1000, "async_mode": "async"},
    )
    return dataclasses.replace(
        config,
        compile=CompileConfig(enable=True),
        activation_checkpoint=SelectiveAC.Config(),
        pipeline=PipelineConfig(overlap=overlap),
    )


def _config(
    spec: ModelSpec,
    *,
    name: str,
    tokenizer: str,
    muon: MuonConfig,
    adamw_lr: float,
    training: dict[str, Any],
    parallelism: dict[str, Any],
    text: dict[str, Any],
    validation: dict[str, Any],
    checkpoint: dict[str, Any],
) -> AsyncTrainer.Config:
    return AsyncTrainer.Config(
        model_spec=spec,
        hf_assets_path=tokenizer,
        dump_folder=f"./outputs/{name}",
        loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        optimizer=AsyncOptimizers.Config(name="muon", muon=muon, adamw=AdamWConfig(lr=adamw_lr)),
        lr_scheduler=AsyncLRSchedulers.Config(warmup_ratio=0.1, decay_type="cosine", min_lr_factor=0.1),
        training=TrainingConfig(
            max_norm=1.0,
            disable_cuda_graphs=True,  # torchtitan's do not support pipelines
            **training,
        ),
        parallelism=ParallelismConfig(pipeline_parallel_schedule="Async2BW", **parallelism),
        dataloader=TextDataLoader.Config(**text),
        validator=AsyncValidator.Config(
            enable=True,
            dataloader=TextDataLoader.Config(split="validation", shuffle=False, **text),
            **validation,
        ),
        metrics=AsyncMetrics.Config(log_freq=10),
        # A run cannot resume from a checkpoint with only the model.
        checkpoint=AsyncCheckpointer.Config(
            enable=True, last_save_model_only=False, keep_latest_k=2, **checkpoint
        ),
        activation_checkpoint=None,
        debug=DebugConfig(
            seed=0,  # reproducible runs
            enable_structured_logging=False,  # megabytes of trace spans per run
        ),
    )
