"""Files that are there whole or not at all."""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["write_json", "writing_whole"]


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
    """
    name = f"{path.name}.{secrets.token_hex(4)}" if shared else path.name
    partial = path.with_name(f".{name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:

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
