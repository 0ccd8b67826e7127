"""Checkpoints without a training run, and models to compare them with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from titan_async.config.recipe_file import resolve_recipe
from titan_async.training.prepare import adapt_to_cpu
from titan_async.training.process.run_folder import RECIPE, recipe_text

__all__ = ["DENSE", "MOE", "logits", "save_run", "torchtitan_model"]

ROOT = Path(__file__).parents[2]
DENSE = ROOT / "toml_configs" / "debug_cpu.toml"
MOE = ROOT / "toml_configs" / "debug_moe_cpu.toml"


def torchtitan_model(spec: Any, length: int, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A recipe's model on the CPU, completely in float32, with uninitialized weights."""
    from torchtitan.config.override import apply_overrides
    from torchtitan.trainer import Trainer

    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)  # torchtitan's experts compute in it
    config = adapt_to_cpu(Trainer.Config(model_spec=copy.deepcopy(spec)))
    config.training.seq_len = length
    config.model_spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    return config.model_spec.model.build()


def logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of the training model for tokens [batch, length], with a document per row."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        masks = model.get_attention_masks(positions=positions)
        return model(tokens, positions=positions, attention_masks=masks)


def random_weights(recipe: Path, *flags: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights of a recipe's model, all of which affect the output."""
    from titan_async.training.preflight.check import build_on_meta

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    config = resolve_recipe([str(recipe), *flags]).config
    tied = config.model_spec.model.enable_weight_tying
    for key, value in build_on_meta(config).state_dict().items():
        if tied and key == "lm_head.weight":
            continue
        weights[key] = torch.randn(value.shape, generator=generator) * (0.2 if "norm" in key else 0.1)
        if "norm" in key:
            weights[key] += 1
    return weights


def save_run(
    folder: Path, recipe: Path = DENSE, *flags: str, step: int = 7, others: dict[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Writes the folder of a run with one checkpoint, by torch's own writer; returns its weights.

    Args:
        folder: of the run.
        recipe: of the run.
        flags: for the recipe.
        step: of the checkpoint.
        others: further entries of the checkpoint.
    """
    weights = random_weights(recipe, *flags, seed=step)
    dcp.save({**weights, **(others or {})}, checkpoint_id=folder / "checkpoint" / f"step-{step}")
    resolved = resolve_recipe([str(recipe), *flags])
    (folder / RECIPE).write_text(recipe_text(resolved))
    return weights
