"""Data layer: datasets of the Hugging Face hub, streamed: nothing is downloaded ahead or cached.

`datasets` says which files a dataset's configurations and splits are made of. Parquet files, as almost all
large datasets are (FineWeb-Edu, say), are read by `ParquetReader`; others, such as compressed JSON lines,
by `datasets` itself, which goes through a file from its beginning to find a position again, and has every
rank read everything where the number of ranks does not divide that of the files.
"""

import contextlib
import copy
import functools
import re
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from titan_async.data.empty_records import EmptyRecords
from titan_async.data.files import no_column, text_of
from titan_async.data.readers import DocumentReader, Position, order_of, share_of_worker
from titan_async.data.sources import name_of_files
from titan_async.data.text_source import TextSource
from titan_async.errors import UserError

if TYPE_CHECKING:
    from datasets import DatasetBuilder, IterableDataset

__all__ = ["files_of_split", "open_hub_reader"]


def open_hub_reader(
    source: TextSource, rank: int, world_size: int, empty: EmptyRecords
) -> tuple[DocumentReader, str]:
    """Open a share of a hub dataset, and name the data.

    The validation split, where the dataset has none, are the documents whose text has a certain hash: that
    does not depend on who reads which files.

    Raises:
        UserError: The hub can't be reached, or has no such dataset, configuration, split or column.
    """
    builder, files = _load_builder(source), _files(source)
    name = _split(source, files)
    own_validation = "validation" in files
    fraction = 0.0 if own_validation or name != "train" else source.validation_fraction
    # A new revision that leaves the files' names as they were is taken for the same data.
    paths = [re.sub(r"@[^/]+", "", file) for file in files[name]]
    title = "/".join(filter(None, (source.dataset, source.dataset_config)))
    title = f"{title}, {name_of_files(paths)}"
    if all(file.endswith(".parquet") for file in files[name]):
        from titan_async.data.parquet import ParquetReader

        # `datasets` itself divides what it streams among a loader's workers.
        rank, world_size = share_of_worker(rank, world_size)
        reader: DocumentReader = ParquetReader(
            files[name],
            text_column=source.text_column,
            order=lambda epoch: order_of(len(files[name]), source, epoch),
            is_wanted=lambda index, row, text: _is_wanted(text, fraction, source),
            rank=rank,
            world_size=world_size,
            empty=empty,
        )
        return reader, title
    return _open_stream(builder, name, source, fraction, rank, world_size, empty), title


def files_of_split(source: TextSource) -> list[str]:
    """The addresses of the files of which a source's split is made, or, where it is a part of one, that.

    Raises:
        UserError: As `open_hub_reader`.
    """
    files = _files(source)
    return files[_split(source, files)]


def _files(source: TextSource) -> dict[str, list[str]]:
    files = _load_builder(source).config.data_files or {}
    return {str(split): [str(file) for file in files] for split, files in files.items()}


def _split(source: TextSource, files: dict[str, list[str]]) -> str:
    """The split of the dataset that a source reads, or a part of it."""
    divide = source.split == "validation" and "validation" not in files and source.validation_fraction > 0
    name = "train" if divide else source.split
    if name not in files:
        raise UserError(
            f"The dataset {source.dataset!r} has no split {name!r}: set split to one of those there, "
            f"{', '.join(map(repr, files))}."
        )
    return name


def _is_wanted(text: str, fraction: float, source: TextSource) -> bool:
    chosen = zlib.crc32(text.encode("utf-8", "replace")) < fraction * 2**32
    return chosen == (fraction > 0 and source.split == "validation")


def _open_stream(
    builder: "DatasetBuilder",
    name: str,
    source: TextSource,
    fraction: float,
    rank: int,
    world_size: int,
    empty: EmptyRecords,
) -> "_StreamReader":
    from datasets.distributed import split_dataset_by_node

    with _plain_errors(source.dataset):
        stream = builder.as_streaming_dataset(split=name)
    columns = stream.column_names
    if columns is not None:
        if source.text_column not in columns:
            raise no_column(f"The dataset {source.dataset!r}", source.text_column, columns)
        stream = stream.select_columns([source.text_column])
    return _StreamReader(split_dataset_by_node(stream, rank, world_size), source, fraction, empty)


class _StreamReader:
    """Reads a dataset streamed by `datasets`; a position is the state that it gives itself."""

    def __init__(
        self, stream: "IterableDataset", source: TextSource, fraction: float, empty: EmptyRecords
    ) -> None:
        self._stream = stream
        self._source = source
        self._fraction = fraction
        self._empty = empty

    def read(self, epoch: int, position: Position) -> Iterator[tuple[str, Position]]:
        """Yield the documents from `position` on, each with the position that follows it.

        Raises:
            UserError: A record has no text, there are more loader workers than shards, or the hub can't be
                read any longer.
        """
        self._check_workers()
        # A state once loaded would also decide where the next epoch begins.
        stream = copy.deepcopy(self._stream)
        if position is not None:
            stream.load_state_dict(position)
        self._empty.begin()
        with _plain_ends(self._source.dataset):
            for record in stream:
                text = self._text_of(record)
                if text and not text.isspace() and _is_wanted(text, self._fraction, self._source):
                    yield text, stream.state_dict()
        self._empty.end(self._source.dataset)

    def _text_of(self, record: dict[str, Any]) -> str:
        place = f"{self._source.dataset!r}"
        if self._source.text_column not in record:
            raise no_column(f"The dataset {place}", self._source.text_column, list(record))
        text_column = self._source.text_column
        return text_of(record[text_column], place, text_column, self._empty.add)

    def _check_workers(self) -> None:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > self._stream.num_shards:
            raise UserError(
                f"The dataset {self._source.dataset!r} has {self._stream.num_shards} shards for this rank, "
                f"fewer than its {worker.num_workers} loader workers: lower num_workers to that."
            )


def _load_builder(source: TextSource) -> "DatasetBuilder":
    return _load(source.dataset, source.dataset_config, source.dataset_revision)


@functools.cache
def _load(dataset: str, config: str | None, revision: str | None) -> "DatasetBuilder":
    # Kept, because a validator opens its data anew each time and this asks the hub several times.
    from datasets import load_dataset_builder

    with _plain_errors(dataset):
        return load_dataset_builder(dataset, config, revision=revision)


@contextlib.contextmanager
def _plain_ends(dataset: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        from titan_async.data.parquet import is_disconnection, reason_of

        if is_disconnection(error):
            why, mend = "the connection was lost", "start again when the network is there"
        elif isinstance(error, (ValueError, OSError, RuntimeError, EOFError, zlib.error)):
            why, mend = "a file is damaged", "mend it, or set dataset_revision to another one"
        else:
            raise
        raise UserError(
            f"The dataset {dataset!r} could not be read to its end: {why} ({reason_of(error)}); {mend}, and "
            "the run goes on from its last checkpoint."
        ) from error


@contextlib.contextmanager
def _plain_errors(dataset: str) -> Iterator[None]:
    from datasets.exceptions import DatasetNotFoundError

    try:
        yield
    except UserError:
        raise
    except DatasetNotFoundError as error:
        raise UserError(
            f"The Hugging Face hub has no dataset {dataset!r} that you may read, or not in that revision: "
            "check the name and dataset_revision, or log in."
        ) from error
    except ConnectionError as error:
        raise UserError(
            f"The Hugging Face hub could not be reached for the dataset {dataset!r}: check the network, "
            'or set dataset to "shakespeare" or dataset_path to local files.'
        ) from error
    except (ValueError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(
            f"The dataset {dataset!r} can't be opened ({reason}): set dataset and dataset_config accordingly."
        ) from error
