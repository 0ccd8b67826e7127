"""A narrower model under the name of the recipe `debug`."""

from titan_async.recipes.debug import SHAKESPEARE_VOCAB, dense_spec, llama, on_a_laptop
from titan_async.training.trainer import AsyncTrainer


def install(rank: int, width: int) -> None:
    """Sets the width of the recipe `debug`."""
    from _faults import injected

    def narrow() -> AsyncTrainer.Config:
        model = llama(vocab_size=SHAKESPEARE_VOCAB, dim=width, n_layers=6, n_heads=6, hidden_dim=512)
        return on_a_laptop(dense_spec("debug-narrow", model), name="debug", muon_lr=1e-2, adamw_lr=3e-3)

    injected.debug = narrow
