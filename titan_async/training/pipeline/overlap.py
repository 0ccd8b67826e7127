"""Overlapped pairs with torchtitan's mixtures of experts: the all-to-all where they switch, thread state."""

import dataclasses
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.config import derive, override
from torchtitan.distributed import activation_checkpoint
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    BaseEPTokenDispatcher,
)
from torchtitan.trainer import Trainer

from titan_async.pipelining import all_to_all_single
from titan_async.training.pipeline.schedule import delays_gradients, overlaps

__all__ = [
    "HandOverTokenDispatcher",
    "SelectiveAC",
    "adapt_config",
    "enter_in_backward",
    "hand_over_dispatch",
    "override_imports",
    "save_exchange",
    "why_nothing_overlaps",
]

# Shapes: N tokens to send, each for one expert, R routed tokens, D model size


class HandOverTokenDispatcher(AllToAllTokenDispatcher):
    """Exchanges tokens by `titan_async.pipelining.all_to_all_single`, where an overlapped pair switches.

    gloo needs it without overlapped pairs too: torchtitan uses a list all-to-all, for which gloo requires
    chunks of equal size.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    def _dispatch_token_exchange(
        self, routed_input_ND: Tensor, pg: Any, output_splits: list[int], input_splits: list[int]
    ) -> Tensor:
        return all_to_all_single(routed_input_ND, output_splits, input_splits, pg)

    def _combine_token_exchange(
        self, routed_output_RD: Tensor, pg: Any, input_splits: list[int], output_splits: list[int]
    ) -> Tensor:
        return all_to_all_single(routed_output_RD, input_splits, output_splits, pg)


class SelectiveAC(activation_checkpoint.SelectiveAC):
    """Saves the output of that all-to-all too, as torchtitan's does for its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(activation_checkpoint.SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | {torch.ops.titan_async.all_to_all_single.default}


@override(target=AllToAllTokenDispatcher.Config, exact=True, description="all-to-all that hands over")
def hand_over_dispatch(cfg: AllToAllTokenDispatcher.Config) -> HandOverTokenDispatcher.Config:
    return derive(cfg, HandOverTokenDispatcher.Config)


@override(target=activation_checkpoint.SelectiveAC.Config, exact=True, description="saves that all-to-all")
def save_exchange(cfg: activation_checkpoint.SelectiveAC.Config) -> SelectiveAC.Config:
    return derive(cfg, SelectiveAC.Config)


def override_imports(config: Trainer.Config) -> list[str]:
    """The names, for `override.imports`, of the replacements that apply to `config`."""
    if AllToAllTokenDispatcher.Config not in _dispatchers(config):
        return []
    selective = type(config.activation_checkpoint) is activation_checkpoint.SelectiveAC.Config
    return [f"{__name__}.{f.__name__}" for f in (hand_over_dispatch, *[save_exchange] * selective)]


def adapt_config(config: Trainer.Config) -> Trainer.Config:
    """A copy with the overrides for overlapped pairs; unchanged without `pipeline.overlap`."""
    if not overlaps(config):
        return config
    names = config.override.imports + [
        name for name in override_imports(config) if name not in config.override.imports
    ]
    return dataclasses.replace(config, override=dataclasses.replace(config.override, imports=names))


def why_nothing_overlaps(config: Trainer.Config) -> str | None:
    """A warning if `pipeline.overlap` is on and hides nothing, else None."""
    if not config.pipeline.overlap:
        return None
    if not delays_gradients(config.parallelism):
        return (
            "pipeline.overlap has no effect: it pairs forwards and backwards of "
            'parallelism.pipeline_parallel_schedule "Async2BW" on several stages'
        )
    costs = "and holds more microbatches in flight for it: turn it off"
    kinds = _dispatchers(config)
    if not kinds or config.parallelism.expert_parallel_degree == 1:
        return (
            "pipeline.overlap hides nothing, because no tokens are sent (experts are not spread over ranks, "
            f"parallelism.expert_parallel_degree is 1), {costs}"
        )
    if not kinds & {AllToAllTokenDispatcher.Config, HandOverTokenDispatcher.Config}:
        names = " and ".join(sorted(kind.__qualname__.removesuffix(".Config") for kind in kinds))
        return (
            f"pipeline.overlap hides nothing, because {names} does not hand over as AllToAllTokenDispatcher "
            f"does, {costs}"
        )
    return None


def enter_in_backward(stage: Any, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Let the stage's backwards in another thread run in `context`, and autograd in that thread.

    torchtitan's meshes are thread-local, and recomputed layers need them.
    """
    backward = stage.backward_one_chunk

    def backward_in_context(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return backward(*args, **kwargs)
        with context(), torch.autograd.set_multithreading_enabled(False):
            return backward(*args, **kwargs)

    stage.backward_one_chunk = backward_in_context


def _dispatchers(config: Trainer.Config) -> set[type]:
    model = config.model_spec.model
    return {type(node) for _, node, _, _ in model.traverse(BaseEPTokenDispatcher.Config)}
