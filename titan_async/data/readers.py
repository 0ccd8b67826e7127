"""Data layer: readers of documents in memory and in local files, and what all readers have in common.

A reader is a function of (epoch, position): the same two values always give the same documents, and a
position is plain JSON data. That is all that exact resumption needs.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch.utils.data import get_worker_info

from titan_async.data.empty_records import EmptyRecords
from titan_async.data.files import read_documents, size_of
from titan_async.data.text_source import TextSource

__all__ = [
    "DocumentReader",
    "FilesReader",
    "MemoryReader",
    "Position",
    "is_validation",
    "order_of",
    "share_of_worker",
    "shuffled",
]

_SHUFFLE_BLOCK = 1024
"""Documents read ahead and shuffled together where there are too many to hold them all."""

Position = Any
"""Where in an epoch a reader stands, as JSON data; None is the start."""


class DocumentReader(Protocol):
    """Reads one rank's share of the documents of an epoch."""

    def read(self, epoch: int, position: Position) -> Iterator[tuple[str, Position]]:
        """Yield the documents from `position` on, each with the position that follows it."""
        ...


def is_validation(index: int, fraction: float) -> bool:
    """Whether the document of this index, from 0, belongs to the validation split.

    The documents chosen are spread evenly. Index 0 is for training and index 1 for validation, so
    that two documents are enough for both to have one.
    """
    return math.ceil(index * fraction) > math.ceil((index - 1) * fraction)


class MemoryReader:
    """Documents in memory, of which each epoch takes a permutation."""

    def __init__(self, documents: Sequence[str], source: TextSource, rank: int, world_size: int) -> None:
        wanted = source.split == "validation"
        self._documents = [
            document
            for index, document in enumerate(documents)
            if is_validation(index, source.validation_fraction) == wanted
        ]
        self._source = source
        self._rank, self._world_size = rank, world_size

    def read(self, epoch: int, position: Position) -> Iterator[tuple[str, Position]]:
        order = order_of(len(self._documents), self._source, epoch)[self._rank :: self._world_size]
        for index in range(position or 0, len(order)):
            yield self._documents[order[index]], index + 1


class FilesReader:
    """Local files, in an order of their own in each epoch; their documents in the order they have.

    A position is [files done, documents of the next file done, documents of the split so far].
    """

    def __init__(
        self, files: list[Path], source: TextSource, rank: int, world_size: int, empty: EmptyRecords
    ) -> None:
        self._files = files
        self._empty = empty
        self._sizes = [size_of(file) for file in files]
        self._source = source
        self._rank, self._world_size = rank, world_size

    def read(self, epoch: int, position: Position) -> Iterator[tuple[str, Position]]:
        source = self._source
        wanted = source.split == "validation"
        # In data that have changed, it may be a position of `ParquetReader`, which means nothing here.
        done, skip, count = position if position and len(position) == 3 else (0, 0, 0)
        for number, index in enumerate(order_of(len(self._files), source, epoch)[done:], start=done):
            file = self._files[index]
            self._empty.begin()
            documents = read_documents(file, source.text_column, self._sizes[index], self._empty.add)
            for document_index, document in enumerate(documents):
                # Counting from the file's own index spreads the choice over many short files, and
                # makes it independent of the order in which an epoch reads them.
                if document_index < skip or wanted != is_validation(
                    index + document_index, source.validation_fraction
                ):
                    continue
                count += 1
                if (count - 1) % self._world_size == self._rank:
                    yield document, [number, document_index + 1, count]
            self._empty.end(str(file))
            skip = 0


class _BlockShuffledReader:
    """Shuffles the documents of another reader within blocks of so many.

    A position is [position of the block's start, blocks before it, documents of it done]. Loading
    one reads the block again, so that, unlike a shuffle buffer, it loses nothing.
    """

    def __init__(self, reader: DocumentReader, source: TextSource) -> None:
        self._reader = reader
        self._source = source

    def read(self, epoch: int, position: Position) -> Iterator[tuple[str, Position]]:
        start, number, done = position or (None, 0, 0)
        block: list[str] = []
        following = start
        for document, following in self._reader.read(epoch, start):
            block.append(document)
            if len(block) == _SHUFFLE_BLOCK:
                yield from self._block(block, start, epoch, number, done)
                block, start, number, done = [], following, number + 1, 0
        yield from self._block(block, start, epoch, number, done)

    def _block(
        self, block: list[str], start: Position, epoch: int, number: int, done: int
    ) -> Iterator[tuple[str, Position]]:
        order = order_of(len(block), self._source, epoch, number)
        for index in range(done, len(block)):
            yield block[order[index]], [start, number, index + 1]


def shuffled(reader: DocumentReader, source: TextSource) -> DocumentReader:
    return _BlockShuffledReader(reader, source) if source.shuffle else reader


def order_of(count: int, source: TextSource, *key: int) -> list[int]:
    """The order of so many things in a source, in an epoch and perhaps a part of it: the key."""
    if not source.shuffle:
        return list(range(count))
    return [int(index) for index in np.random.default_rng([source.seed, *key]).permutation(count)]


def share_of_worker(rank: int, world_size: int) -> tuple[int, int]:
    """The share of a rank, from 0, and the number of shares; in a loader's worker process, those of it."""
    worker = get_worker_info()
    if worker is None:
        return rank, world_size
    return rank * worker.num_workers + worker.id, world_size * worker.num_workers
