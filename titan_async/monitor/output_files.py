"""Files that a user asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan_async.errors import UserError
from titan_async.file_io import writing_whole

__all__ = ["writing_output"]


@contextmanager
def writing_output(path: Path, flag: str) -> Iterator[Path]:
    """`writing_whole` for a file that a user asked for.

    Args:
        path: where the file is to be.
        flag: with which a user may name another file.

    Raises:
        UserError: if it cannot be written.
    """
    try:
        with writing_whole(path) as partial:
            yield partial
    except OSError as error:
        taken = isinstance(error, FileExistsError)  # by a file of the folder's name
        reason = f"{path.parent} is no folder" if taken else error.strerror or str(error)
        raise UserError(f"cannot write {path} ({reason}): name another place with {flag}") from error
