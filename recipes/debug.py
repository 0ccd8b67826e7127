"""The laptop-size recipes: small models on Shakespeare's plays, trained on CPU in minutes."""

from titan_async.recipes._training import SHAKESPEARE_VOCAB, on_a_laptop
from titan_async.recipes.dense_models import dense_spec, llama
from titan_async.recipes.moe_models import moe, moe_spec
from titan_async.training.trainer import AsyncTrainer


def debug() -> AsyncTrainer.Config:
    """3.4 M parameters on Shakespeare's plays; two pipeline stages, minutes on a laptop's CPU.

    - Six layers of width 192: with embedding and head counted as a layer each, they split evenly over
      one, two and four stages.
    - Muon's learning rate with `match_rms_adamw` is on AdamW's scale. Of 5e-3, 1e-2 and 2e-2 the second has
      the lowest validation loss after 300 delayed steps: 3.986, 3.976, 4.038 (one seed, Muon's products in
      bfloat16).
    - Seeds 0 to 2 reach 3.978, 3.982, 3.975 with it, and 3.977, 3.978, 3.990 under 1F1B
      (`debug_cpu_sync.toml`).
    - Warm-up over 10 % of the steps, cosine decay to 10 %, clip 1.0, weight decay 0.1: the settings of
      arXiv 2606.30634.
    - Separate query, key and value matrices, because Muon orthogonalizes each matrix separately.
    """
    return on_a_laptop(
        dense_spec(
            "debug-3.4M",
            llama(vocab_size=SHAKESPEARE_VOCAB, dim=192, n_layers=6, n_heads=6, hidden_dim=512),
        ),
        name="debug",
        muon_lr=1e-2,
        adamw_lr=3e-3,
    )


def debug_moe() -> AsyncTrainer.Config:
    """3.5 M parameters with 8 experts per layer, on Shakespeare's plays; two stages, minutes on a CPU.

    The same architecture as the large MoE models (`moe_models.moe`), for tests and for users without GPUs.

    - Six layers, as in `debug`, but narrower, for about as many parameters, half of which are active: two of
      eight experts and a shared one, each as wide as the residual stream.
    - Of Muon's learning rates 2.5e-3, 5e-3, 1e-2 and 2e-2 the second has the lowest validation loss after 300
      delayed steps: 4.168, 4.087, 4.092, 4.148 (one seed, as in `debug`; AdamW's is that of `debug`, and was
      not swept).
    - The loss without a delay is 4.073 (`debug_moe_cpu_sync.toml`); a unigram model has 5.842. With experts
      over two ranks per stage, which divide the text of training and of validation differently, it is 4.050,
      and a unigram model has 5.712.
    """
    return on_a_laptop(
        moe_spec(
            "debug-3.5M-A1.7M",
            moe(
                vocab_size=SHAKESPEARE_VOCAB,
                dim=128,
                n_layers=6,
                n_heads=4,
                n_kv_heads=2,
                n_experts=8,
                top_k=2,
                expert_dim=128,
                n_shared_experts=1,
            ),
        ),
        name="debug_moe",
        muon_lr=5e-3,
        adamw_lr=3e-3,
    )
