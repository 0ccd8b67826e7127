"""All starts of a run are one run of Weights & Biases, whose id is kept in the run's folder."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from titan_async.file_io import atomic_write

__all__ = ["keep_run_id", "run_id_file", "wandb_continues"]

_CHOICES = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_RESUME_FROM", "WANDB_FORK_FROM")
"""Variables by which a user chooses the run."""


def run_id_file(dump_folder: str | os.PathLike[str], rank: int | None = None) -> Path:
    """The file of the id in a run's folder; of one rank's, where each rank has a run of its own."""
    return Path(dump_folder) / ("wandb_run_id" if rank is None else f"wandb_run_id.rank{rank}")


@contextlib.contextmanager
def wandb_continues(file: Path, *, resumes: bool) -> Iterator[str]:
    """Within this, `wandb.init` goes on with the run of `file`, or begins one that can be gone on with.

    What the user's environment says of the run is left as it is.

    Args:
        file: as `run_id_file` gives it.
        resumes: whether training goes on from a checkpoint. Without one, a new run begins.

    Yields:
        The id of the run, empty if it is not known.
    """
    if any(os.environ.get(name) for name in _CHOICES):
        yield os.environ.get("WANDB_RUN_ID", "")
        return
    kept = ""
    if resumes:
        with contextlib.suppress(OSError, UnicodeDecodeError):  # then it begins a new run
            kept = file.read_text(encoding="utf-8").strip()
    chosen = {"WANDB_RUN_ID": kept or secrets.token_hex(4), "WANDB_RESUME": "allow"}
    os.environ.update(chosen)
    try:
        yield chosen["WANDB_RUN_ID"]
    finally:
        for name in chosen:
            del os.environ[name]


def keep_run_id(file: Path, run_id: str) -> None:
    """Write the id for the next start. A folder that takes no file costs that, and not the run."""
    with contextlib.suppress(OSError), atomic_write(file) as partial:
        partial.write_text(f"{run_id}\n", encoding="utf-8")
