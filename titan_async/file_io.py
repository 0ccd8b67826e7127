"""Atomic writes, and reads of files that a user names."""

import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan_async.errors import UserError

__all__ = ["atomic_write", "read_json", "read_regular_file", "write_json", "write_output"]

_MAX_JSON_BYTES = 2**28
"""The index of the largest data set has some millions."""


@contextmanager
def atomic_write(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Yields the path of a temporary file in the same folder, and renames that file to `path` at the end.

    A missing folder is created. An exception leaves an existing file unchanged. A killed process leaves its
    temporary file, which the next process that writes the same path overwrites.

    Args:
        path: the file to write.
        shared: whether other processes may write the same path concurrently. Each then uses its own
            temporary file, and does not overwrite one left by a killed process.

    Raises:
        OSError: the file cannot be written.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "numbers.txt")
        ...     with atomic_write(file) as partial:
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
    """Writes JSON atomically; see `atomic_write`."""
    with atomic_write(path, shared=shared) as partial:
        partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


@contextmanager
def write_output(path: Path, flag: str) -> Iterator[Path]:
    """`atomic_write` for an output file of a command.

    Args:
        path: the file to write.
        flag: the flag that names the file.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        with atomic_write(path) as partial:
            yield partial
    except OSError as error:
        not_a_folder = isinstance(error, FileExistsError)  # raised by mkdir
        reason = f"{path.parent} is not a folder" if not_a_folder else error.strerror or str(error)
        raise UserError(f"cannot write {path} ({reason}): choose another path with {flag}") from error


def read_regular_file(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Reads a regular file. A pipe or a device is refused, because reading it may never end.

    Raises:
        OSError: the file cannot be read, is not a regular file, or has more than `max_bytes` bytes.
        ValueError: the path is not valid, for example because of a null byte.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device", os.fspath(path))
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", os.fspath(path))
        return file.read()


def read_json(path: str | os.PathLike[str]) -> Any:
    """Reads a JSON file.

    Raises:
        OSError: as `read_regular_file`.
        ValueError: the file is not JSON in UTF-8, or nested too deeply.
    """
    content = read_regular_file(path, _MAX_JSON_BYTES)
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
