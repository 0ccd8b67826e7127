"""The model in a run's checkpoint: its recipe, and its weights, read one at a time."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torchtitan.trainer import Trainer

from titan_async.checkpoint import TensorInfo
from titan_async.checkpoint.dcp import SavedTensors
from titan_async.checkpoint.safetensors_files import INDEX as HF_INDEX
from titan_async.checkpoint.safetensors_files import SafetensorsFolder
from titan_async.config.recipe_file import Resolved, resolve_recipe
from titan_async.errors import UserError
from titan_async.huggingface.key_mapping import KeyMapping, key_mapping_of, read_tensor, tensor_infos
from titan_async.training.checkpoint.folders import complete_steps
from titan_async.training.checkpoint.train_state import EMA_WEIGHTS, NEXT_WEIGHTS
from titan_async.training.models.tying import HEAD
from titan_async.training.process.run_folder import RECIPE

__all__ = ["WEIGHTS", "SavedModel", "open_saved"]

WEIGHTS = {
    "newest": "",
    "stale": f"train_state.{NEXT_WEIGHTS}.",
    "ema": f"train_state.{EMA_WEIGHTS}.",
}
"""The kinds of weights that a checkpoint may hold, with the prefixes of their keys."""

_HOW_TO_SAVE = {
    "stale": "only runs under Async2BW on several stages save them, and no last save of the model alone: use "
    "--weights newest",
    "ema": "set [ema] decay in the recipe and train again, or use --weights newest",
}

_OTHER_STATE = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")


class _HfTensors:
    """`SavedTensors` of a last save in Hugging Face's format (`checkpoint.last_save_in_hf`)."""

    def __init__(self, folder: Path, mapping: KeyMapping) -> None:
        self.folder = folder
        self._files, self._mapping = SafetensorsFolder(folder), mapping
        self.tensors = tensor_infos(self._files, mapping)

    def read(self, key: str) -> torch.Tensor:
        return read_tensor(self._files, self._mapping, key)


@dataclass(frozen=True)
class SavedModel:
    """One kind of weights in one checkpoint. They match the recipe's model."""

    resolved: Resolved
    folder: Path
    """Of the checkpoint."""
    step: int
    mapping: KeyMapping
    saved: SavedTensors | _HfTensors
    weights: str
    """One of `WEIGHTS`."""

    @property
    def config(self) -> Trainer.Config:
        return self.resolved.config

    def info(self, key: str) -> TensorInfo:
        """Shape and dtype of a tensor, as saved."""
        return self.saved.tensors[self._saved_key(key)]

    def read(self, key: str) -> torch.Tensor:
        """Reads a tensor by its key in the model.

        Raises:
            UserError: as `SavedTensors.read`.
        """
        return self.saved.read(self._saved_key(key))

    def _saved_key(self, key: str) -> str:
        return _saved_key(self.saved, self.mapping, self.weights, key)


def open_saved(
    place: str,
    *,
    recipe: str | None = None,
    flags: Sequence[str] = (),
    weights: str = "newest",
) -> SavedModel:
    """Opens the checkpoint of a run.

    Args:
        place: the run's folder, for its latest checkpoint, or the folder of one step in it.
        recipe: a recipe file to use instead of the one in the run's folder.
        flags: for `resolve_recipe`, after the recipe file.
        weights: one of `WEIGHTS`.

    Raises:
        UserError: there is no such checkpoint, it does not match the recipe, or has no such weights.
    """
    run, step = _split(Path(place))
    file = Path(recipe) if recipe else run / RECIPE
    if not recipe and run.is_dir() and not file.is_file():
        raise UserError(f"{run} has no {RECIPE}, which runs write: name the recipe with --recipe FILE.toml")
    if not run.is_dir():
        raise UserError(f"{run} is not a folder: name that of a run, or of a checkpoint in it")
    resolved = resolve_recipe([str(file), *flags])
    checkpoints = run / resolved.config.checkpoint.folder if step is None else Path(place).parent
    step = _existing_step(checkpoints, step)
    folder, mapping = checkpoints / f"step-{step}", key_mapping_of(resolved.config)
    in_hf = step in complete_steps(checkpoints, HF_INDEX)
    saved = _HfTensors(folder, mapping) if in_hf else SavedTensors(folder)
    _check_recipe(saved, mapping, "newest", resolved.recipe)
    if not any(key.startswith(WEIGHTS[weights]) for key in saved.tensors):
        raise UserError(f"{saved.folder} has no {weights} weights: {_HOW_TO_SAVE[weights]}")
    _check_recipe(saved, mapping, weights, resolved.recipe)
    return SavedModel(resolved, saved.folder, step, mapping, saved, weights)


def _split(place: Path) -> tuple[Path, int | None]:
    """The run's folder, and the step if `place` is the folder of one."""
    match = re.fullmatch(r"step-(\d+)", place.name)
    if match is None:
        return place, None
    return Path(os.path.normpath(place / ".." / "..")), int(match[1])


def _existing_step(folder: Path, step: int | None) -> int:
    steps = sorted({*complete_steps(folder), *complete_steps(folder, HF_INDEX)})
    if not steps:
        raise UserError(f"{folder} has no complete checkpoint: train first, or name another folder")
    if step is None:
        return steps[-1]
    if step not in steps:
        raise UserError(f"{folder} has no complete checkpoint of step {step}: use {_listed(steps)}")
    return step


def _listed(steps: list[int]) -> str:
    *others, last = [str(step) for step in steps]
    return f"one of steps {', '.join(others)} and {last}" if others else f"step {last}"


def _saved_key(saved: SavedTensors | _HfTensors, mapping: KeyMapping, weights: str, key: str) -> str:
    """The checkpoint's key of a tensor of the model."""
    prefixed = WEIGHTS[weights] + key
    # Buffers that are not averaged are saved once.
    return key if key in mapping.buffers and prefixed not in saved.tensors else prefixed


def _check_recipe(saved: SavedTensors | _HfTensors, mapping: KeyMapping, weights: str, recipe: str) -> None:
    reason = None
    for key, shape in mapping.shapes.items():
        saved_key = _saved_key(saved, mapping, weights, key)
        found = saved.tensors.get(saved_key)
        if found is None:
            reason = f"it has no {saved_key}"
        elif found.shape != shape:
            reason = f"its {saved_key} is {list(found.shape)}, where the recipe's is {list(shape)}"
        elif found.dtype.is_floating_point == (key in mapping.integers):
            reason = f"its {saved_key} has dtype {found.dtype}"
        if reason:
            break
    known = {*mapping.shapes, *([HEAD] if mapping.tied else [])}  # torchtitan's own trainer saves both names
    others = [key for key in saved.tensors if key not in known and not key.startswith(_OTHER_STATE)]
    if reason is None and others:
        reason = f"it has {others[0]}, which the recipe's model does not have"
    if reason:
        raise UserError(
            f"{saved.folder} does not match the recipe {recipe}: {reason}; name the recipe that wrote it "
            "with --recipe FILE.toml"
        )
