"""Atomic creation of a folder with its files."""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from titan_async.errors import UserError

__all__ = ["atomic_folder"]


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary folder, `.NAME.partial`, and renames it to `path` at the end.

    An exception removes the temporary folder. A killed process leaves it, and the next process that creates
    the same folder removes it.

    Raises:
        UserError: `path` exists and is not an empty folder, another process is writing it, or the disk is
            full.

    Examples:
        >>> import os, tempfile
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     with atomic_folder(f"{parent}/result") as folder:
        ...         _ = (folder / "weights").write_text("...")
        ...         print(os.listdir(parent))
        ...     print(os.listdir(parent))
        ['.result.partial']
        ['result']
    """
    target = Path(path)
    _refuse_existing(target)
    absolute = Path(os.path.abspath(target))
    partial = absolute.with_name(f".{absolute.name}.partial")
    try:
        absolute.parent.mkdir(parents=True, exist_ok=True)
        lock = _create_locked(partial)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}; name another folder") from error
    published = False
    try:
        yield partial
        _publish(partial, absolute)
        published = True
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(
            f"cannot write {target}: {os.strerror(error.errno)}; free space, or name a folder on another disk"
        ) from error
    finally:
        if not published:  # afterwards another process may have created one of this name
            shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def _refuse_existing(target: Path) -> None:
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} exists already; remove it, or name another folder")


def _create_locked(partial: Path) -> int:
    """Creates an empty folder `partial` and locks it; the lock ends with this process at the latest."""
    while True:
        partial.mkdir(exist_ok=True)
        lock = os.open(partial, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise UserError(
                f"another process is writing {partial.name.removeprefix('.').removesuffix('.partial')} in "
                f"{partial.parent}; wait for it, or name another folder"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(partial)):
                break
        os.close(lock)  # its owner has renamed or removed the folder
    for entry in partial.iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    return lock


def _publish(partial: Path, target: Path) -> None:
    try:
        os.rename(partial, target)  # replaces an empty folder only
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise UserError(f"{target} exists already; remove it, or name another folder") from error
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
