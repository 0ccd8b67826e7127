"""The folder of a run: its `recipe.toml`, and a lock that keeps other runs out."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from titan_async.config.recipe_file import Resolved
from titan_async.errors import UserError
from titan_async.file_io import atomic_write

__all__ = ["LOCK", "RECIPE", "announced", "locked", "recipe_text", "refuse_locked", "write_recipe"]

LOCK = ".lock"
"""The file in a run's folder on which rank 0 holds a lock. It stays there after the run."""


@contextlib.contextmanager
def locked(dump_folder: str | os.PathLike[str]) -> Iterator[None]:
    """Lock a folder against other runs, until this process leaves the context or dies.

    Has no effect on file systems without locks.

    Raises:
        UserError: another run is writing to the folder, or it is not writable.
    """
    file = Path(dump_folder) / LOCK
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(
            f"cannot write {file}: {error.strerror}; set dump_folder to a folder that can be written"
        ) from error
    try:
        _lock(descriptor, file)
        with contextlib.suppress(OSError):  # a full disk
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        with announced(dump_folder):
            yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def announced(dump_folder: str | os.PathLike[str]) -> Iterator[None]:
    """Announce a run to `titan_async.monitor.processes.is_starting`, in launchers and ranks.

    By a shared lock on the folder itself. Has no effect on file systems without locks.
    """
    descriptor = None
    try:
        with contextlib.suppress(OSError):
            descriptor = os.open(dump_folder, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def refuse_locked(dump_folder: str | os.PathLike[str]) -> None:
    """Check early what `locked` checks once the processes run.

    Raises:
        UserError: another run is writing to the folder.
    """
    file = Path(dump_folder) / LOCK
    with contextlib.suppress(OSError):  # no lock file
        descriptor = os.open(file, os.O_RDWR)
        try:
            _lock(descriptor, file)
        finally:
            os.close(descriptor)


def _lock(descriptor: int, file: Path) -> None:
    try:
        # Not flock, whose lock the forked processes of a data loader would keep for some time after a kill.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        who = os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "a process"
        raise UserError(
            f"another run is writing to {file.parent} ({who}): wait until it ends, or choose another "
            "dump_folder"
        ) from None
    except OSError:  # a file system without locks
        pass


RECIPE = "recipe.toml"
"""The file in a run's folder with its whole configuration."""

_MARK = "# Written by titan-async when this run starts, and again when it is resumed.\n"


def recipe_text(resolved: Resolved) -> str:
    """The content of a run's `recipe.toml`."""
    return _MARK + resolved.to_toml()


def write_recipe(resolved: Resolved) -> None:
    """Write `recipe.toml` to the run's folder, for programs that read its checkpoints later.

    Does not replace a file of that name that a user has written.

    Raises:
        UserError: it cannot be written.
    """
    file = Path(resolved.config.dump_folder) / RECIPE
    try:
        if file.exists() and not file.read_text(encoding="utf-8", errors="replace").startswith(_MARK):
            return
        with atomic_write(file) as partial:
            partial.write_text(recipe_text(resolved), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write {file}: {error.strerror}; set dump_folder to a folder on a disk with room"
        ) from error
