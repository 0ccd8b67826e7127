"""Documents of parquet files, local or on the hub, divided among ranks by rows.

The files of an epoch, in its order, form an axis on which each file has the same length. Each rank takes an
equal range of it: some complete files, and a range of rows of the first and the last file. So ranks read
little more than they use, for any numbers of files and ranks; only row groups at the ends of a range are read
by two ranks. A position is [index of the file in the epoch's order, row]. A resumed run reads the file's
footer and one row group.

The parquet streams of `datasets` are not used: unless the number of ranks divides the number of files, every
rank reads everything and drops the other ranks' documents, and resuming reads a file from its beginning.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO

import pyarrow
import pyarrow.parquet

from titan_async.data.readers import EmptyRecords, Position, cannot_read, no_column, order_of, text_of
from titan_async.data.text_source import TextSource
from titan_async.errors import UserError

__all__ = ["ParquetReader", "count_rows", "is_disconnection", "read_rows", "reason_of"]

_BATCH_ROWS = 256

_RETRY_DELAYS = (1, 2, 4, 8, 15, 30)
"""Seconds before each retry after a lost connection; in total less than torchtitan's timeout of 100 s."""

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ParquetReader:
    """Reads one rank's share of the documents of an epoch."""

    files: Sequence[str]
    """Paths, or URLs for fsspec (`hf://...`)."""
    source: TextSource
    """Text column and order."""
    is_wanted: Callable[[int, int, str], bool]
    """Called with a file's index, a row and its text; whether the document belongs to the split."""
    rank: int
    world_size: int
    empty: EmptyRecords

    def read(self, epoch: int, position: Position) -> Iterator[tuple[str, Position]]:
        """Yields the documents from `position` on, each with the position after it.

        Raises:
            UserError: A file can't be read or has no text in that column, or the connection is lost.
        """
        order = order_of(len(self.files), self.source, epoch)
        first = self.rank * len(order) // self.world_size
        end = -(-(self.rank + 1) * len(order) // self.world_size)
        # In changed data it may be a position of `FilesReader`, which is ignored.
        place, start = position if position and len(position) == 2 else (first, 0)
        for number in range(place, end):
            index, without_text = order[number], 0
            for row, text in self._rows(self.files[index], partial(self._row_range, number), start):
                if text is None:
                    without_text += 1
                elif self.is_wanted(index, row, text):
                    yield text, [number, row + 1]
            self.empty.count(self.files[index], without_text)
            start = 0

    def _row_range(self, number: int, rows: int) -> range:
        """This rank's rows of the file at index `number` of the epoch's order, which has `rows` rows."""
        files, before = len(self.files), number * rows
        start, stop = (-(-rank * files * rows // self.world_size) for rank in (self.rank, self.rank + 1))
        return range(min(max(start - before, 0), rows), min(max(stop - before, 0), rows))

    def _rows(
        self, file: str, select_rows: Callable[[int], range], start: int
    ) -> Iterator[tuple[int, str | None]]:
        """`read_rows` with retries after a lost connection."""
        attempts = 0
        while True:
            try:
                for row, text in read_rows(file, self.source.text_column, select_rows, start):
                    yield row, text
                    start, attempts = row + 1, 0
                return
            except Exception as error:
                if not is_disconnection(error):
                    raise
                if attempts == len(_RETRY_DELAYS):
                    raise UserError(
                        f"The connection was lost while reading {file} ({reason_of(error)}) and not restored "
                        f"within {sum(_RETRY_DELAYS)} s: start again when the network is available, and the "
                        "run resumes from its last checkpoint."
                    ) from error
                wait = _RETRY_DELAYS[attempts]
                _logger.warning("Reading %s failed (%s): retrying in %s s", file, reason_of(error), wait)
                time.sleep(wait)
                attempts += 1


def read_rows(
    file: str, text_column: str, select_rows: Callable[[int], range], start: int = 0
) -> Iterator[tuple[int, str | None]]:
    """Yields rows of a parquet file with their texts, None without text; no other column is read.

    Args:
        file: Path or URL.
        text_column: The column.
        select_rows: Called with the number of rows; returns the range to read.
        start: Rows before it are skipped as well.

    Raises:
        UserError: The file can't be read, is corrupt, or has no text in such a column.
    """
    try:
        # The text column of a row group is read at once.
        with open_file(file) as opened, pyarrow.parquet.ParquetFile(opened, pre_buffer=True) as table:
            names = table.schema_arrow.names
            if text_column not in names:
                raise no_column(f"The data file {file}", text_column, names)
            wanted = select_rows(table.metadata.num_rows)
            low, high, end = max(wanted.start, start), wanted.stop, 0
            for group in range(table.metadata.num_row_groups):
                row, end = end, end + table.metadata.row_group(group).num_rows
                if end <= low or row >= high:
                    continue
                for batch in table.iter_batches(
                    _BATCH_ROWS, row_groups=[group], columns=[text_column], use_threads=False
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
        # An error of pyarrow about the content.
        raise UserError(
            f"The data file {file} is not a complete parquet file ({reason_of(error)}): fetch or write it "
            "again."
        ) from error


def count_rows(file: str) -> int:
    """The number of rows of a parquet file, from its footer.

    Raises:
        UserError: The file can't be read.
    """
    try:
        with open_file(file) as opened:
            return pyarrow.parquet.read_metadata(opened).num_rows
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"The data file {file} can't be read ({error}): fetch or write it again.") from error


def open_file(file: str) -> IO[bytes]:
    """Opens a path, or a URL for fsspec."""
    if "://" not in file:
        return open(file, "rb")
    import fsspec

    return fsspec.open(file, "rb").open()


def is_disconnection(error: Exception) -> bool:
    """Whether an error is a temporary one of the network."""
    if isinstance(error, UserError):
        return False
    # Imported here because it takes a second and is needed only for errors.
    from datasets.utils.file_utils import CONNECTION_ERRORS_TO_RETRY

    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status in (408, 425, 429) or status >= 500
    return isinstance(error, (ConnectionError, TimeoutError, *CONNECTION_ERRORS_TO_RETRY))


def reason_of(error: Exception) -> str:
    """The first line of an error's message, without a full stop."""
    lines = str(error).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
