"""Datasets of the Hugging Face hub, streamed without a download or a cache.

`datasets` resolves a dataset's configurations and splits to files. Parquet files, the format of almost all
large datasets such as FineWeb-Edu, are read by `ParquetReader`. Other files, such as compressed JSON lines,
are read by `datasets`, which resumes by reading a file from its beginning, and makes every rank read all
files unless the number of ranks divides the number of files.
"""

import contextlib
import copy
import functools
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.utils.data import get_worker_info

from titan_async.data.fingerprints import name_of_files
from titan_async.data.parquet import ParquetReader, is_disconnection, reason_of
from titan_async.data.readers import (
    DocumentReader,
    EmptyRecords,
    Position,
    no_column,
    share_of_worker,
    text_of,
)
from titan_async.data.text_source import TextSource
from titan_async.errors import UserError

if TYPE_CHECKING:
    from datasets import DatasetBuilder, IterableDataset

__all__ = ["files_of_split", "open_hub_reader"]


def open_hub_reader(
    source: TextSource, rank: int, world_size: int, empty: EmptyRecords
) -> tuple[DocumentReader, str]:
    """Opens a rank's share of a hub dataset, and returns the data's name.

    If the dataset has no validation split, documents are selected for it by a hash of their text, which does
    not depend on the ranks that read the files.

    Raises:
        UserError: The hub can't be reached, or has no such dataset, configuration, split or column.
    """
    split, files, fraction = files_of_split(source)
    # A new revision with the same file names is considered the same data.
    name = name_of_files([re.sub(r"@[^/]+", "", file) for file in files])
    title = "/".join(filter(None, (source.dataset, source.dataset_config)))
    reader: DocumentReader
    if all(file.endswith(".parquet") for file in files):
        # `datasets` itself divides a stream among a loader's workers.
        share = share_of_worker(rank, world_size)
        reader = ParquetReader(
            files, source, lambda index, row, text: _is_wanted(text, fraction, source), *share, empty
        )
    else:
        from datasets.distributed import split_dataset_by_node

        stream = _open_stream(source, split)
        reader = _StreamReader(split_dataset_by_node(stream, rank, world_size), source, fraction, empty)
    return reader, f"{title}, {name}"


def files_of_split(source: TextSource) -> tuple[str, list[str], float]:
    """The dataset's split that contains the source's split, its files, and its fraction for validation.

    Raises:
        UserError: As `open_hub_reader`.
    """
    files = {str(name): files for name, files in (_builder(source).config.data_files or {}).items()}
    fraction = 0.0 if "validation" in files else source.validation_fraction
    split = "train" if source.split == "validation" and fraction > 0 else source.split
    if split not in files:
        raise UserError(
            f"The dataset {source.dataset!r} has no split {split!r}: set split to one of "
            f"{', '.join(map(repr, files))}."
        )
    return split, [str(file) for file in files[split]], fraction if split == "train" else 0.0


def _is_wanted(text: str, fraction: float, source: TextSource) -> bool:
    chosen = zlib.crc32(text.encode("utf-8", "replace")) < fraction * 2**32
    return chosen == (fraction > 0 and source.split == "validation")


def _open_stream(source: TextSource, split: str) -> "IterableDataset":
    builder = _builder(source)
    with _open_errors(source.dataset):
        stream = builder.as_streaming_dataset(split=split)
    columns = stream.column_names
    if columns is None:
        return stream
    if source.text_column not in columns:
        raise no_column(f"The dataset {source.dataset!r}", source.text_column, columns)
    return stream.select_columns([source.text_column])


@dataclass(slots=True)
class _StreamReader:
    """Reads a dataset streamed by `datasets`; a position is the stream's state."""

    stream: "IterableDataset"
    source: TextSource
    fraction: float
    empty: EmptyRecords

    def read(self, epoch: int, position: Position) -> Iterator[tuple[str, Position]]:
        """Yields the documents from `position` on, each with the position after it.

        Raises:
            UserError: A record has no text, there are more loader workers than shards, or the connection is
                lost.
        """
        dataset, text_column = self.source.dataset, self.source.text_column
        worker, shards = get_worker_info(), self.stream.num_shards
        if worker is not None and worker.num_workers > shards:
            raise UserError(
                f"The dataset {dataset!r} has {shards} shards for this rank, fewer than its "
                f"{worker.num_workers} loader workers: lower num_workers to that."
            )
        # A loaded state would also apply to the next epoch.
        stream = copy.deepcopy(self.stream)
        if position is not None:
            stream.load_state_dict(position)
        without_text = 0
        with _read_errors(dataset):
            for record in stream:
                if text_column not in record:
                    raise no_column(f"The dataset {dataset!r}", text_column, list(record))
                text = text_of(record[text_column], repr(dataset), text_column)
                if text is None:
                    without_text += 1
                elif _is_wanted(text, self.fraction, self.source):
                    yield text, stream.state_dict()
        self.empty.count(dataset, without_text)


def _builder(source: TextSource) -> "DatasetBuilder":
    return _load(source.dataset, source.dataset_config, source.dataset_revision)


@functools.cache
def _load(dataset: str, config: str | None, revision: str | None) -> "DatasetBuilder":
    # Cached, because each validation opens its data again, with several requests to the hub.
    from datasets import load_dataset_builder

    with _open_errors(dataset):
        return load_dataset_builder(dataset, config, revision=revision)


@contextlib.contextmanager
def _read_errors(dataset: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_disconnection(error):
            why, fix = "the connection was lost", "start again when the network is available"
        elif isinstance(error, (ValueError, OSError, RuntimeError, EOFError, zlib.error)):
            why, fix = "a file is damaged", "fix it, or set dataset_revision to another one"
        else:
            raise
        raise UserError(
            f"The dataset {dataset!r} could not be read to its end: {why} ({reason_of(error)}); {fix}, and "
            "the run resumes from its last checkpoint."
        ) from error


@contextlib.contextmanager
def _open_errors(dataset: str) -> Iterator[None]:
    from datasets.exceptions import DatasetNotFoundError

    try:
        yield
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
