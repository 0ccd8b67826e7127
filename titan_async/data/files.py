"""Documents of local files, read one at a time, with errors that name file and line.

A `.txt` file is one document. If it has more than 16384 characters, it is split at blank lines into documents
of about that length, so that a single large file can be shuffled, divided among ranks, and split into
training and validation. Every record of `.jsonl`, `.jsonl.gz` and `.parquet` is a document: its text column.
Empty documents are left out.
"""

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from titan_async.data.readers import EmptyRecords, cannot_read, is_blank, no_column, text_of
from titan_async.data.text_source import ACCEPTED_ENDINGS
from titan_async.errors import UserError

__all__ = ["find_files", "read_documents", "size_of"]

_PIECE_LENGTH = 16384
"""Characters after which a text file is split at the next blank line; at twice as many, at any line."""

_MAX_LINE_LENGTH = 2**26
"""Characters, several times those of the longest books."""

_MAX_EMPTY = 2**18
"""Consecutive documents without text after which a file is refused as a decompression bomb."""


def find_files(path: str) -> list[Path]:
    """The file at `path`, or all files with accepted suffixes in that folder and its subfolders, sorted.

    In a folder, other files and hidden files and folders are ignored.

    Raises:
        UserError: The path does not exist, the file's suffix is not accepted, or the folder has no such file.
    """
    root = Path(os.path.expanduser(path))
    endings = ", ".join(ACCEPTED_ENDINGS)
    if root.is_file():
        if not root.name.endswith(ACCEPTED_ENDINGS):
            raise UserError(
                f"The data file {path} has an unsupported suffix: convert it to one of {endings}."
            )
        return [root]
    if not root.is_dir():
        what = "is neither a file nor a folder" if os.path.lexists(root) else "does not exist"
        raise UserError(f"The data path {path} {what}: set dataset_path to a file or folder of text.")
    files = sorted(
        file
        for file in root.rglob("*")
        if file.name.endswith(ACCEPTED_ENDINGS)
        and not any(part.startswith(".") for part in file.relative_to(root).parts)
        and file.is_file()
    )
    if not files and any(root.glob("tokens-*.safetensors")):
        raise UserError(f'The data folder {path} contains token files, not text: set dataset to "tokens".')
    if not files:
        raise UserError(f"The data folder {path} has no data files: add files that end in {endings}.")
    return files


def size_of(file: Path) -> int:
    """The size of a file in bytes.

    Raises:
        UserError: The file does not exist.
    """
    try:
        return file.stat().st_size
    except OSError as error:
        raise cannot_read(file, error) from error


def read_documents(
    file: Path, text_column: str, size: int | None = None, empty: EmptyRecords | None = None
) -> Iterator[str]:
    """Yields the documents of a file in order, without empty ones.

    Args:
        file: A file with an accepted suffix.
        text_column: Name of the column or key of the text; unused for `.txt`.
        size: In bytes, when the file was found; by default its current size.
        empty: Counts the records without text.

    Raises:
        UserError: The file can't be read, is corrupt, has no text in that column, or its size has changed.
    """
    size = size_of(file) if size is None else size
    # The last document is held back until the size is checked: it may be incomplete in a truncated file.
    last: str | None = None
    try:
        for document in _documents(file, text_column, empty or EmptyRecords()):
            if last is not None:
                yield last
            last = document
    except UserError:
        _check_size(file, size)  # a change may be the cause
        raise
    _check_size(file, size)
    if last is not None:
        yield last


def _check_size(file: Path, size: int) -> None:
    now = size_of(file)
    if now != size:
        raise UserError(
            f"The data file {file} has changed while it was in use, from {size} to {now} bytes: put it back "
            "as it was, and start again; the run resumes from its last checkpoint."
        )


def _documents(file: Path, text_column: str, empty: EmptyRecords) -> Iterator[str]:
    without_text = consecutive = 0
    try:
        for text in _texts(file, text_column):
            if text is not None and not is_blank(text):
                consecutive = 0
                yield text
                continue
            without_text += text is None
            consecutive += 1
            if consecutive > _MAX_EMPTY:
                raise UserError(
                    f"The data file {file} has {_MAX_EMPTY:,} consecutive empty documents: remove them, or "
                    "leave that file out."
                )
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(
            f"The data file {file} is not a complete gzip file ({error}): fetch or compress it again."
        ) from error
    except OSError as error:
        raise cannot_read(file, error) from error
    empty.count(str(file), without_text)


def _texts(file: Path, text_column: str) -> Iterator[str | None]:
    """The texts of a file, including blank ones; None for a record without text."""
    if file.name.endswith(".txt"):
        return _pieces(file)
    if not file.name.endswith(".parquet"):
        return _json_texts(file, text_column)
    # Imported here because it is slow and few runs need it.
    from titan_async.data.parquet import read_rows

    return (text for _, text in read_rows(str(file), text_column, range))


def _lines(file: Path) -> Iterator[str]:
    """The lines of a file; their length is limited."""
    # The encoding also removes a byte order mark.
    options = {"encoding": "utf-8-sig", "errors": "surrogateescape"}
    number = 0
    with gzip.open(file, "rt", **options) if file.name.endswith(".gz") else file.open(**options) as opened:
        while line := opened.readline(_MAX_LINE_LENGTH):
            number += 1
            if len(line) == _MAX_LINE_LENGTH and not line.endswith("\n"):
                raise UserError(
                    f"Line {number} of {file} has more than {_MAX_LINE_LENGTH:,} characters: break it up, or "
                    "leave that file out."
                )
            try:
                if not line.isascii():
                    line.encode("utf-8", "surrogateescape").decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"Line {number} of {file} is not UTF-8 text ({error.reason}): convert it to UTF-8."
                ) from error
            yield line


def _pieces(file: Path) -> Iterator[str]:
    piece: list[str] = []
    length = 0
    for line in _lines(file):
        piece.append(line)
        length += len(line)
        if length >= 2 * _PIECE_LENGTH or (length >= _PIECE_LENGTH and line.isspace()):
            yield "".join(piece)
            piece, length = [], 0
    yield "".join(piece)


def _json_texts(file: Path, text_column: str) -> Iterator[str | None]:
    for number, line in enumerate(_lines(file), start=1):
        if line.isspace():
            yield ""
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"Line {number} of {file} is not valid JSON ({error}): fix or remove that line."
            ) from error
        if not isinstance(record, dict):
            raise UserError(
                f"Line {number} of {file} is not a JSON object: write one object with the key "
                f"{text_column!r} on each line."
            )
        if text_column not in record:
            raise no_column(f"Line {number} of {file}", text_column, list(record))
        text = text_of(record[text_column], f"line {number} of {file}", text_column)
        # JSON can escape a lone surrogate, which no tokenizer accepts.
        yield text.encode("utf-8", "replace").decode() if text and "\\ud" in line.lower() else text
