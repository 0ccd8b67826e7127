"""Mixtures of experts for GPUs."""

from titan_async.recipes._training import SMOLLM_VOCAB, on_gpus
from titan_async.recipes.moe_models import moe, moe_spec

from titan_async.training.trainer import AsyncTrainer


def moe_10b_200b() -> AsyncTrainer.Config:
    """9.87 B parameters, 1.65 B active, 200 B tokens of FineWeb-Edu; 32 to 64 GPUs of 80 GB."""
    return on_gpus(
        moe_spec(
            "10B-A1.6B",
            moe(
                vocab_size=SMOLLM_VOCAB,
                dim=2048,
                n_layers=30,
                n_heads=16,
                n_kv_heads=4,
                n_experts=64,
                top_k=6,
                expert_dim=768,
                n_shared_experts=2,
            ),
        ),
        name="moe_10b_200b",
        lr=7e-4,
        steps=95_367,
        sequences=512,
        seq_len=4096,
        stages=4,
        head_layers=2,
        shards=8,
        local_sequences=64,
        microbatch=2,
        experts_over=8,
        subset="sample-350BT",
    )
