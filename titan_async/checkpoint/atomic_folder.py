"""A folder that appears under its name when it is whole, or not at all."""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from titan_async.errors import UserError

__all__ = ["new_folder"]


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a folder to write to, which gets the name `path` at the end.

    Until then it is `.NAME.partial` beside it. Left early by an exception it is removed; a killed process
    leaves it, and the next one that makes the same folder removes it.

    Raises:
        UserError: `path` exists and is not an empty folder, another process is writing it, or what is
            written finds no place on the disk.

    Examples:
        >>> import os, tempfile
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     with new_folder(f"{parent}/result") as folder:
        ...         _ = (folder / "weights").write_text("...")
        ...         print(os.listdir(parent))
        ...     print(os.listdir(parent))
        ['.result.partial']
        ['result']
    """
    target = Path(path)
    _refuse_existing(target)
    whole = Path(os.path.abspath(target))
    partial = whole.with_name(f".{whole.name}.partial")
    try:
        whole.parent.mkdir(parents=True, exist_ok=True)
        lock = _make_locked(partial)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}; name another folder") from error
    left_early = True
    try:
        yield partial
        _publish(partial, whole)
        left_early = False
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(
            f"cannot write {target}: {os.strerror(error.errno)}; make room, or name a folder on another disk"
        ) from error
    finally:
        if left_early:  # else another process may have made one of this name
            shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def _refuse_existing(target: Path) -> None:
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} exists already; remove it, or name another folder")


def _make_locked(partial: Path) -> int:
    """An empty folder `partial`, and a lock on it that lasts no longer than this process."""
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
        os.close(lock)  # of a folder that its owner has renamed or removed meanwhile
    for left in partial.iterdir():
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    return lock


def _publish(partial: Path, target: Path) -> None:
    try:
        os.rename(partial, target)  # which replaces an empty folder, and no other
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise UserError(f"{target} exists already; remove it, or name another folder") from error
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
