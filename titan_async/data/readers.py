"""Common parts of all document readers: interface, order, splits, shares of ranks, and texts of records.

A reader is a function of (epoch, position): the same two values always give the same documents, and a
position is JSON data. Exact resumption needs nothing else. A record is a line of JSON, a row of parquet, or
an item of a `datasets` stream.
"""

import logging
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from titan_async.data.text_source import TextSource
from titan_async.errors import UserError

__all__ = [
    "DocumentReader",
    "EmptyRecords",
    "Position",
    "cannot_read",
    "is_blank",
    "is_validation",
    "no_column",
    "order_of",
    "share_of_worker",
    "text_of",
]

Position = Any
"""A position of a reader within an epoch, as JSON data; None is the start."""

_MAX_NAMES = 20
"""Columns listed in the error of an unknown column."""

_logger = logging.getLogger(__name__)

_Index = TypeVar("_Index", int, npt.NDArray[np.int64])


class DocumentReader(Protocol):
    """Reads one rank's share of the documents of an epoch."""

    def read(self, epoch: int, position: Position) -> Iterator[tuple[str, Position]]:
        """Yields the documents from `position` on, each with the position after it."""
        ...


def is_validation(index: _Index, fraction: float) -> Any:
    """Whether the document of this index, from 0, belongs to the validation split; elementwise for arrays.

    The selected documents are spread evenly. Index 0 belongs to training and index 1 to validation, so that
    two documents are enough for both.
    """
    return np.ceil(index * fraction) > np.ceil((index - 1) * fraction)


def order_of(count: int, source: TextSource, *key: int) -> npt.NDArray[np.int64]:
    """The order of `count` files or documents; `key` is the epoch, and optionally an index within it."""
    if not source.shuffle:
        return np.arange(count)
    return np.random.default_rng([source.seed, *key]).permutation(count)


def share_of_worker(rank: int, world_size: int) -> tuple[int, int]:
    """Index of a rank's share and number of shares; in a loader's worker process, those of the worker."""
    worker = get_worker_info()
    if worker is None:
        return rank, world_size
    return rank * worker.num_workers + worker.id, world_size * worker.num_workers


class EmptyRecords:
    """Counts the records of a source whose text is null, empty or blank, once per file."""

    def __init__(self) -> None:
        self.logs = False
        """Whether to log the count at the end of a file, each time it has at least doubled."""
        self._of_files: dict[str, int] = {}
        self._logged = 0

    def count(self, file: str, records: int) -> None:
        """Adds the number of empty records in a file that was read to its end."""
        self._of_files[file] = max(records, self._of_files.get(file, 0))
        total = sum(self._of_files.values())
        if self.logs and total >= max(1, 2 * self._logged):
            self._logged = total
            _logger.warning(
                "%s records without text (null or blank) were skipped up to the end of %s", f"{total:,}", file
            )


def is_blank(text: str) -> bool:
    """Whether a text is empty or white space only."""
    return not text or text.isspace()


def text_of(value: Any, place: str, text_column: str) -> str | None:
    """The text of a record; None if it is null, empty or blank.

    Args:
        value: Value of the record's column.
        place: The record or its file, for the message.
        text_column: Name of the column.

    Raises:
        UserError: The value is not text.
    """
    if value is not None and not isinstance(value, str):
        raise UserError(
            f"The column {text_column!r} of {place} holds {type(value).__name__} instead of text: "
            "set text_column to a column of text."
        )
    return None if value is None or is_blank(value) else value


def no_column(place: str, text_column: str, names: list[str]) -> UserError:
    """The error of a record or file without the text column."""
    return UserError(
        f"{place} has no column {text_column!r}: set text_column to a column of text; its columns are "
        f"{', '.join(map(repr, names[:_MAX_NAMES])) or 'none'}"
        f"{' and others' if len(names) > _MAX_NAMES else ''}."
    )


def cannot_read(file: object, error: OSError) -> UserError:
    """The error of a file that the operating system cannot read."""
    reason = error.strerror or error
    return UserError(f"The data file {file} can't be read ({reason}): check the file and its permissions.")
