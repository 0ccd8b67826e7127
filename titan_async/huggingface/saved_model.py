"""The model in a run's checkpoint: which recipe it is of, and its weights, one at a time."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torchtitan.trainer import Trainer

from titan_async.checkpoint.dcp import SavedTensors
from titan_async.checkpoint.safetensors_files import INDEX as HF_INDEX
from titan_async.checkpoint.safetensors_files import SafetensorsFolder
from titan_async.checkpoint.tensors import TensorInfo
from titan_async.config.recipe_file import Resolved, resolve_recipe
from titan_async.errors import UserError
from titan_async.huggingface.key_mapping import Layout, layout_of, read_from, tensors_in
from titan_async.training.checkpoint import EMA_WEIGHTS, NEXT_WEIGHTS, complete_steps
from titan_async.training.saved_recipe import RECIPE
from titan_async.training.tying import HEAD

__all__ = ["WEIGHTS", "SavedModel", "open_saved"]

WEIGHTS = {
    "newest": "",
    "stale": f"train_state.{NEXT_WEIGHTS}.",
    "ema": f"train_state.{EMA_WEIGHTS}.",
}
"""The weights that a checkpoint may hold, and what their keys begin with."""

_ABSENT = {
    "stale": "only runs under Async2BW on several stages save them, and no last save of the model alone: use "
    "--weights newest",
    "ema": "set [ema] decay in the recipe and train again, or use --weights newest",
}

_OTHER_STATE = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")


class _HfTensors:
    """As `SavedTensors`, of a last save in Hugging Face's format (`checkpoint.last_save_in_hf`)."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder = folder
        self._files, self._layout = SafetensorsFolder(folder), layout
        self.tensors = tensors_in(self._files, layout)

    def read(self, key: str) -> torch.Tensor:
        return read_from(self._files, self._layout, key)


@dataclass(frozen=True)
class SavedModel:
    """One kind of weights in one checkpoint, which fit the recipe's model."""

    resolved: Resolved
    folder: Path
    """Of the checkpoint."""
    step: int
    layout: Layout
    saved: SavedTensors | _HfTensors
    weights: str
    """One of `WEIGHTS`."""

    @property
    def config(self) -> Trainer.Config:
        return self.resolved.config

    def info(self, key: str) -> TensorInfo:
        """Shape and type of one of the model's tensors, as it was saved."""
        return self.saved.tensors[self._saved_key(key)]

    def read(self, key: str) -> torch.Tensor:
        """Reads one of the model's tensors.

        Raises:
            UserError: as `SavedTensors.read`.
        """
        return self.saved.read(self._saved_key(key))

    def _saved_key(self, key: str) -> str:
        return _saved_key(self.saved, self.layout, self.weights, key)


def open_saved(
    place: str,
    *,
    recipe: str | None = None,
    flags: Sequence[str] = (),
    weights: str = "newest",
) -> SavedModel:
    """Opens the checkpoint of a run.

    Args:
        place: the run's folder, for its latest checkpoint, or that of a step in it.
        recipe: a recipe file, in place of the one in the run's folder.
        flags: for `resolve_recipe`, after the recipe file.
        weights: one of `WEIGHTS`.

    Raises:
        UserError: there is no such checkpoint, it is not of this recipe, or has no such weights.
    """
    run, step = _split(Path(place))
    file = Path(recipe) if recipe else run / RECIPE
    if not recipe and run.is_dir() and not file.is_file():
        raise UserError(f"{run} has no {RECIPE}, which runs write: name the recipe with --recipe FILE.toml")
    if not run.is_dir():
        raise UserError(f"{run} is no folder: name that of a run, or of a checkpoint in it")
    resolved = resolve_recipe([str(file), *flags])
    checkpoints = run / resolved.config.checkpoint.folder if step is None else Path(place).parent
    step = _existing_step(checkpoints, step)
    folder, layout = checkpoints / f"step-{step}", layout_of(resolved.config)
    in_hf = step in complete_steps(checkpoints, HF_INDEX)
    saved = _HfTensors(folder, layout) if in_hf else SavedTensors(folder)
    _check_recipe(saved, layout, "newest", resolved.recipe)
    if not any(key.startswith(WEIGHTS[weights]) for key in saved.tensors):
        raise UserError(f"{saved.folder} has no {weights} weights: {_ABSENT[weights]}")
    _check_recipe(saved, layout, weights, resolved.recipe)
    return SavedModel(resolved, saved.folder, step, layout, saved, weights)


def _split(place: Path) -> tuple[Path, int | None]:
    """The run's folder, and the step if `place` is a step's folder."""
    match = re.fullmatch(r"step-(\d+)", place.name)
    if match is None:
        return place, None
    return Path(os.path.normpath(place / ".." / "..")), int(match[1])


def _existing_step(folder: Path, step: int | None) -> int:
    steps = sorted({*complete_steps(folder), *complete_steps(folder, HF_INDEX)})
    if not steps:
        raise UserError(f"{folder} has no whole checkpoint: train first, or name another folder")
    if step is None:
        return steps[-1]
    if step not in steps:
        raise UserError(f"{folder} has no whole checkpoint of step {step}: use {_listed(steps)}")
    return step


def _listed(steps: list[int]) -> str:
    *others, last = [str(step) for step in steps]
    return f"one of steps {', '.join(others)} and {last}" if others else f"step {last}"


def _saved_key(saved: SavedTensors | _HfTensors, layout: Layout, weights: str, key: str) -> str:
    """Under which key a checkpoint has one of the model's tensors."""
    kept = WEIGHTS[weights] + key
    # A buffer of which there is no average is there once.
    return key if key in layout.buffers and kept not in saved.tensors else kept


def _check_recipe(saved: SavedTensors | _HfTensors, layout: Layout, weights: str, recipe: str) -> None:
    why = None
    for key, shape in layout.shapes.items():
        kept = _saved_key(saved, layout, weights, key)
        found = saved.tensors.get(kept)
        if found is None:
            why = f"it has no {kept}"
        elif found.shape != shape:
            why = f"its {kept} is {list(found.shape)}, where the recipe's is {list(shape)}"
        elif found.dtype.is_floating_point == (key in layout.whole):
            why = f"its {kept} is of the type {found.dtype}"
        if why:
            break
    known = {*layout.shapes, *([HEAD] if layout.tied else [])}  # torchtitan's own trainer saves both names
    others = [key for key in saved.tensors if key not in known and not key.startswith(_OTHER_STATE)]
    if why is None and others:
        why = f"it has {others[0]}, which the recipe's model has not"
    if why:
        raise UserError(
            f"{saved.folder} is not of the recipe {recipe}: {why}; name the recipe that it is of with "
            "--recipe FILE.toml"
        )
