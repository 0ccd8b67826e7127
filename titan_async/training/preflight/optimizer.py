"""Checks of the section `[optimizer]` against the model's parameters."""

import dataclasses
import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from titan_async.config.field_values import format_value
from titan_async.config.suggestions import nearest, unknown_name
from titan_async.errors import UserError
from titan_async.training.optimizer.config import match_group
from titan_async.training.optimizer.container import FACTORIES, OF_THE_WHOLE_RUN, AsyncOptimizers
from titan_async.training.optimizer.trial import try_out

__all__ = ["check_optimizer"]

_OPTIMIZERS = (*FACTORIES, "SOAP", "DistMuon")

_TORCH_WORDS = {
    "learning rate": ("lr",),
    "epsilon": ("eps",),
    "parameter at index 0": ("beta1", "betas"),
    "parameter at index 1": ("beta2", "betas"),
}
"""Names of options in the errors of torch's optimizers, and their keys in recipes."""


def check_optimizer(
    config: OptimizersContainer.Config, model: nn.Module, *, is_divided: bool = False
) -> None:
    """Refuse optimizers that do not fit the parameters of a model.

    Args:
        config: the section; not changed.
        model: the whole model, on the meta device.
        is_divided: whether no rank has the full parameters.

    Raises:
        UserError: one sentence that names the key and the fix.
    """
    own = isinstance(config, AsyncOptimizers.Config)
    groups = config.resolved_groups() if own else config.param_groups
    if not groups:
        raise UserError("optimizer.param_groups is empty: add a group with pattern '.*'")
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    members: list[list[tuple[str, nn.Parameter]]] = [[] for _ in groups]
    for name, parameter in parameters:
        members[match_group(name, groups)].append((name, parameter))
    known = (*_OPTIMIZERS, *config.classes) if own else _OPTIMIZERS
    for index, (group, matched) in enumerate(zip(groups, members, strict=True)):
        _check_group(index, group, matched, [name for name, _ in parameters], known)
    if own:
        for index, (group, matched) in enumerate(zip(groups, members, strict=True)):
            _check_settings(config, index, group, matched)
            _try_out(config, index, group, matched, is_divided)


def _check_group(
    index: int,
    group: ParamGroupConfig,
    matched: Sequence[object],
    names: Sequence[str],
    known: Sequence[str],
) -> None:
    field = f"optimizer.param_groups.{index}"
    if group.optimizer_name not in known:
        raise UserError(unknown_name(f"{field}.optimizer_name", group.optimizer_name, known))
    if not matched:
        taken = any(re.search(group.pattern, name) for name in names)
        why = "earlier groups match all its parameters" if taken else "matches no parameter of the model"
        raise UserError(
            f"{field}.pattern '{group.pattern}': {why}; parameters are named like {names[len(names) // 2]}"
        )


def _check_settings(
    config: AsyncOptimizers.Config,
    index: int,
    group: ParamGroupConfig,
    matched: list[tuple[str, nn.Parameter]],
) -> None:
    factory = FACTORIES.get(group.optimizer_name) or config.class_of(group.optimizer_name)
    if factory is None:
        return  # torchtitan's own, which needs devices
    settings = group.optimizer_kwargs
    field = f"optimizer.param_groups.{index}.optimizer_kwargs"
    elsewhere = OF_THE_WHOLE_RUN if group.optimizer_name == "Muon" else {}
    options = dict(list(inspect.signature(factory).parameters.items())[1:])
    known = [key for key in options if key not in elsewhere]
    takes_more = any(option.kind is inspect.Parameter.VAR_KEYWORD for option in options.values())
    for key, value in settings.items():
        if key in elsewhere:
            raise UserError(f"{field}.{key} applies to all groups: set {elsewhere[key]} instead")
        if key not in known and takes_more and not nearest(key, known, cutoff=0.7):
            continue
        if key not in known:
            raise UserError(unknown_name(f"a key of {field}", key, known))
        wanted = _wrong_kind(key, value, options[key].default)
        if wanted:
            raise UserError(f"{field}.{key} must be {wanted}, not {format_value(value)}")
    if group.optimizer_name == "SGD" and settings.get("fused"):
        raise UserError(f"{field}.fused: torch's fused SGD does not support sharded parameters; leave it out")
    given: list[Any] = matched
    refusals: tuple[type[Exception], ...] = (ValueError, TypeError, NotImplementedError)
    if group.optimizer_name not in FACTORIES:
        given = [{**settings, "params": [parameter for _, parameter in matched]}]
        refusals = (Exception,)
    try:
        # Implementations for one kind of device refuse meta tensors.
        built = factory(given, **{k: v for k, v in settings.items() if k not in ("fused", "foreach")})
    except refusals as error:
        sentence = " ".join(str(error).split())
        raise UserError(f"{_place(config, index, group, sentence)}: {sentence}") from error
    for key in settings.keys() - set(options):  # which a constructor may accept without using them
        if key not in built.defaults and not hasattr(built, key):
            raise UserError(unknown_name(f"a key of {field}", key, known))


def _try_out(
    config: AsyncOptimizers.Config,
    index: int,
    group: ParamGroupConfig,
    matched: list[tuple[str, nn.Parameter]],
    is_divided: bool,
) -> None:
    """Refuse an optimizer of another package that cannot train this model."""
    cls = None if group.optimizer_name in FACTORIES else config.class_of(group.optimizer_name)
    if cls is None:
        return
    field = f"optimizer.param_groups.{index}" if config.param_groups else f"optimizer.{config.name}"
    try:
        traits = try_out(cls, group.optimizer_kwargs, [parameter.dim() for _, parameter in matched])
    except UserError as error:
        raise UserError(f"{field}: {group.optimizer_name} cannot train here: {error}") from error
    if traits.couples and is_divided:
        raise UserError(
            f"{field}: {group.optimizer_name} with these options uses all gradients together, but here each "
            "rank has a part of the model: turn that off (its own clipping, for example; training.max_norm "
            "clips by the norm of the whole model), or choose another optimizer"
        )


def _wrong_kind(key: str, value: object, default: object) -> str | None:
    """The type that a setting must have, according to its default, if it has another."""
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, int | float):
        is_number = isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool)
        return None if is_number else "a number"
    if key in ("betas", "split_sizes"):
        return None if isinstance(value, list | tuple) else "a list of numbers"
    return None


def _place(config: AsyncOptimizers.Config, index: int, group: ParamGroupConfig, sentence: str) -> str:
    """The key of the recipe to which an optimizer's error refers, or the section."""
    if config.param_groups:
        section, keys = f"optimizer.param_groups.{index}", list(group.optimizer_kwargs)
        inside = f"{section}.optimizer_kwargs"
    else:
        section = inside = f"optimizer.{group.optimizer_name.lower()}"
        keys = [field.name for field in dataclasses.fields(getattr(config, group.optimizer_name.lower()))]
    named = [key for key in keys if re.search(rf"\b{key}\b", sentence)]
    named += [key for words, own in _TORCH_WORDS.items() if words in sentence for key in own if key in keys]
    return f"{inside}.{named[0]}" if named else section
