"""Data layer: documents of local files, read one at a time, with errors that name file and line.

A `.txt` file is one document; one longer than 16384 characters is cut at blank lines into documents
of about that length, so that a single large file can be shuffled, shared over ranks and divided into
training and validation. Every record of `.jsonl`, `.jsonl.gz` and `.parquet` is a document: its text
column. Empty documents are left out.
"""

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from titan_async.errors import UserError

__all__ = [
    "ACCEPTED_ENDINGS",
    "cannot_read",
    "find_files",
    "no_column",
    "not_utf8",
    "read_documents",
    "size_of",
    "text_of",
]

ACCEPTED_ENDINGS = (".txt", ".jsonl", ".jsonl.gz", ".parquet")

_PIECE_LENGTH = 16384
"""Characters after which a text file is cut at the next blank line; at twice as many, at any line."""

_LONGEST_LINE = 2**26
"""Characters, several times those of the longest books."""

_MOST_EMPTY = 2**18
"""Documents without text, one after the other, after which a file is taken for a bomb."""

_MOST_NAMES = 20
"""Columns that are named to a user who has named another one."""


def find_files(path: str) -> list[Path]:
    """The file at `path`, or the files of accepted endings in that folder and below it, sorted.

    In a folder, files of other endings and everything whose name starts with a dot are passed over.

    Raises:
        UserError: nothing is there, the file's ending is not accepted, or the folder has no such file.
    """
    root = Path(os.path.expanduser(path))
    endings = ", ".join(ACCEPTED_ENDINGS)
    if root.is_file():
        if not root.name.endswith(ACCEPTED_ENDINGS):
            raise UserError(
                f"The data file {path} has an ending that is not read: convert it to one of {endings}."
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
        raise UserError(f'The data folder {path} holds no text but token files: set dataset to "tokens".')
    if not files:
        raise UserError(f"The data folder {path} holds no file to read: put in files ending in {endings}.")
    return files


def read_documents(
    file: Path, text_column: str, size: int | None = None, on_empty: Callable[[], None] = lambda: None
) -> Iterator[str]:
    """Yield the documents of one file in their order, without those that are empty.

    Args:
        file: A file of one of the accepted endings.
        text_column: Name of the column or key that holds the text; unused for `.txt`.
        size: In bytes, if the file may not have changed since it had that size.
        on_empty: Called for each record whose text is null, empty or blank.

    Raises:
        UserError: The file can't be read, is corrupt, has no text in that column, or has another size.
    """
    if size is None:
        yield from _documents(file, text_column, on_empty)
        return
    # The last document is what is left of one if the file was cut meanwhile, so it has to wait.
    last: str | None = None
    try:
        for document in _documents(file, text_column, on_empty):
            if last is not None:
                yield last
            last = document
    except UserError:
        _check_size(file, size)  # which may be why
        raise
    _check_size(file, size)
    if last is not None:
        yield last


def size_of(file: Path) -> int:
    """The size of a file in bytes.

    Raises:
        UserError: The file is not there any more.
    """
    try:
        return file.stat().st_size
    except OSError as error:
        raise cannot_read(file, error) from error


def _check_size(file: Path, size: int) -> None:
    now = size_of(file)
    if now != size:
        raise UserError(
            f"The data file {file} has changed while it was in use, from {size} to {now} bytes: put it back "
            "as it was, and start again; the run goes on from its last checkpoint."
        )


def _documents(file: Path, text_column: str, on_empty: Callable[[], None]) -> Iterator[str]:
    try:
        if file.name.endswith(".parquet"):
            documents = _parquet_documents(file, text_column, on_empty)
        elif file.name.endswith(".txt"):
            documents = _pieces(file)
        else:
            documents = _json_documents(file, text_column, on_empty)
        empty = 0
        for document in documents:
            if document and not document.isspace():
                empty = 0
                yield document
            elif (empty := empty + 1) > _MOST_EMPTY:
                raise UserError(
                    f"The data file {file} has {_MOST_EMPTY:,} empty documents in a row: remove them, or "
                    "leave that file out."
                )
    except UnicodeDecodeError as error:
        raise not_utf8(_place_of_bytes(file), error) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(
            f"The data file {file} is not a whole gzip file ({error}): fetch or compress it again."
        ) from error
    except OSError as error:
        raise cannot_read(file, error) from error


def cannot_read(file: object, error: OSError) -> UserError:
    """What to say of a file that the system refuses to give."""
    reason = error.strerror or error
    return UserError(f"The data file {file} can't be read ({reason}): check the file and its permissions.")


def not_utf8(place: str, error: UnicodeDecodeError) -> UserError:
    """What to say of a file, or a place in one, that is not encoded as text here is."""
    return UserError(f"{place} is not UTF-8 text ({error.reason}): convert it to UTF-8.")


def _place_of_bytes(file: Path) -> str:
    """Where the first bytes are that are not UTF-8, of a file that has some."""
    if not file.name.endswith(".parquet"):
        # What was decoded came in blocks, which know nothing of lines.
        with gzip.open(file) if file.name.endswith(".gz") else file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    line.decode()
                except UnicodeDecodeError:
                    return f"Line {number} of {file}"
    return f"The data file {file}"


def _open_text(file: Path) -> IO[str]:
    # The encoding also takes off the mark with which some editors begin a file.
    if file.name.endswith(".gz"):
        return gzip.open(file, "rt", encoding="utf-8-sig")
    return file.open(encoding="utf-8-sig")


def _lines(opened: IO[str], file: Path) -> Iterator[str]:
    """The lines of a file, of which none may take all of the memory."""
    number = 0
    while line := opened.readline(_LONGEST_LINE):
        number += 1
        if len(line) == _LONGEST_LINE and not line.endswith("\n"):
            raise UserError(
                f"Line {number} of {file} has more than {_LONGEST_LINE:,} characters: break it up, or leave "
                "that file out."
            )
        yield line


def _pieces(file: Path) -> Iterator[str]:
    piece: list[str] = []
    length = 0
    with _open_text(file) as opened:
        for line in _lines(opened, file):
            piece.append(line)
            length += len(line)
            if length >= 2 * _PIECE_LENGTH or (length >= _PIECE_LENGTH and line.isspace()):
                yield "".join(piece)
                piece, length = [], 0
    yield "".join(piece)


def _json_documents(file: Path, text_column: str, on_empty: Callable[[], None]) -> Iterator[str]:
    with _open_text(file) as opened:
        for number, line in enumerate(_lines(opened, file), start=1):
            if line.isspace():
                yield ""
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"Line {number} of {file} is not valid JSON ({error}): mend or remove that line."
                ) from error
            if not isinstance(record, dict):
                raise UserError(
                    f"Line {number} of {file} is not a JSON object: write one object with the key "
                    f"{text_column!r} on each line."
                )
            if text_column not in record:
                raise no_column(f"Line {number} of {file}", text_column, list(record))
            text = text_of(record[text_column], f"line {number} of {file}", text_column, on_empty)
            # Half a surrogate pair, which JSON can escape, is a string that no tokenizer takes.
            yield text.encode("utf-8", "replace").decode() if "\\ud" in line.lower() else text


def _parquet_documents(file: Path, text_column: str, on_empty: Callable[[], None]) -> Iterator[str]:
    # Imported here because it takes longer than everything else in this file and few runs need it.
    from titan_async.data.parquet import read_rows

    for _, value in read_rows(str(file), text_column, range):
        yield text_of(value, str(file), text_column, on_empty)


def text_of(value: Any, place: str, text_column: str, on_empty: Callable[[], None]) -> str:
    """The text that a record has, empty where it has none.

    Args:
        value: Of the record's column.
        place: Names the record or its file.
        text_column: Name of the column.
        on_empty: Called if the text is null, empty or blank.

    Raises:
        UserError: It is something else than text.
    """
    text = "" if value is None else value
    if not isinstance(text, str):
        raise UserError(
            f"The column {text_column!r} of {place} holds {type(value).__name__} instead of text: "
            "set text_column to a column of text."
        )
    if not text or text.isspace():
        on_empty()
    return text


def no_column(place: str, text_column: str, names: list[str]) -> UserError:
    """What to say where a record or file lacks the column of text."""
    return UserError(
        f"{place} has no column {text_column!r}: set text_column to one of those there, "
        f"{', '.join(map(repr, names[:_MOST_NAMES])) or 'of which there is none'}"
        f"{' and others' if len(names) > _MOST_NAMES else ''}."
    )
