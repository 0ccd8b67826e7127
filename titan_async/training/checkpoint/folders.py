"""The folders of checkpoints: which are complete, and errors for those that are damaged or not writable."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from titan_async.checkpoint._dcp_internals import INDEX, ChecksumReader, CorruptCheckpointError
from titan_async.checkpoint.safetensors_files import INDEX as HF_INDEX
from titan_async.errors import UserError

__all__ = [
    "check_index",
    "complete_steps",
    "explain_damage",
    "is_complete",
    "step_folders",
    "write_error",
]


def write_error(folder: Path, error: OSError) -> UserError:
    """The error for a checkpoint that cannot be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    fix = "free some space there" if full else "make that folder writable"
    last = _last_other(folder)
    then = "starts from scratch" if last is None else f"resumes from step {last}"
    return UserError(
        f"cannot save {folder}: {os.strerror(error.errno or 0)}; {fix}, and the same command {then}"
    )


def _last_other(folder: Path) -> int | None:
    """The last complete step other than that of `folder`."""
    steps = [step for step in complete_steps(folder.parent) if folder.name != f"step-{step}"]
    return steps[-1] if steps else None


@contextlib.contextmanager
def explain_damage(folder: Path) -> Iterator[None]:
    """Turn errors of reading a checkpoint into a sentence for the user.

    Raises:
        UserError: the checkpoint is damaged.
    """
    try:
        yield
    except CorruptCheckpointError as error:
        raise _damaged(folder, str(error)) from error
    except OSError as error:
        raise _damaged(folder, f"{INDEX} cannot be read ({error.strerror})") from error
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, CorruptCheckpointError):
                raise _damaged(folder, str(cause)) from error
        raise


def _damaged(folder: Path, why: str) -> UserError:
    last = _last_other(folder)
    if last is None:
        fix = "use another checkpoint, or remove that folder to start from scratch"
    else:
        fix = f"remove that folder to resume from step {last}"
    return UserError(f"the checkpoint {folder} is damaged: {why}; {fix}")


def check_index(folder: Path) -> None:
    """Check that a checkpoint has a readable index, without running anything that it may contain.

    Raises:
        UserError: the index is missing or damaged.
    """
    with explain_damage(folder):
        ChecksumReader(folder)


def complete_steps(folder: Path, index: str = INDEX) -> list[int]:
    """The steps of which `folder` holds a complete checkpoint, in ascending order.

    Args:
        folder: of the checkpoints.
        index: the file that is written last: by default that of checkpoints to resume from.
    """
    return [step for step, path in step_folders(folder) if (path / index).exists()]


def step_folders(folder: Path) -> list[tuple[int, Path]]:
    """The steps and folders of the checkpoints in `folder`, complete or not, in ascending order."""
    found = ((re.fullmatch(r"step-(\d+)", path.name), path) for path in folder.glob("step-*/"))
    return sorted((int(match[1]), path) for match, path in found if match)


def is_complete(path: Path) -> bool:
    """Whether a folder holds a complete checkpoint, or an export in Hugging Face's format."""
    return (path / INDEX).exists() or (path / HF_INDEX).exists()
