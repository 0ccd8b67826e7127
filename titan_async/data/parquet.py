"""Data layer: documents of parquet files, on local disks or a hub, shared over ranks by rows.

All files of an epoch, in its order, are one axis of equal lengths, of which each rank takes an equal
stretch: some whole files, and a part of the rows of the first and of the last one. So ranks read about as
much as they use, whether there are more files or more ranks; only the row groups at the ends of a stretch
are read by both neighbours. A position is [place of the file in the epoch's order, row]: going on from it
reads the file's footer and one row group, however much lies before.

`datasets` does this differently, which is why its own parquet streams are not used: where the number of
ranks does not divide the number of files every rank reads everything and drops the others' documents, and
a position within a file is found again by reading that file from its beginning.
"""

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import pyarrow
import pyarrow.parquet

from titan_async.data.empty_records import EmptyRecords
from titan_async.data.files import cannot_read, no_column, not_utf8, text_of
from titan_async.errors import UserError

__all__ = ["ParquetReader", "open_file", "read_rows"]

_ROWS_AT_ONCE = 256

_WAITS = (1, 2, 4, 8, 15, 30)
"""Seconds before each further attempt after a lost connection; together less than the 100 s after which
torchtitan's ranks give up waiting for each other."""

_logger = logging.getLogger(__name__)

Position = Any


class ParquetReader:
    """Reads one rank's share of the documents of an epoch.

    Args:
        files: Paths, or addresses as fsspec takes them (`hf://...`).
        text_column: The column that holds the text.
        order: Gives the order of the files in an epoch, as indices.
        is_wanted: Whether the document of a file's index and a row, with that text, is of the split.
        rank: Which share.
        world_size: Number of shares.
        empty: Counts the records without text.
    """

    def __init__(
        self,
        files: Sequence[str],
        *,
        text_column: str,
        order: Callable[[int], Sequence[int]],
        is_wanted: Callable[[int, int, str], bool],
        rank: int,
        world_size: int,
        empty: EmptyRecords,
    ) -> None:
        self._files = files
        self._text_column = text_column
        self._order = order
        self._is_wanted = is_wanted
        self._rank, self._world_size = rank, world_size
        self._empty = empty

    def read(self, epoch: int, position: Position) -> Iterator[tuple[str, Position]]:
        """Yield the documents from `position` on, each with the position that follows it.

        Raises:
            UserError: A file can't be read or has no text in that column, or the connection is lost.
        """
        order = self._order(epoch)
        first = self._rank * len(order) // self._world_size
        behind = -(-(self._rank + 1) * len(order) // self._world_size)
        # In data that have changed, it may be a position of `FilesReader`, which means nothing here.
        place, row = position if position and len(position) == 2 else (first, 0)
        for number in range(place, behind):
            index = order[number]
            file = self._files[index]
            self._empty.begin()
            for following, text in self._documents(file, functools.partial(self._stretch, number), row):
                if text and not text.isspace() and self._is_wanted(index, following - 1, text):
                    yield text, [number, following]
            self._empty.end(file)
            row = 0

    def _stretch(self, number: int, rows: int) -> range:
        """Which of its rows this rank takes of the file at a place of the order."""
        files, before = len(self._files), number * rows
        start, stop = (-(-rank * files * rows // self._world_size) for rank in (self._rank, self._rank + 1))
        return range(min(max(start - before, 0), rows), min(max(stop - before, 0), rows))

    def _documents(self, file: str, stretch: Callable[[int], range], start: int) -> Iterator[tuple[int, str]]:
        """The rows from `start` on that are in the stretch, each behind the number that follows it."""
        attempts = 0
        while True:
            try:
                for row, value in read_rows(file, self._text_column, stretch, start):
                    yield row + 1, text_of(value, file, self._text_column, self._empty.add)
                    start, attempts = row + 1, 0
                return
            except Exception as error:
                if not is_disconnection(error):
                    raise
                if attempts == len(_WAITS):
                    raise UserError(
                        f"The connection was lost while reading {file} ({reason_of(error)}) and did not come "
                        f"back within {sum(_WAITS)} s: start again when the network is there, and the run "
                        "goes on from its last checkpoint."
                    ) from error
                _logger.warning(
                    "Reading %s failed (%s): trying again in %s s", file, reason_of(error), _WAITS[attempts]
                )
                time.sleep(_WAITS[attempts])
                attempts += 1


def read_rows(
    file: str, text_column: str, stretch: Callable[[int], range], start: int = 0
) -> Iterator[tuple[int, Any]]:
    """Yield rows of a parquet file with their values in a column, without reading the others.

    Args:
        file: Path or address.
        text_column: The column.
        stretch: Gives the rows wanted of so many.
        start: Rows before it are left out too.

    Raises:
        UserError: The file can't be read, is corrupt, or has no such column.
    """
    try:
        # Each row group's column is fetched as a whole.
        with open_file(file) as opened, pyarrow.parquet.ParquetFile(opened, pre_buffer=True) as table:
            names = table.schema_arrow.names
            if text_column not in names:
                raise no_column(f"The data file {file}", text_column, names)
            wanted = stretch(table.metadata.num_rows)
            behind = 0
            for group in range(table.metadata.num_row_groups):
                row, behind = behind, behind + table.metadata.row_group(group).num_rows
                low, high = max(wanted.start, start), wanted.stop
                if behind <= low or row >= high:
                    continue
                for batch in table.iter_batches(
                    _ROWS_AT_ONCE, row_groups=[group], columns=[text_column], use_threads=False
                ):
                    values = batch.column(0)[max(low - row, 0) : max(high - row, 0)].to_pylist()
                    yield from enumerate(values, start=max(low, row))
                    row += batch.num_rows
    except pyarrow.ArrowException as error:
        raise _damaged(file, error) from error
    except UnicodeDecodeError as error:
        raise not_utf8(f"The data file {file}", error) from error
    except OSError as error:
        if is_disconnection(error):
            raise
        if error.errno is None:  # pyarrow's own, of what the file holds
            raise _damaged(file, error) from error
        raise cannot_read(file, error) from error


def _damaged(file: str, error: Exception) -> UserError:
    return UserError(
        f"The data file {file} is not a whole parquet file ({reason_of(error)}): fetch or write it again."
    )


def open_file(file: str) -> IO[bytes]:
    """Open a file at a path, or at an address as fsspec takes it."""
    if "://" not in file:
        return open(file, "rb")
    import fsspec

    return fsspec.open(file, "rb").open()


def is_disconnection(error: Exception) -> bool:
    """Whether an error is one of the network, which may pass."""
    if isinstance(error, UserError):
        return False
    # Imported here because it takes a second and is needed when something has gone wrong only.
    from datasets.utils.file_utils import CONNECTION_ERRORS_TO_RETRY

    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status in (408, 425, 429) or status >= 500
    return isinstance(error, (ConnectionError, TimeoutError, *CONNECTION_ERRORS_TO_RETRY))


def reason_of(error: Exception) -> str:
    """An error's words as a part of a sentence."""
    lines = str(error).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
