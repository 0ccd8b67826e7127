"""Data layer: documents of parquet files, local or on the hub, divided among ranks by rows.

All files of an epoch, in its order, are one axis of equal lengths, of which each rank takes an equal
stretch: some whole files, and a part of the rows of the first and of the last one. So ranks read about as
much as they use, whether there are more files or more ranks; only the row groups at the ends of a stretch
are read by both neighbours. A position is [place of the file in the epoch's order, row]: resuming reads the
file's footer and one row group, however much lies before.

`datasets` does this differently, which is why its own parquet streams are not used: where the number of
ranks does not divide the number of files every rank reads everything and drops the others' documents, and
a position within a file is found again by reading that file from its beginning.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO

import pyarrow
import pyarrow.parquet

from titan_async.data.readers import Position, order_of
from titan_async.data.records import EmptyRecords, cannot_read, no_column, text_of
from titan_async.data.text_source import TextSource
from titan_async.errors import UserError

__all__ = ["ParquetReader", "count_rows", "is_disconnection", "read_rows", "reason_of"]

_ROWS_AT_ONCE = 256

_WAITS = (1, 2, 4, 8, 15, 30)
"""Seconds before each further attempt after a lost connection; together less than the 100 s after which
torchtitan's ranks give up waiting for each other."""

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ParquetReader:
    """Reads one rank's share of the documents of an epoch."""

    files: Sequence[str]
    """Paths, or URLs as fsspec takes them (`hf://...`)."""
    source: TextSource
    """Text column and order."""
    is_wanted: Callable[[int, int, str], bool]
    """Whether the document of a file's index and a row, with that text, is of the split."""
    rank: int
    world_size: int
    empty: EmptyRecords

    def read(self, epoch: int, position: Position) -> Iterator[tuple[str, Position]]:
        """Yield the documents from `position` on, each with the position that follows it.

        Raises:
            UserError: A file can't be read or has no text in that column, or the connection is lost.
        """
        order = order_of(len(self.files), self.source, epoch)
        first = self.rank * len(order) // self.world_size
        end = -(-(self.rank + 1) * len(order) // self.world_size)
        # In data that have changed, it may be a position of `FilesReader`, which means nothing here.
        place, start = position if position and len(position) == 2 else (first, 0)
        for number in range(place, end):
            index, without_text = order[number], 0
            for row, text in self._rows(self.files[index], partial(self._stretch, number), start):
                if text is None:
                    without_text += 1
                elif self.is_wanted(index, row, text):
                    yield text, [number, row + 1]
            self.empty.count(self.files[index], without_text)
            start = 0

    def _stretch(self, number: int, rows: int) -> range:
        """Which of its rows this rank takes of the file at a place of the order."""
        files, before = len(self.files), number * rows
        start, stop = (-(-rank * files * rows // self.world_size) for rank in (self.rank, self.rank + 1))
        return range(min(max(start - before, 0), rows), min(max(stop - before, 0), rows))

    def _rows(
        self, file: str, stretch: Callable[[int], range], start: int
    ) -> Iterator[tuple[int, str | None]]:
        """`read_rows`, which starts again where a connection was lost."""
        attempts = 0
        while True:
            try:
                for row, text in read_rows(file, self.source.text_column, stretch, start):
                    yield row, text
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
                wait = _WAITS[attempts]
                _logger.warning("Reading %s failed (%s): trying again in %s s", file, reason_of(error), wait)
                time.sleep(wait)
                attempts += 1


def read_rows(
    file: str, text_column: str, stretch: Callable[[int], range], start: int = 0
) -> Iterator[tuple[int, str | None]]:
    """Yield rows of a parquet file with their texts, None without one; no other column is read.

    Args:
        file: Path or URL.
        text_column: The column.
        stretch: Gives the rows wanted of so many.
        start: Rows before it are left out too.

    Raises:
        UserError: The file can't be read, is corrupt, or has no text in such a column.
    """
    try:
        # Each row group's column is fetched as a whole.
        with open_file(file) as opened, pyarrow.parquet.ParquetFile(opened, pre_buffer=True) as table:
            names = table.schema_arrow.names
            if text_column not in names:
                raise no_column(f"The data file {file}", text_column, names)
            wanted = stretch(table.metadata.num_rows)
            low, high, end = max(wanted.start, start), wanted.stop, 0
            for group in range(table.metadata.num_row_groups):
                row, end = end, end + table.metadata.row_group(group).num_rows
                if end <= low or row >= high:
                    continue
                for batch in table.iter_batches(
                    _ROWS_AT_ONCE, row_groups=[group], columns=[text_column], use_threads=False
                ):
                    values = batch.column(0)[max(low - row, 0) : max(high - row, 0)].to_pylist()
                    for number, value in enumerate(values, start=max(low, row)):
                        yield number, text_of(value, file, text_column)
                    row += batch.num_rows
    except UnicodeDecodeError as error:
        raise UserError(
            f"The data file {file} is not UTF-8 text ({error.reason}): convert it to UTF-8."
        ) from error
    except (pyarrow.ArrowException, OSError) as error:
        if is_disconnection(error):
            raise
        if getattr(error, "errno", None) is not None:
            raise cannot_read(file, error) from error
        # One of pyarrow, about what the file holds.
        raise UserError(
            f"The data file {file} is not a whole parquet file ({reason_of(error)}): fetch or write it again."
        ) from error


def count_rows(file: str) -> int:
    """The number of rows of a parquet file, by its footer.

    Raises:
        UserError: The file can't be read.
    """
    try:
        with open_file(file) as opened:
            return pyarrow.parquet.read_metadata(opened).num_rows
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"The data file {file} can't be read ({error}): fetch or write it again.") from error


def open_file(file: str) -> IO[bytes]:
    """Open a path, or a URL as fsspec takes it."""
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
    """The first line of an error's message, as a part of a sentence."""
    lines = str(error).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
