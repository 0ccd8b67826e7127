"""Files that are there whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan_async.errors import UserError

__all__ = ["writing_whole"]


@contextmanager
def writing_whole(path: Path, flag: str) -> Iterator[Path]:
    """Give the path of a temporary file beside `path`, which takes its place at the end.

    The folder is made if it is missing. An exception leaves what was there before as it was.

    Args:
        path: where the file is to be.
        flag: with which a user may name another file.

    Raises:
        UserError: if it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        taken = isinstance(error, FileExistsError)  # by a file of the folder's name
        reason = f"{path.parent} is no folder" if taken else error.strerror or str(error)
        raise UserError(f"cannot write {path} ({reason}): name another place with {flag}") from error
