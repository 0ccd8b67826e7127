"""Data layer: the count of records without text, which are left out: nobody should have to guess how many."""

import logging

__all__ = ["EmptyRecords"]

_logger = logging.getLogger(__name__)


class EmptyRecords:
    """Counts the records of a source whose text is null, empty or blank, once for each file.

    Readers call `begin` and `end` around each file, and `add` in between.
    """

    logs: bool = False
    """Whether the count is logged at the end of a file, when it has at least doubled since it was last."""

    def __init__(self) -> None:
        self.total = 0
        """Those of the files that were read to their end, or as far as this share of them goes."""
        self._of_files: dict[str, int] = {}
        self._logged = 0
        self._of_this_file = 0

    def begin(self) -> None:
        """A file is read, from its beginning or a position."""
        self._of_this_file = 0

    def add(self) -> None:
        """A record had no text."""
        self._of_this_file += 1

    def end(self, file: str) -> None:
        """The file was read to its end."""
        before = self._of_files.get(file, 0)
        if self._of_this_file <= before:
            return
        self._of_files[file] = self._of_this_file
        self.total += self._of_this_file - before
        if self.logs and self.total >= 2 * self._logged:
            self._logged = self.total
            _logger.warning(
                "%s records without text (null or blank) were skipped up to the end of %s",
                f"{self.total:,}",
                file,
            )
