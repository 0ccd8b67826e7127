"""The optimizers of a run: Muon for hidden matrices, AdamW for the rest, each with error feedback."""

import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import Configurable

from titan_async.errors import UserError
from titan_async.optim import ErrorFeedback, Muon

__all__ = [
    "HIDDEN_MATRICES",
    "AdamWConfig",
    "AsyncOptimizers",
    "ErrorFeedbackConfig",
    "MuonConfig",
    "SGDConfig",
]

HIDDEN_MATRICES = r"^layers\.(?!.*(norm|router|bias)).*$"
"""Names of the matrices inside the decoder's layers: not embeddings, output head, norms, routers, biases."""

FEEDBACK_KEY = ".error_feedback_"
"""In the names of checkpointed state: what belongs to error feedback."""

FACTORIES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Muon": Muon,
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
}


@dataclass(kw_only=True, slots=True)
class MuonConfig(Configurable.Config):
    lr: float = 0.02
    """Peak learning rate of Muon."""

    weight_decay: float = 0.1
    """Decoupled weight decay."""

    momentum: float = 0.95
    """Momentum coefficient. The higher it is, the less a delay of one update costs."""

    nesterov: bool = True
    """Look ahead along the momentum."""

    adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """How the learning rate scales with a matrix's shape; "match_rms_adamw" gives updates the size of
    AdamW's, so that learning rate and decay carry over from it."""

    coefficients: Literal["standard", "polar_express"] = "standard"
    """Coefficients of the Newton-Schulz iteration: the original quintic or Polar Express."""

    ns_steps: int = 5
    """Newton-Schulz iterations."""


@dataclass(kw_only=True, slots=True)
class AdamWConfig(Configurable.Config):
    lr: float = 3e-3
    """Peak learning rate of AdamW."""

    beta1: float = 0.9
    """Decay of the first moment."""

    beta2: float = 0.95
    """Decay of the second moment."""

    eps: float = 1e-8
    """Added to the root of the second moment."""

    weight_decay: float = 0.1
    """Decoupled weight decay."""


@dataclass(kw_only=True, slots=True)
class SGDConfig(Configurable.Config):
    lr: float = 0.1
    """Peak learning rate of SGD."""

    momentum: float = 0.9
    """Momentum coefficient."""

    weight_decay: float = 0.0
    """Weight decay, added to the gradient."""


@dataclass(kw_only=True, slots=True)
class ErrorFeedbackConfig(Configurable.Config):
    enable: bool = True
    """Correct for the delay of one update (arXiv 2606.30634). Without a delay, that is under a
    synchronous schedule or on one stage, there is nothing to correct and this has no effect."""

    strength: float = 1.0
    """Strength s of the correction; 1 is the paper's."""

    level: Literal["update", "gradient"] = "update"
    """Correct the update (the paper's way) or the gradient."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.strength) and self.strength >= 0):
            raise ValueError(
                f"optimizer.error_feedback.strength is {self.strength}; "
                "it must be a finite number of at least 0"
            )


class AsyncOptimizers(OptimizersContainer):
    """torchtitan's container of optimizers, with Muon and error feedback.

    Raises:
        UserError: if `param_groups` name an unknown optimizer, or leave a parameter without one.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        name: Literal["muon", "adamw", "sgd"] = "muon"
        """"muon": Muon for the matrices inside the layers, AdamW for everything else; "adamw" or "sgd"
        for all parameters. Ignored where `param_groups` is given."""

        muon: MuonConfig = field(default_factory=MuonConfig)
        adamw: AdamWConfig = field(default_factory=AdamWConfig)
        sgd: SGDConfig = field(default_factory=SGDConfig)
        error_feedback: ErrorFeedbackConfig = field(default_factory=ErrorFeedbackConfig)

        def resolved_groups(self) -> list[ParamGroupConfig]:
            """The parameter groups: those given, else those that `name` stands for."""
            return self.param_groups or _groups_of(self)

        def __post_init__(self) -> None:
            for group in self.param_groups:
                try:
                    re.compile(group.pattern)
                except re.error as error:
                    raise ValueError(
                        f"optimizer.param_groups pattern '{group.pattern}' is no regular expression: {error}"
                    ) from None

    resumes_feedback: bool = True
    """Whether the state includes error feedback's; see `AsyncCheckpointer`."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        self._groups = config.resolved_groups()
        try:
            super().__init__(config, model_parts=model_parts)
        except NotImplementedError as error:  # a parameter that the optimizer cannot update
            raise UserError(f"{error} (optimizer.name, optimizer.param_groups)") from error
        feedback = config.error_feedback
        if feedback.enable and feedback.strength:
            self.optimizers = [
                ErrorFeedback(optimizer, strength=feedback.strength, level=feedback.level)
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
                fqn = canonical_fqn(name)
                members[match_group(fqn, self._groups)].append((fqn, parameter))
        for config, matched in zip(self._groups, members, strict=True):
            if matched:
                groups[config.optimizer_name].append(
                    {
                        "params": [parameter for _, parameter in matched],
                        "param_names": [name for name, _ in matched],
                        **impl_kwargs,
                        **config.optimizer_kwargs,
                    }
                )
                patterns[config.optimizer_name].append(config.pattern)
        return groups, patterns

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.resumes_feedback:
            return state
        return {key: value for key, value in state.items() if FEEDBACK_KEY not in key}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.resumes_feedback = True

    def learning_rates(self) -> dict[str, float]:
        """The current learning rates, as "lr/Muon", or "lr/AdamW/0" where an optimizer has several groups."""
        rates = {}
        for optimizer in self.optimizers:
            wrapped = optimizer.optimizer if isinstance(optimizer, ErrorFeedback) else optimizer
            name = f"lr/{type(wrapped).__name__}"
            many = len(optimizer.param_groups) > 1
            for index, group in enumerate(optimizer.param_groups):
                rates[f"{name}/{index}" if many else name] = float(group["lr"])
        return rates


def match_group(name: str, groups: list[ParamGroupConfig]) -> int:
    """The index of the first group whose pattern matches a parameter's name.

    Raises:
        UserError: if none does.
    """
    for index, group in enumerate(groups):
        if re.search(group.pattern, name):
            return index
    raise UserError(
        f"no pattern of optimizer.param_groups matches the parameter {name}; "
        "add a last group with pattern '.*'"
    )


def _groups_of(config: AsyncOptimizers.Config) -> list[ParamGroupConfig]:
    adamw = ParamGroupConfig(
        pattern=".*",
        optimizer_name="AdamW",
        optimizer_kwargs={
            "lr": config.adamw.lr,
            "betas": (config.adamw.beta1, config.adamw.beta2),
            "eps": config.adamw.eps,
            "weight_decay": config.adamw.weight_decay,
        },
    )
    if config.name == "adamw":
        return [adamw]
    if config.name == "sgd":
        sgd = {"lr": config.sgd.lr, "momentum": config.sgd.momentum, "weight_decay": config.sgd.weight_decay}
        return [ParamGroupConfig(pattern=".*", optimizer_name="SGD", optimizer_kwargs=sgd)]
    muon = {
        "lr": config.muon.lr,
        "weight_decay": config.muon.weight_decay,
        "momentum": config.muon.momentum,
        "nesterov": config.muon.nesterov,
        "adjust_lr": config.muon.adjust_lr,
        "ns_coefficients": config.muon.coefficients,
        "ns_steps": config.muon.ns_steps,
    }
    return [
        ParamGroupConfig(pattern=HIDDEN_MATRICES, optimizer_name="Muon", optimizer_kwargs=muon),
        adamw,
    ]
