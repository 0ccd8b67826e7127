"""Files that are there whole or not at all, and files that may be anything."""

import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["read_json", "read_regular", "write_json", "writing_whole"]

_MOST_JSON = 2**28
"""Bytes: the index of the largest data has some millions."""


@contextmanager
def writing_whole(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Give the path of a temporary file beside `path`, which takes its place at the end.

    The folder is made if it is missing. An exception leaves what was there before as it was; a killed process
    leaves a temporary file, which the next one that writes the same file takes over.

    Args:
        path: where the file is to be.
        shared: whether other processes may write the same file at the same time. They then do not take over
            what one has left.

    Raises:
        OSError: if it cannot be written.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "numbers.txt")
        ...     with writing_whole(file) as partial:
        ...         _ = partial.write_text("1 2 3")
        ...         print(file.exists())
        ...     print(file.exists())
        False
        True
    """
    name = f"{path.name}.{secrets.token_hex(4)}" if shared else path.name
    partial = path.with_name(f".{name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        with partial.open("rb+") as written:
            os.fsync(written.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any, *, shared: bool = False) -> None:
    """Write JSON that appears whole or not at all; see `writing_whole`."""
    with writing_whole(path, shared=shared) as partial:
        partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """The content of a file that a user has named: not of a pipe or device, which might never end.

    Raises:
        OSError: if it cannot be read, is something else, or has more than `most` bytes.
        ValueError: if no file can have this name.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device", os.fspath(path))
        if status.st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", os.fspath(path))
        return file.read()


def read_json(path: str | os.PathLike[str]) -> Any:
    """What a file of JSON holds.

    Raises:
        OSError: as `read_regular`.
        ValueError: if it is not JSON in UTF-8, or nested too deeply.
    """
    content = read_regular(path, _MOST_JSON)
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
