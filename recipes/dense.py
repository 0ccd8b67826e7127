"""Dense models for GPUs, with the shapes of SmolLM2 and Llama 3.2, trained on 20 tokens per parameter.

Their vocabulary is SmolLM2's: 49 152 entries, openly licensed, for texts like FineWeb-Edu, and small enough
that the head does not dominate the cost of the layers.
"""

from titan_async.recipes._training import SMOLLM_VOCAB, on_gpus
from titan_async.recipes.dense_models import dense_spec, llama
from titan_async.training.trainer import AsyncTrainer


def dense_135m() -> AsyncTrainer.Config:
    """SmolLM2-135M's shape (163 M parameters untied), 3.3 B tokens of FineWeb-Edu; 1 to 8 GPUs.

    - Width, depth, heads and RoPE base are SmolLM2-135M's. SmolLM2 ties embedding and head (`smollm2_135m`);
      here they are untied, which all schedules support. The head adds 28.3 M parameters to 134.5 M; both
      count in the 20 tokens per parameter.
    - Sequences of 2048, as SmolLM2's; batches of 262 144 tokens, in the middle of the paper's 180 to 360 K.
    - Peak learning rate 1.5e-3, by the law in `_training.on_gpus`; not swept.
    - The head has the FLOPs of six layers (not measured), so that 30 layers and the head split evenly over 2,
      3, 4 and 6 stages. `pipeline.balance = "measured"` needs no such estimate.
    - Four stages with microbatches of eight. The planned step time on 8 GPUs is 173 ms, 236 ms with the
      twin's schedule, and 171 ms for one stage.
    """
    return _135m("135M-untied", name="dense_135m", steps=12_423)


def dense_360m() -> AsyncTrainer.Config:
    """SmolLM2-360M's shape (409 M parameters untied), 8.2 B tokens of FineWeb-Edu; 1 to 8 GPUs.

    - Width, depth, heads and RoPE base are SmolLM2-360M's (`smollm2_360m`). The untied head adds 47.2 M
      parameters to 361.8 M; both count in the 20 tokens.
    - Sequences of 2048, as SmolLM2's; batches of 327 680 tokens, within the paper's 180 to 360 K.
    - Peak learning rate 1.2e-3, by the law in `_training.on_gpus`; not swept.
    - The head has the FLOPs of four layers (not measured), so that 32 layers and the head split evenly over
      2, 3, 4, 6 and 9 stages.
    - Four stages with microbatches of eight. The planned step time on 8 GPUs is 426 ms, 547 ms with the
      twin's schedule, and 433 ms for one stage.
    """
    return _360m("360M-untied", name="dense_360m", steps=24_965)


def smollm2_135m() -> AsyncTrainer.Config:
    """SmolLM2-135M unchanged, with tied embeddings, 2.7 B tokens of FineWeb-Edu; 1 to 8 GPUs.

    - All values of its config.json: width, depth, heads, RoPE base, tied embeddings, norm epsilon 1e-5.
    - Batches, learning rate by the law, and stages are those of `dense_135m`, with fewer steps: 20 tokens for
      each of 134.5 M parameters.
    - Only Async2BW supports tied embeddings with several stages, so the synchronous twin has one stage.
    """
    return _135m("SmolLM2-135M", name="smollm2_135m", steps=10_263, tied=True)


def smollm2_360m() -> AsyncTrainer.Config:
    """SmolLM2-360M unchanged, with tied embeddings, 7.2 B tokens of FineWeb-Edu; 1 to 8 GPUs.

    - All values of its config.json; this is the model of the table of optimizers in arXiv 2606.30634.
    - Batches, learning rate by the law, and stages are those of `dense_360m`; 20 tokens for each of 361.8 M
      parameters. The synchronous twin has one stage.
    """
    return _360m("SmolLM2-360M", name="smollm2_360m", steps=22_084, tied=True)


def dense_1b() -> AsyncTrainer.Config:
    """Llama 3.2 1B's shape with a smaller vocabulary (1.17 B parameters), 23.5 B tokens; one node of 8 GPUs.

    - Width, depth, heads and RoPE base are Llama 3.2 1B's. The vocabulary is smaller than its 128 256: the
      head would have the FLOPs of four of the sixteen layers, and must be on one stage.
    - Sequences of 4096. Batches of 524 288 tokens: half of those of the law of `_training.on_gpus`, because a
      delay costs less with smaller ones (arXiv 2606.30634, which has no model of this size).
    - Peak learning rate 9e-4, by that law; not swept.
    - Two stages: the head has the FLOPs of one and a half layers and counts as two, so that each stage has
      nine. For four stages, which are uneven, `pipeline.balance = "measured"` finds the best split.
    - Microbatches of four. The planned step time is 1.42 s, 1.57 s for the twin, and 1.36 s for one stage,
      which is the fastest here. Microbatches of sixteen gain less than 2 %.
    """
    return on_gpus(
        dense_spec(
            "1B-untied",
            llama(
                vocab_size=SMOLLM_VOCAB,
                dim=2048,
                n_layers=16,
                n_heads=32,
                n_kv_heads=8,
                hidden_dim=8192,
                rope_theta=500_000,
            ),
        ),
        name="dense_1b",
        lr=9e-4,
        steps=44_801,
        sequences=128,
        seq_len=4096,
        stages=2,
        head_layers=2,
        shards=4,
        local_sequences=32,
        microbatch=4,
        subset="sample-100BT",
    )


def _135m(flavor: str, *, name: str, steps: int, tied: bool = False) -> AsyncTrainer.Config:
    return on_gpus(
        dense_spec(
            flavor,
            llama(
                vocab_size=SMOLLM_VOCAB,
                dim=576,
                n_layers=30,
                n_heads=9,
                n_kv_heads=3,
                hidden_dim=1536,
                rope_theta=100_000,
                tied=tied,
            ),
        ),
        name=name,
        lr=1.5e-3,
        steps=steps,
        sequences=128,
        seq_len=2048,
        stages=4,
        head_layers=6,
        local_sequences=64,
        microbatch=8,
        subset="sample-10BT",
    )


def _360m(flavor: str, *, name: str, steps: int, tied: bool = False) -> AsyncTrainer.Config:
    return on_gpus(
        dense_spec(
            flavor,
            llama(
                vocab_size=SMOLLM_VOCAB,
                dim=960,
                n_layers=32,
                n_heads=15,
                n_kv_heads=5,
                hidden_dim=2560,
                rope_theta=100_000,
                tied=tied,
            ),
        ),
        name=name,
        lr=1.2e-3,
        steps=steps,
        sequences=160,
        seq_len=2048,
        stages=4,
        head_layers=4,
        local_sequences=80,
        microbatch=8,
        subset="sample-10BT",
    )
