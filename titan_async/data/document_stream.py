"""The documents of a run, as a stream whose position can be saved.

`open_documents` opens a `TextSource` as a `DocumentStream` over one of five readers: texts in memory, local
files, parquet files (local or on the Hugging Face hub), other datasets of the hub, and functions of the user.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_async.data.files import find_files, read_documents, size_of
from titan_async.data.fingerprints import fingerprint_of_texts, fingerprints_of_files, name_of_files
from titan_async.data.function_reader import FunctionReader
from titan_async.data.readers import (
    DocumentReader,
    EmptyRecords,
    Position,
    is_validation,
    order_of,
    share_of_worker,
)
from titan_async.data.shakespeare import play_scenes
from titan_async.data.text_source import TextSource
from titan_async.errors import UserError

__all__ = ["DocumentStream", "open_documents"]

_SHUFFLE_BLOCK = 1024
"""Documents that are shuffled together if not all are in memory."""


class DocumentStream:
    """One rank's documents, epoch by epoch; the position can be saved before any document.

    An iterator yields the rest of the current epoch; afterwards the stream is at the start of the next one.
    """

    def __init__(
        self,
        reader: DocumentReader,
        identity: str,
        fingerprints: Callable[[], list[str]] = list,
        empty: EmptyRecords | None = None,
    ) -> None:
        self._reader = reader
        self.identity = identity
        """Identifies the data and its order; a position is only valid for the same identity."""
        self.fingerprints = fingerprints
        """Returns the fingerprints of local files; see `titan_async.data.fingerprints`."""
        self.empty = empty or EmptyRecords()
        """Counts the records without text."""
        self.epoch = 0
        self._position: Position = None

    def __iter__(self) -> Iterator[str]:
        for document, following in self._reader.read(self.epoch, self._position):
            self._position = following
            yield document
        self.epoch += 1
        self._position = None

    def state_dict(self) -> dict[str, Any]:
        """The position before the next document, as JSON data."""
        return {"epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a position of `state_dict`; it takes effect for iterators created afterwards."""
        self.epoch = state_dict["epoch"]
        self._position = state_dict["position"]


def open_documents(source: TextSource, *, rank: int = 0, world_size: int = 1) -> DocumentStream:
    """Opens one rank's share of the documents of a source.

    In every epoch the shares of the ranks are disjoint, and their union is the split. In a worker process of
    a data loader, the rank's share is divided among the workers in the same way.

    Args:
        source: The source.
        rank: This data-parallel rank, from 0.
        world_size: Number of data-parallel ranks.

    Raises:
        UserError: The data can't be found or has no such split. Errors within a file are raised when it is
            read.

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
            f"The token files in {source.dataset_path} contain no text: name the text that was tokenized."
        )
    empty = EmptyRecords()
    reader: DocumentReader
    if source.is_on_hub:
        from titan_async.data.hub import open_hub_reader

        reader, name = open_hub_reader(source, rank, world_size, empty)
        return DocumentStream(_shuffled(reader, source), source.identity(name), empty=empty)
    source.check_split()
    share = share_of_worker(rank, world_size)
    if source.function is not None:
        return DocumentStream(FunctionReader(source, *share), source.identity(source.shown))
    if source.local_path is None:
        scenes = play_scenes()
        fingerprint = functools.partial(fingerprint_of_texts, "shakespeare", scenes)
        return DocumentStream(
            MemoryReader(scenes, source, *share), source.identity("shakespeare"), fingerprint
        )
    files = find_files(source.local_path)
    sizes = [size_of(file) for file in files]
    # Folders may be moved between saving and loading, but file names may not change.
    identity = source.identity(name_of_files([file.name for file in files]))
    if all(file.name.endswith(".parquet") for file in files):
        from titan_async.data.parquet import ParquetReader

        def is_wanted(index: int, row: int, text: str) -> bool:
            return is_validation(index + row, source.validation_fraction) == (source.split == "validation")

        reader = ParquetReader([str(file) for file in files], source, is_wanted, *share, empty)
    else:
        reader = FilesReader(files, sizes, source, *share, empty)
    fingerprints = functools.partial(fingerprints_of_files, files, sizes)
    return DocumentStream(_shuffled(reader, source), identity, fingerprints, empty)


class MemoryReader:
    """Documents in memory, permuted in each epoch. A position is the number of documents read."""

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


@dataclass(slots=True)
class FilesReader:
    """Local files, permuted in each epoch, with the documents of each file in order.

    A position is [files read, documents read of the next file, documents of the split so far].
    """

    files: list[Path]
    sizes: list[int]
    """In bytes, when the files were found."""
    source: TextSource
    rank: int
    world_size: int
    empty: EmptyRecords

    def read(self, epoch: int, position: Position) -> Iterator[tuple[str, Position]]:
        source = self.source
        wanted = source.split == "validation"
        # In changed data it may be a position of `ParquetReader`, which is ignored.
        done, skip, count = position if position and len(position) == 3 else (0, 0, 0)
        for number, index in enumerate(order_of(len(self.files), source, epoch)[done:], start=done):
            documents = read_documents(self.files[index], source.text_column, self.sizes[index], self.empty)
            # Counting from the file's index spreads the validation split over many short files, independently
            # of the epoch's order.
            for document_index, document in enumerate(documents):
                if document_index < skip or wanted != is_validation(
                    int(index) + document_index, source.validation_fraction
                ):
                    continue
                count += 1
                if (count - 1) % self.world_size == self.rank:
                    yield document, [number, document_index + 1, count]
            skip = 0


@dataclass(slots=True)
class _BlockShuffledReader:
    """Shuffles the documents of another reader within blocks.

    A position is [position of the block's start, blocks before it, documents read of it]. A resumed run reads
    the block again. So no document is lost, unlike with a shuffle buffer.
    """

    reader: DocumentReader
    source: TextSource

    def read(self, epoch: int, position: Position) -> Iterator[tuple[str, Position]]:
        start, number, done = position or (None, 0, 0)
        documents = self.reader.read(epoch, start)
        while block := list(itertools.islice(documents, _SHUFFLE_BLOCK)):
            order = order_of(len(block), self.source, epoch, number)
            for index in range(done, len(block)):
                yield block[order[index]][0], [start, number, index + 1]
            start, number, done = block[-1][1], number + 1, 0


def _shuffled(reader: DocumentReader, source: TextSource) -> DocumentReader:
    return _BlockShuffledReader(reader, source) if source.shuffle else reader
