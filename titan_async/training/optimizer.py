"""The optimizers of a run: Muon for hidden matrices, AdamW for the rest, each with error feedback."""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from titan_async.errors import UserError
from titan_async.optim import ErrorFeedback, Lion, Muon
from titan_async.optim.correction import history_key
from titan_async.training.changed_options import changed_options
from titan_async.training.optimizer_config import (
    AdamWConfig,
    ErrorFeedbackConfig,
    LionConfig,
    MuonConfig,
    SGDConfig,
    match_group,
    named_groups,
)
from titan_async.training.tying import stored_name

__all__ = ["FACTORIES", "OF_THE_WHOLE_RUN", "AsyncOptimizers"]

FACTORIES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Muon": Muon,
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "Lion": Lion,
    "SGD": torch.optim.SGD,
}

OF_THE_WHOLE_RUN = {
    "bucket_mb": "optimizer.muon.bucket_mb",
    "error_feedback": "optimizer.error_feedback.strength",
    "error_feedback_level": "optimizer.error_feedback.level",
    "error_feedback_dtype": "optimizer.error_feedback.dtype",
}
"""Options of Muon that a group does not set, and where they are set for all groups."""

_NEW_OPTIONS = (
    "ns_form",
    "cautious_weight_decay",
    "split_sizes",
    "split_dim",
    "input_dim",
    "momentum_dtype",
    "error_feedback",
    "error_feedback_level",
    "error_feedback_dtype",
)
"""Options of Muon that checkpoints lack which were made when it had none of them."""


class AsyncOptimizers(OptimizersContainer):
    """torchtitan's container of optimizers, with Muon, Lion and error feedback.

    Error feedback is inside Muon and wrapped around the others; its state has the same names either way, so
    that checkpoints do not depend on which it is.

    Raises:
        UserError: if `param_groups` name an unknown optimizer, leave a parameter without one, or give one a
            parameter or an option that it refuses.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        name: Literal["muon", "adamw", "lion", "sgd"] = "muon"
        """"muon": Muon for the matrices inside the layers, AdamW for everything else; "adamw", "lion" or
        "sgd" for all parameters. Ignored where `param_groups` is given."""

        muon: MuonConfig = field(default_factory=MuonConfig)
        adamw: AdamWConfig = field(default_factory=AdamWConfig)
        lion: LionConfig = field(default_factory=LionConfig)
        sgd: SGDConfig = field(default_factory=SGDConfig)
        error_feedback: ErrorFeedbackConfig = field(default_factory=ErrorFeedbackConfig)

        def resolved_groups(self) -> list[ParamGroupConfig]:
            """The parameter groups: those given, else those that `name` stands for."""
            return self.param_groups or named_groups(self)

        def without_feedback(self) -> "AsyncOptimizers.Config":
            """A copy for training without a delay, where there is nothing to correct."""
            return dataclasses.replace(
                self, error_feedback=dataclasses.replace(self.error_feedback, enable=False)
            )

        def __post_init__(self) -> None:
            for group in self.param_groups:
                try:
                    re.compile(group.pattern)
                except re.error as error:
                    raise ValueError(
                        f"optimizer.param_groups pattern '{group.pattern}' is no regular expression: {error}"
                    ) from None

    saved: Collection[str] | None = None
    """While a checkpoint is being loaded, the names of what it holds; see `AsyncCheckpointer`."""

    changed: Sequence[str] = ()
    """The options that differ from those of the checkpoint loaded last; see `changed_options`."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        self._groups = config.resolved_groups()
        self._is_named = not config.param_groups
        feedback = config.error_feedback
        self._feedback_key = history_key(feedback.level)
        strength = feedback.strength if feedback.enable else 0.0
        for_muon = {
            "bucket_mb": config.muon.bucket_mb,
            "error_feedback": strength,
            "error_feedback_level": feedback.level,
            "error_feedback_dtype": feedback.dtype,
        }
        by_name = config.optimizer_factory_kwargs_by_name
        by_name = {**by_name, "Muon": {**for_muon, **by_name.get("Muon", {})}}
        config = dataclasses.replace(config, optimizer_factory_kwargs_by_name=by_name)
        try:
            super().__init__(config, model_parts=model_parts)
        except (NotImplementedError, ValueError) as error:  # a parameter or option that an optimizer refuses
            raise UserError(f"{error} (optimizer.name, optimizer.param_groups)") from error
        if strength:
            dtype = None if feedback.dtype == "auto" else getattr(torch, feedback.dtype)
            self.optimizers = [
                optimizer
                if isinstance(optimizer, Muon)
                else ErrorFeedback(optimizer, strength=strength, level=feedback.level, dtype=dtype)
                for optimizer in self.optimizers
            ]

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        if name in FACTORIES:
            return FACTORIES[name]
        return OptimizersContainer._resolve_optimizer_factory(name)

    def _build_param_groups(  # type: ignore[override]
        self, model: nn.Module, param_group_configs: list[ParamGroupConfig], impl_kwargs: dict[str, Any]
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
        # Unlike torchtitan's: a pattern may match nothing on this stage, as long as it does on another.
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        patterns: dict[str, list[str]] = defaultdict(list)
        members: list[list[tuple[str, nn.Parameter]]] = [[] for _ in self._groups]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                fqn = stored_name(model, name)
                members[match_group(fqn, self._groups)].append((fqn, parameter))
        for config, matched in zip(self._groups, members, strict=True):
            if matched:
                groups[config.optimizer_name].append(
                    {
                        "params": [parameter for _, parameter in matched],
                        "param_names": [name for name, _ in matched],
                        **_implementation(config.optimizer_name, impl_kwargs),
                        **config.optimizer_kwargs,
                    }
                )
                patterns[config.optimizer_name].append(config.pattern)
        return groups, patterns

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.saved is None:
            return state
        return {key: value for key, value in state.items() if key in self.saved or not _may_lack(key)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the parameters. Options stay those of this run, learning rates included."""
        own = {key: value for key, value in super().state_dict().items() if key.startswith("param_groups.")}
        self.changed = changed_options(state_dict, own, self._name_of)
        super().load_state_dict({**state_dict, **own})
        self.saved = None

    def _name_of(self, parameter: str, option: str) -> str:
        """What the recipe calls an option of a parameter."""
        index = match_group(parameter, self._groups)
        optimizer = self._groups[index].optimizer_name
        if optimizer == "Muon" and option in OF_THE_WHOLE_RUN:
            return OF_THE_WHOLE_RUN[option]
        option = option.removeprefix("initial_")  # as the schedule calls the rate that it starts from
        if self._is_named:
            return f"optimizer.{optimizer.lower()}.{option}"
        return f"optimizer.param_groups.{index}.optimizer_kwargs.{option}"

    @property
    def step_was_skipped(self) -> bool:
        """Whether an optimizer found a gradient that is not finite, and left its parameters as they were.

        Known on the ranks that share these parameters; other stages of a pipeline do not hear of it.
        """
        return any(getattr(optimizer, "step_was_skipped", False) for optimizer in self.optimizers)

    def feedback_histories(self) -> list[torch.Tensor]:
        """What error feedback remembers of each parameter of this rank; nothing where it is off."""
        return [
            entries[self._feedback_key]
            for optimizer in self.optimizers
            for entries in optimizer.state.values()
            if self._feedback_key in entries
        ]

    def learning_rates(self) -> dict[str, float]:
        """The current learning rates, as "lr/Muon", or "lr/AdamW/0" where an optimizer has several groups."""
        rates = {}
        for optimizer in self._unwrapped():
            name = f"lr/{type(optimizer).__name__}"
            many = len(optimizer.param_groups) > 1
            for index, group in enumerate(optimizer.param_groups):
                rates[f"{name}/{index}" if many else name] = float(group["lr"])
        return rates

    def _unwrapped(self) -> Iterator[torch.optim.Optimizer]:
        for optimizer in self.optimizers:
            yield optimizer.optimizer if isinstance(optimizer, ErrorFeedback) else optimizer


def _implementation(name: str, impl_kwargs: dict[str, Any]) -> dict[str, Any]:
    """torchtitan's choice among the implementations of an optimizer, as far as there is one."""
    if name in ("Muon", "Lion"):
        return {}
    if name == "SGD" and impl_kwargs.get("fused"):
        # DTensor has no sharding rule for the fused SGD.
        return {**impl_kwargs, "fused": False, "foreach": True}
    return impl_kwargs


def _may_lack(key: str) -> bool:
    """Whether a checkpoint that lacks a piece of state can be loaded nevertheless."""
    return (key.startswith("state.") and ".error_feedback_" in key) or _is_option(key, _NEW_OPTIONS)


def _is_option(key: str, names: Collection[str]) -> bool:
    return key.startswith("param_groups.") and key.rpartition(".")[2] in names
