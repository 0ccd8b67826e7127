"""Which optimizer updates which parameter of a configuration, and whether it corrects for a delay."""

import functools
from collections.abc import Sequence

from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.trainer import Trainer

from titan_async.planning.layout import Layout
from titan_async.training.optimizer.config import match_group
from titan_async.training.optimizer.container import AsyncOptimizers

__all__ = ["feeds_back", "group_of", "groups_of"]


def groups_of(config: Trainer.Config) -> list[ParamGroupConfig]:
    """The parameter groups."""
    optimizer = config.optimizer
    own = isinstance(optimizer, AsyncOptimizers.Config)
    return list(optimizer.resolved_groups() if own else optimizer.param_groups)


def group_of(name: str, groups: Sequence[ParamGroupConfig]) -> ParamGroupConfig:
    """The group of the parameter of that name."""
    return groups[_first_match(name, tuple(group.pattern for group in groups))]


@functools.lru_cache(maxsize=100_000)
def _first_match(name: str, patterns: tuple[str, ...]) -> int:
    return match_group(name, [ParamGroupConfig(pattern=p, optimizer_name="") for p in patterns])


def feeds_back(config: Trainer.Config, layout: Layout) -> bool:
    """Whether error feedback corrects the updates."""
    optimizer = config.optimizer
    if not (layout.delayed and isinstance(optimizer, AsyncOptimizers.Config)):
        return False
    return optimizer.error_feedback.enable and optimizer.error_feedback.strength > 0
