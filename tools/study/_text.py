"""The study's text: Shakespeare's plays as bytes, split by scenes."""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from titan_async.data.shakespeare import play_scenes

__all__ = ["VOCAB", "Batches", "splits"]

VOCAB = 128
"""ASCII; other characters are replaced by a question mark."""

_EVERY = 20
"""Of every 20 scenes, one is for validation and one for test."""


@functools.cache
def splits() -> dict[str, Tensor]:
    """The bytes [n] of "training" (90 % of the scenes), "validation" and "test" (5 % each)."""
    parts: dict[str, list[bytes]] = {"training": [], "validation": [], "test": []}
    for index, scene in enumerate(play_scenes()):
        part = {7: "validation", 17: "test"}.get(index % _EVERY, "training")
        parts[part].append(scene.encode("ascii", "replace"))
    return {
        name: torch.from_numpy(np.frombuffer(b"".join(scenes), dtype=np.uint8).copy()).long()
        for name, scenes in parts.items()
    }


@dataclass(frozen=True)
class Batches:
    """Batches of a split from random offsets; the same seed gives the same batches."""

    split: str
    sequences: int
    length: int
    seed: int

    def __call__(self, batch: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a batch, [sequences, length] each, targets one byte later."""
        text = splits()[self.split]
        generator = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + batch)
        starts = torch.randint(len(text) - self.length, (self.sequences, 1), generator=generator)
        drawn = text[starts + torch.arange(self.length + 1)]
        return drawn[:, :-1], drawn[:, 1:]
