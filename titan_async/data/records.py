"""Data layer: the text of a record, the sentence where it has none, and the count of those without.

A record is a line of JSON, a row of parquet, or what `datasets` yields.
"""

import logging
from typing import Any

from titan_async.errors import UserError

__all__ = ["EmptyRecords", "cannot_read", "is_blank", "no_column", "text_of"]

_MOST_NAMES = 20
"""Columns that are named to a user who has named another one."""

_logger = logging.getLogger(__name__)


class EmptyRecords:
    """Counts the records of a source whose text is null, empty or blank, once for each file."""

    def __init__(self) -> None:
        self.logs = False
        """Whether the count is logged at the end of a file, if it has at least doubled since it was last."""
        self._of_files: dict[str, int] = {}
        self._logged = 0

    def count(self, file: str, records: int) -> None:
        """Count the empty records of a file that was read to its end, from its beginning or a position."""
        self._of_files[file] = max(records, self._of_files.get(file, 0))
        total = sum(self._of_files.values())
        if self.logs and total >= max(1, 2 * self._logged):
            self._logged = total
            _logger.warning(
                "%s records without text (null or blank) were skipped up to the end of %s", f"{total:,}", file
            )


def is_blank(text: str) -> bool:
    """Whether a text is empty or nothing but white space."""
    return not text or text.isspace()


def text_of(value: Any, place: str, text_column: str) -> str | None:
    """The text of a record; None if it is null, empty or blank.

    Args:
        value: Value of the record's column.
        place: Names the record or its file.
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
        f"{place} has no column {text_column!r}: set text_column to one of those there, "
        f"{', '.join(map(repr, names[:_MOST_NAMES])) or 'of which there is none'}"
        f"{' and others' if len(names) > _MOST_NAMES else ''}."
    )


def cannot_read(file: object, error: OSError) -> UserError:
    """The error of a file that the operating system does not let read."""
    reason = error.strerror or error
    return UserError(f"The data file {file} can't be read ({reason}): check the file and its permissions.")
