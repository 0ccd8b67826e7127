"""Data layer: the documents a run trains on, as one stream whose position can be saved.

`open_documents` turns a `TextSource` (what the user named) into a `DocumentStream`. Behind the stream
stands a reader, of which there are five: plays in memory, local files, parquet files (local ones or those of
the Hugging Face hub), other datasets of the hub, and functions of the user.
"""

import functools
import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from titan_async.data.empty_records import EmptyRecords
from titan_async.data.files import find_files, size_of
from titan_async.data.fingerprints import fingerprint_of, fingerprints_of_files
from titan_async.data.own_source import FunctionReader
from titan_async.data.plays import play_scenes
from titan_async.data.readers import (
    DocumentReader,
    FilesReader,
    MemoryReader,
    Position,
    is_validation,
    order_of,
    share_of_worker,
    shuffled,
)
from titan_async.data.text_source import TextSource, check_split, identity_of
from titan_async.errors import UserError

__all__ = ["DocumentStream", "name_of_files", "open_documents"]


class DocumentStream:
    """One rank's documents, epoch by epoch; the position can be saved before any document.

    Iterating gives what is left of the current epoch and leaves the stream at the start of the next.
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
        """Names the data and its order; positions are only worth loading where it is the same."""
        self.fingerprints = fingerprints
        """Gives the fingerprints of the files, or none of a hub's; see `titan_async.data.fingerprints`."""
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
    empty = EmptyRecords()
    if source.function is not None:
        check_split(source)
        shares = share_of_worker(rank, world_size)
        whole = f"{source.shown}, {source.split} with validation_fraction {source.validation_fraction}"
        return DocumentStream(FunctionReader(source, *shares), whole)
    if source.local_path is None and source.dataset != "shakespeare":
        from titan_async.data.hub import open_hub_reader

        reader, name = open_hub_reader(source, rank, world_size, empty)
        return DocumentStream(shuffled(reader, source), identity_of(source, name), empty=empty)

    check_split(source)
    rank, world_size = share_of_worker(rank, world_size)
    if source.local_path is None:
        in_memory = MemoryReader(play_scenes(), source, rank, world_size)
        return DocumentStream(in_memory, identity_of(source, "shakespeare"), _fingerprints_of_plays)
    files = find_files(source.local_path)
    # Paths may move between saving and loading, the files in them may not change.
    name = name_of_files([file.name for file in files])
    fingerprints = functools.partial(fingerprints_of_files, files, [size_of(file) for file in files])
    files_reader = _open_files(files, source, rank, world_size, empty)
    return DocumentStream(shuffled(files_reader, source), identity_of(source, name), fingerprints, empty)


def _fingerprints_of_plays() -> list[str]:
    text = "\0".join(play_scenes()).encode()
    return [fingerprint_of("shakespeare", len(text), hashlib.blake2b(text, digest_size=8).hexdigest())]


def name_of_files(names: Sequence[str]) -> str:
    """A short name that tells these files from others."""
    return f"{len(names)} files {zlib.crc32(chr(10).join(names).encode()):08x}"


def _open_files(
    files: list[Path], source: TextSource, rank: int, world_size: int, empty: EmptyRecords
) -> DocumentReader:
    if not all(file.name.endswith(".parquet") for file in files):
        return FilesReader(files, source, rank, world_size, empty)
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
        empty=empty,
    )
