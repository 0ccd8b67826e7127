"""Tied weights: an embedding that is also the output projection.

On one stage this is torchtitan's, one parameter in two modules. torchtitan does not support it with
pipelines; under Async2BW the first and the last stage each have a copy of the weight, and `ScheduleAsync2BW`
keeps them equal. In checkpoints and for the patterns of optimizers it has one name: that of the embedding.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.trainer import Trainer

__all__ = [
    "EMBEDDING",
    "HEAD",
    "as_held",
    "as_stored",
    "is_copy",
    "is_tied",
    "store_once",
    "stored_name",
    "tied_parameters",
    "untied",
    "update_model",
]

EMBEDDING = "tok_embeddings.weight"
"""The name of a tied weight."""

HEAD = "lm_head.weight"
"""The name of the same weight in the output projection."""

_MARK = "head_is_tied"


def is_tied(model: Any) -> bool:
    """Whether the embedding and the head of a model with this configuration are one weight."""
    return bool(getattr(model, "enable_weight_tying", False))


def untied(model: Any) -> Any:
    """A copy of a tied model's configuration for stages: embedding and head are separate parameters.

    Both are initialized as torchtitan initializes the tied weight: as the head.
    """
    weight = model.lm_head.param_init["weight"]
    embedding = dataclasses.replace(
        model.tok_embeddings, param_init={**(model.tok_embeddings.param_init or {}), "weight": weight}
    )
    return dataclasses.replace(model, tok_embeddings=embedding, enable_weight_tying=False)


@contextmanager
def _as_untied(model: Any) -> Iterator[None]:
    model.enable_weight_tying = False
    try:
        yield
    finally:
        model.enable_weight_tying = True


def update_model(config: Trainer.Config, *, tied_stages: bool) -> None:
    """Update a configuration's model from the other sections, as torchtitan does.

    Args:
        config: its model is changed.
        tied_stages: whether a tied model may be on several stages, which torchtitan refuses.

    Raises:
        ValueError, NotImplementedError: the model does not support other settings.
    """
    model = config.model_spec.model
    if not (tied_stages and is_tied(model)):
        model.update_from_config(config=config)
        return
    with _as_untied(model):
        model.update_from_config(config=config)
    shardings = [
        getattr(part.sharding_config, "state_shardings", {}).get("weight")
        for part in (model.tok_embeddings, model.lm_head)
    ]
    if shardings[0] != shardings[1]:
        raise ValueError(
            "its embedding and head are tied, but tensor parallelism would shard them differently on the "
            f"first and the last stage ({shardings[0]} and {shardings[1]}): give both the same sharding, or "
            "set parallelism.pipeline_parallel_degree to 1"
        )


def store_once(part: nn.Module) -> None:
    """Let the `state_dict` of a tied model, or of its stage, hold the tied weight as the embedding."""
    if part.lm_head is None:
        return
    setattr(part, _MARK, True)
    part.register_state_dict_post_hook(_after_state_dict)
    part.register_load_state_dict_pre_hook(_before_load)


def _after_state_dict(part: nn.Module, state: dict[str, Any], *_: Any) -> None:
    as_stored(part, state)


def _before_load(part: nn.Module, state: dict[str, Any], *_: Any) -> None:
    as_held(part, state)


def as_stored(part: nn.Module, values: dict[str, Any]) -> dict[str, Any]:
    """Rename, in place, a dict by a module's parameter names to the names in checkpoints."""
    if getattr(part, _MARK, False) and HEAD in values:
        head = values.pop(HEAD)
        values.setdefault(EMBEDDING, head)
    return values


def as_held(part: nn.Module, values: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `as_stored`."""
    if getattr(part, _MARK, False) and EMBEDDING in values:
        values[HEAD] = values[EMBEDDING]
        if part.tok_embeddings is None:
            del values[EMBEDDING]
    return values


def stored_name(part: nn.Module, name: str) -> str:
    """The name of a module's parameter in checkpoints and for the patterns of optimizers."""
    name = canonical_fqn(name)
    return EMBEDDING if name == HEAD and getattr(part, _MARK, False) else name


def is_copy(part: nn.Module, name: str) -> bool:
    """Whether a module's parameter is the last stage's copy of a tied weight."""
    return stored_name(part, name) != canonical_fqn(name)


def tied_parameters(part: nn.Module) -> list[nn.Parameter]:
    """A stage's copy of a tied weight, in a list of one; empty on other stages."""
    return [p for name, p in part.named_parameters() if stored_name(part, name) == EMBEDDING]
