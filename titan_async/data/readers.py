"""Data layer: what all readers of documents have in common: their interface, order, splits and shares.

A reader is a function of (epoch, position): the same two values always give the same documents, and a
position is plain JSON data. That is all that exact resumption needs.
"""

from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from titan_async.data.text_source import TextSource

__all__ = ["DocumentReader", "Position", "is_validation", "order_of", "share_of_worker"]

Position = Any
"""A position of a reader within an epoch, as JSON data; None is the start."""

_Index = TypeVar("_Index", int, npt.NDArray[np.int64])


class DocumentReader(Protocol):
    """Reads one rank's share of the documents of an epoch."""

    def read(self, epoch: int, position: Position) -> Iterator[tuple[str, Position]]:
        """Yield the documents from `position` on, each with the position that follows it."""
        ...


def is_validation(index: _Index, fraction: float) -> Any:
    """Whether the document of this index, from 0, belongs to the validation split; of an array, elementwise.

    The documents chosen are spread evenly. Index 0 is for training and index 1 for validation, so
    that two documents are enough for both to have one.
    """
    return np.ceil(index * fraction) > np.ceil((index - 1) * fraction)


def order_of(count: int, source: TextSource, *key: int) -> npt.NDArray[np.int64]:
    """The order of so many files or documents of a source; `key` is the epoch, and a part of it."""
    if not source.shuffle:
        return np.arange(count)
    return np.random.default_rng([source.seed, *key]).permutation(count)


def share_of_worker(rank: int, world_size: int) -> tuple[int, int]:
    """The share of a rank, from 0, and the number of shares; in a loader's worker process, those of it."""
    worker = get_worker_info()
    if worker is None:
        return rank, world_size
    return rank * worker.num_workers + worker.id, world_size * worker.num_workers
