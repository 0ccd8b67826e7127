"""The folder of a run says which recipe it is of."""

from pathlib import Path

from titan_async.config.recipe_file import Resolved
from titan_async.errors import UserError
from titan_async.file_io import atomic_write

__all__ = ["RECIPE", "recipe_text", "write_recipe"]

RECIPE = "recipe.toml"
"""The file in a run's folder with its whole configuration."""

_MARK = "# Written by titan-async when this run starts, and again when it is resumed.\n"


def recipe_text(resolved: Resolved) -> str:
    """What a run's `recipe.toml` holds."""
    return _MARK + resolved.to_toml()


def write_recipe(resolved: Resolved) -> None:
    """Write `recipe.toml` to the run's folder, for what reads its checkpoints later.

    A file of that name which a user has written is left as it is.

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
