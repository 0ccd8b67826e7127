"""The sections `[optimizer]` and `[lr_scheduler]`, and which parameters go to which optimizer."""

import dataclasses
import importlib
import math
import re
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import Configurable

from titan_async.errors import UserError

__all__ = [
    "HIDDEN_MATRICES",
    "AdamWConfig",
    "AsyncLRSchedulers",
    "ErrorFeedbackConfig",
    "LionConfig",
    "MuonConfig",
    "SGDConfig",
    "SoapConfig",
    "match_group",
    "named_groups",
    "share_of",
    "soap_class",
]

HIDDEN_MATRICES = r"^layers\.(?!.*(norm|router|bias)).*$"
"""Names of the matrices inside the decoder's layers: not embeddings, output head, norms, routers, biases."""

StateDtype = Literal["auto", "bfloat16", "float32", "float64"]
"""Dtype of an optimizer's buffer; "auto" is the parameter's, at least float32."""


@dataclass(kw_only=True, slots=True)
class MuonConfig(Configurable.Config):
    lr: float = 0.02
    """Peak learning rate of Muon."""

    weight_decay: float = 0.1
    """Decoupled weight decay."""

    cautious_weight_decay: bool = False
    """Decay only entries that the update does not move away from zero (arXiv 2510.12402)."""

    momentum: float = 0.95
    """Momentum coefficient. The higher it is, the less a delay of one update costs."""

    nesterov: bool = True
    """Look ahead along the momentum."""

    adjust_lr: Literal["original", "match_rms_adamw", "spectral"] = "match_rms_adamw"
    """How the learning rate scales with a matrix's shape; "match_rms_adamw" gives updates the size of
    AdamW's, so that learning rate and decay carry over from it."""

    ns_coefficients: Literal["standard", "polar_express"] = "standard"
    """Coefficients of the Newton-Schulz iteration: the original quintic or Polar Express."""

    ns_steps: int = 5
    """Newton-Schulz iterations."""

    ns_form: Literal["auto", "standard", "gram"] = "auto"
    """How the iterations are computed; "auto" chooses the cheaper form for a matrix's shape."""

    compute_dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"
    """Dtype of the iterations, and of the communication for them."""

    momentum_dtype: StateDtype = "auto"
    """Dtype of the momentum."""

    bucket_mb: float = 32.0
    """Bucket size in megabytes: sharded matrices that are communicated together. Also with `param_groups`."""

    def __post_init__(self) -> None:
        if not self.bucket_mb > 0:
            raise ValueError(f"optimizer.muon.bucket_mb is {self.bucket_mb}: set it to a number above zero")


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
class LionConfig(Configurable.Config):
    lr: float = 3e-4
    """Peak learning rate of Lion; about a tenth of AdamW's."""

    beta1: float = 0.9
    """Share of the momentum in the update."""

    beta2: float = 0.99
    """Decay of the momentum."""

    weight_decay: float = 1.0
    """Decoupled weight decay; about ten times AdamW's."""


@dataclass(kw_only=True, slots=True)
class SGDConfig(Configurable.Config):
    lr: float = 0.1
    """Peak learning rate of SGD."""

    momentum: float = 0.9
    """Momentum coefficient."""

    weight_decay: float = 0.0
    """Weight decay, added to the gradient."""


@dataclass(kw_only=True, slots=True)
class SoapConfig(Configurable.Config):
    lr: float = 3e-3
    """Peak learning rate of SOAP (arXiv 2409.11321), on AdamW's scale."""

    beta1: float = 0.95
    """Decay of the first moment."""

    beta2: float = 0.95
    """Decay of the second moment and of the preconditioners."""

    eps: float = 1e-8
    """Added to the root of the second moment."""

    weight_decay: float = 0.1
    """Decoupled weight decay."""

    precondition_frequency: int = 10
    """Updates between two computations of the eigenbases."""

    max_precondition_dim: int = 10_000
    """Dimensions of a matrix that are longer have no preconditioner."""


@dataclass(kw_only=True, slots=True)
class ErrorFeedbackConfig(Configurable.Config):
    enable: bool = True
    """Correct for the delay of one update (arXiv 2606.30634). Has no effect without a delay: under a
    synchronous schedule, or on one stage."""

    strength: float = 1.0
    """Strength s of the correction; 1 is the paper's, and for Muon none from 0.25 to 1.5 was better
    (docs/study_300.md, question 2)."""

    level: Literal["update", "gradient"] = "update"
    """Correct the update (the paper's way) or the gradient, which for Muon was no better at any strength."""

    dtype: StateDtype = "auto"
    """Dtype of its buffer, one for each parameter; "bfloat16" halves it, and rounds the correction to
    3 digits."""

    compile: bool = False
    """Compile AdamW's update and its correction, at level "update", as one pass (docs/muon.md)."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.strength) and self.strength >= 0):
            raise ValueError(
                f"optimizer.error_feedback.strength is {self.strength}; "
                "it must be a finite number of at least 0"
            )
        if self.compile and self.level != "update":
            raise ValueError(
                'optimizer.error_feedback.compile is for level = "update": set that, or leave out compile'
            )


class Sections(Protocol):
    """The sections that `named_groups` reads."""

    name: Literal["muon", "adamw", "lion", "sgd", "soap"]
    muon: MuonConfig
    adamw: AdamWConfig
    lion: LionConfig
    sgd: SGDConfig
    soap: SoapConfig


def named_groups(config: Sections) -> list[ParamGroupConfig]:
    """The parameter groups of `optimizer.name`."""
    names = {"muon": "Muon", "adamw": "AdamW", "lion": "Lion", "sgd": "SGD", "soap": "SOAP"}

    def group(name: str, pattern: str = ".*") -> ParamGroupConfig:
        options = _options(getattr(config, name))
        return ParamGroupConfig(pattern=pattern, optimizer_name=names[name], optimizer_kwargs=options)

    if config.name in ("muon", "soap"):
        return [group(config.name, HIDDEN_MATRICES), group("adamw")]
    return [group(config.name)]


def _options(section: Configurable.Config) -> dict[str, Any]:
    """The settings of a section as arguments of its optimizer."""
    options = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    options.pop("bucket_mb", None)  # applies to all groups together
    if "beta1" in options:
        options["betas"] = options.pop("beta1"), options.pop("beta2")
    return options


def soap_class() -> type[torch.optim.Optimizer]:
    """SOAP of the package pytorch-optimizer, an optional dependency.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module("pytorch_optimizer").SOAP  # type: ignore[no-any-return]
    except ImportError as error:
        raise UserError(
            "the optimizer SOAP needs the package pytorch-optimizer, which cannot be imported "
            f'({error}): pip install "pytorch-optimizer>=4.1,<5", or choose another optimizer.name'
        ) from error


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


def share_of(steps: int, ratio: float) -> int:
    """A share of the steps, rounded down."""
    return int(round(steps * ratio, 6))  # 0.29 * 100 is 28.999999999999996


class AsyncLRSchedulers(LRSchedulersContainer):
    """torchtitan's learning-rate schedulers, with a warm-up that follows `training.steps`."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        warmup_steps: int | None = None  # type: ignore[assignment]
        """Steps of the linear warm-up. "none" for `warmup_ratio` of all steps; a number overrides it."""

        warmup_ratio: float = 0.1
        """Share of the steps (`training.steps`, or `total_steps` if set) that are warm-up, rounded down. Has
        no effect if `warmup_steps` is a number."""

        def resolved_warmup_steps(self, training_steps: int) -> int:
            """The warm-up steps in a run of `training_steps`."""
            if self.warmup_steps is not None:
                return self.warmup_steps
            steps = training_steps if self.total_steps is None else self.total_steps
            return share_of(steps, self.warmup_ratio)

        def build(  # type: ignore[override]
            self, *, optimizers: OptimizersContainer, training_steps: int
        ) -> LRSchedulersContainer:
            """See `LRSchedulersContainer.Config`."""
            resolved = dataclasses.replace(self, warmup_steps=self.resolved_warmup_steps(training_steps))
            # Not super(): `slots=True` replaces the class that super() refers to.
            return LRSchedulersContainer.Config.build(  # type: ignore[no-any-return]
                resolved, optimizers=optimizers, training_steps=training_steps
            )
