"""MoE models for GPUs. `moe_models.moe` documents their common architecture.

Both have DeepSeekMoE's proportions (arXiv 2401.06066), which Moonlight trained with Muon (arXiv 2502.16982):
64 experts, six of which are active per token, and a shared one of twice their width. Unlike in those models,
all layers have experts, including the first ones, so that stages have equal costs. Neither has been trained
yet.
"""

from titan_async.recipes._training import SMOLLM_VOCAB, on_gpus
from titan_async.recipes.moe_models import moe, moe_spec
from titan_async.training.trainer import AsyncTrainer


def moe_2b() -> AsyncTrainer.Config:
    """2.0 B parameters, 0.40 B active, 40 B tokens of FineWeb-Edu; 8 to 16 GPUs.

    - The shape of the MoE model of 2 B parameters in arXiv 2606.30634 is not public. This one is a
      scaled-down `moe_10b_200b`, with the same number of experts, heads of 128, and five query heads per key
      head.
    - 40 B tokens are 20 for each of all parameters and 100 for each active one.
    - Batches of 1 048 576 tokens (the paper: 1 to 4 M; the law of `_training.on_gpus`: 1.0 M), sequences of
      4096, peak learning rate 1e-3 by that law; not swept.
    - The head has the FLOPs of two and a half layers (not measured) and counts as two: 14 layers and the head
      split evenly over 2, 4 and 8 stages.
    - Every rank has all experts of its layers, without all-to-alls. The planned step time on 8 GPUs is
      1.59 s, 1.86 s for the twin, and 1.52 s for one stage, which is the fastest here; on 16 GPUs with two
      stages 0.81, 0.99 and 0.77 s. Microbatches of sixteen gain less than 2 %.
    """
    return on_gpus(
        moe_spec(
            "2B-A0.4B",
            moe(
                vocab_size=SMOLLM_VOCAB,
                dim=1280,
                n_layers=14,
                n_heads=10,
                n_kv_heads=2,
                n_experts=64,
                top_k=6,
                expert_dim=512,
                n_shared_experts=2,
            ),
        ),
        name="moe_2b",
        lr=1e-3,
        steps=38_147,
        sequences=256,
        seq_len=4096,
        stages=4,
        head_layers=2,
        shards=2,
        local_sequences=128,
        microbatch=8,
        subset="sample-100BT",
    )


def moe_10b_200b() -> AsyncTrainer.Config:
    """9.86 B parameters, 1.65 B active, 200 B tokens of FineWeb-Edu; 32 to 128 GPUs of 80 GB.

    - The size and the tokens of the largest run in arXiv 2606.30634 (1.906 nats in both modes with error
      feedback), whose shape is not public. This one has Moonlight's width, 2048, and its number of experts,
      but narrower ones (768) and three more layers, for 10 B instead of 16 B parameters. Heads of 128, four
      query heads per key head.
    - Batches of 2 097 152 tokens (the paper: 1 to 4 M; the law of `_training.on_gpus`: 2.9 M; a delay costs
      less with smaller ones), sequences of 4096.
    - Peak learning rate 7e-4 by that law; not swept. Moonlight's 4.2e-4 was for 28 times the tokens.
    - The head has the FLOPs of 1.8 layers (not measured) and counts as two: 30 layers and the head split
      evenly over 4 and 8 stages.
    - Experts over the eight data-parallel ranks of a stage, so that all-to-alls stay within a node, and
      overlapped pairs, which hide them.
    - The planned step time on 32 GPUs is 3.03 s, 4.20 s for the twin, which hides nothing, and 2.96 s for one
      stage; on 64 GPUs with eight stages 1.53 s, and 1.49 s for one stage; on 128 GPUs with microbatches of
      two 0.79 s for either. Microbatches of eight on 32 GPUs gain 1 % and leave almost no free memory.
    """
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
        microbatch=4,
        experts_over=8,
        overlap=True,
        subset="sample-350BT",
    )
