"""Files that a user asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan_async.errors import UserError
from titan_async.file_io import atomic_write

__all__ = ["writing_output"]


@contextmanager
def writing_output(path: Path, flag: str) -> Iterator[Path]:
    """`atomic_write` for a file that a user asked for.

    Args:
        path: where the file is to be.
        flag: with which a user may name another file.

    Raises:
        UserError: if it cannot be written.
    """
    try:
        with atomic_write(path) as partial:
            yield partial
    except OSError as error:
        taken = isinstance(error, FileExistsError)  # by a file of the folder's name
        reason = f"{path.parent} is no folder" if taken else error.strerror or str(error)
        raise UserError(f"cannot write {path} ({reason}): name another place with {flag}") from error
