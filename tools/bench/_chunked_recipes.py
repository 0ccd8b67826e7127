"""Recipes with a loss in chunks, for `--module`."""

import dataclasses

from torchtitan.components.loss import ChunkedLossWrapper

from titan_async.recipes.debug import debug
from titan_async.training.trainer import AsyncTrainer

__all__ = ["debug_in_chunks"]


def debug_in_chunks() -> AsyncTrainer.Config:
    """`debug`, whose head and loss take an eighth of a sequence at a time."""
    config = debug()
    return dataclasses.replace(config, loss=ChunkedLossWrapper.Config(num_chunks=8, loss_fn=config.loss))
