"""The optimizers of a run: Muon for hidden matrices, AdamW for the rest, each with error feedback."""

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.models.common.moe import MoE
from torchtitan.trainer import Trainer

from titan_async.errors import UserError
from titan_async.local_tensors import local_part
from titan_async.optim import ErrorFeedback, Lion, Muon, set_found_inf
from titan_async.optim.elementwise import should_skip
from titan_async.optim.feedback_history import history_key
from titan_async.training.callbacks import Callback
from titan_async.training.models.tying import stored_name
from titan_async.training.optimizer.config import (
    AdamWConfig,
    ErrorFeedbackConfig,
    LionConfig,
    MuonConfig,
    SGDConfig,
    SoapConfig,
    match_group,
    named_groups,
    soap_class,
)
from titan_async.training.optimizer.plain_tensor_optimizer import PlainTensorOptimizer
from titan_async.training.optimizer.saved_options import changed_options
from titan_async.training.optimizer.trial import try_out
from titan_async.training.pipeline.schedule import delays_gradients

__all__ = [
    "FACTORIES",
    "OF_THE_WHOLE_RUN",
    "AsyncOptimizers",
    "drop_token_counts",
    "feedback_if_delayed",
    "learning_rates",
    "skip_on_device",
]

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
"""Options of Muon that are set for all groups together, and their keys."""

_OF_GROUP = "#"
"""Separates the name of another package's optimizer from the index of its group."""


class AsyncOptimizers(OptimizersContainer, Callback):
    """torchtitan's container of optimizers, with Muon, Lion and error feedback.

    Error feedback is part of Muon, and wraps the others; its state has the same names in both, so that
    checkpoints do not depend on it.

    Raises:
        UserError: if `param_groups` name an unknown optimizer, leave a parameter without one, or give one a
            parameter or an option that it refuses.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        name: Literal["muon", "adamw", "lion", "sgd", "soap"] = "muon"
        """"muon": Muon for the matrices inside the layers, AdamW for everything else; "soap": SOAP, from the
        package pytorch-optimizer, in place of Muon; "adamw", "lion" or "sgd" for all parameters. Ignored if
        `param_groups` is given."""

        muon: MuonConfig = field(default_factory=MuonConfig)
        adamw: AdamWConfig = field(default_factory=AdamWConfig)
        lion: LionConfig = field(default_factory=LionConfig)
        sgd: SGDConfig = field(default_factory=SGDConfig)
        soap: SoapConfig = field(default_factory=SoapConfig)
        error_feedback: ErrorFeedbackConfig = field(default_factory=ErrorFeedbackConfig)

        classes: Annotated[dict[str, type[torch.optim.Optimizer]], tyro.conf.Suppress] = field(
            default_factory=dict
        )
        """Optimizers of other packages, by their names in `param_groups`; see `using`."""

        def using(
            self, optimizer: type[torch.optim.Optimizer], *, pattern: str = ".*", **options: Any
        ) -> "AsyncOptimizers.Config":
            """A copy in which an optimizer of any package updates the parameters whose names match.

            Other parameters keep theirs. Of two calls the later one takes precedence. Checkpoints, error
            feedback and sharded parameters work; an optimizer that does not support them is refused before
            training starts.

            Args:
                optimizer: any subclass of `torch.optim.Optimizer` whose step needs gradients alone.
                pattern: a regular expression, searched in the names of parameters.
                options: of its constructor: numbers, strings, booleans, and lists of them. They are
                    `optimizer.param_groups.0.optimizer_kwargs` in recipe files and flags.

            Raises:
                UserError: it is not such a class, or an option has another type.
            """
            if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
                raise UserError(
                    f"optimizer.using takes a subclass of torch.optim.Optimizer, not {optimizer!r}"
                )
            for key, value in options.items():
                if not _is_plain(value):
                    raise UserError(
                        f"the option {key} of {optimizer.__name__} is a {type(value).__name__}, but a recipe "
                        "holds numbers, strings, booleans and lists of them: set it in a subclass"
                    )
            name, classes = optimizer.__name__, self.classes
            if FACTORIES.get(name) is not optimizer:
                if name in FACTORIES or classes.get(name, optimizer) is not optimizer:
                    name = f"{optimizer.__module__}.{name}"
                classes = {**classes, name: optimizer}
            first = ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs=options)
            # Groups after a pattern that matches everything are empty.
            others = [] if pattern == ".*" else [g for g in self.resolved_groups() if g.pattern != pattern]
            return dataclasses.replace(self, param_groups=[first, *others], classes=classes)

        def class_of(self, name: str) -> type[torch.optim.Optimizer] | None:
            """The optimizer of another package with this name in groups, or None.

            Raises:
                UserError: its package is not installed.
            """
            if name == "SOAP" and name not in self.classes:
                return soap_class()
            return self.classes.get(name)

        def resolved_groups(self) -> list[ParamGroupConfig]:
            """The given parameter groups, or those of `name`."""
            return self.param_groups or named_groups(self)

        def __post_init__(self) -> None:
            for group in self.param_groups:
                try:
                    re.compile(group.pattern)
                except re.error as error:
                    raise ValueError(
                        f"optimizer.param_groups: {group.pattern!r} is not a regular expression: {error}"
                    ) from None

    changed: Sequence[str] = ()
    """The options that differ from those of the checkpoint loaded last; see `changed_options`."""

    found_inf: torch.Tensor | None = None
    """The argument of `set_found_inf`."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        self._config = config
        self._moes = [m for part in model_parts for m in part.modules() if isinstance(m, MoE)]
        self._group_state: dict[int, frozenset[str]] = {}
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
                else ErrorFeedback(
                    optimizer,
                    strength=strength,
                    level=feedback.level,
                    dtype=dtype,
                    compile=feedback.compile and type(optimizer) is torch.optim.AdamW,
                )
                for optimizer in self.optimizers
            ]
        self.register_step_pre_hook(self._drop_token_counts)

    def set_found_inf(self, found_inf: torch.Tensor | None) -> bool:
        """Make the next steps of all optimizers conditional on the device, or of none.

        Args:
            found_inf: a float32 scalar on the device: 1 for a no-op step, expert biases and error feedback
                included; None for unconditional steps.

        Returns:
            Whether all optimizers of this rank support it; see `titan_async.optim.set_found_inf`.
        """
        supported = all(set_found_inf(optimizer, found_inf) for optimizer in self.optimizers)
        if not supported:
            for optimizer in self.optimizers:
                set_found_inf(optimizer, None)
        self.found_inf = found_inf if supported else None
        return supported

    def before_batch(self, trainer: Trainer) -> None:
        """Pause error feedback while updates are not delayed."""
        if delays_gradients(trainer.config.parallelism):
            self.pause_feedback(not trainer.pp_schedule.delay_updates)

    def pause_feedback(self, paused: bool) -> None:
        """Pause error feedback, or resume it with an empty history."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, Muon | ErrorFeedback):
                optimizer.feedback_paused = paused

    def _drop_token_counts(self, *_: Any) -> None:
        """Before a skipped step, reset the token counts of its batch.

        torchtitan's hook runs later, finds equal loads of all experts, and keeps the biases.
        """
        skip = should_skip(self.found_inf)
        if skip is not None:
            drop_token_counts(self._moes, skip)

    def _resolve_optimizer_factory(  # type: ignore[override]
        self, name: str
    ) -> Callable[..., torch.optim.Optimizer]:
        if name in FACTORIES:
            return FACTORIES[name]
        name, _, index = name.partition(_OF_GROUP)
        cls = self._config.class_of(name)
        if cls is not None:
            return functools.partial(self._plain_tensor_optimizer, cls, int(index))
        return OptimizersContainer._resolve_optimizer_factory(name)

    def _plain_tensor_optimizer(
        self, cls: type[torch.optim.Optimizer], index: int, groups: list[dict[str, Any]]
    ) -> PlainTensorOptimizer:
        # As arguments, since some classes do not read all options from their groups.
        options = self._groups[index].optimizer_kwargs
        (group,) = ({key: group[key] for key in ("params", "param_names")} for group in groups)
        traits = try_out(cls, options, [param.dim() for param in group["params"]])
        self._group_state[index] = traits.group_state
        return PlainTensorOptimizer(cls, [group], traits=traits, **options)

    def _build_param_groups(  # type: ignore[override]
        self, model: nn.Module, param_group_configs: list[ParamGroupConfig], impl_kwargs: dict[str, Any]
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
        # Unlike torchtitan's, a pattern may match nothing on this stage, if it matches on another.
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        patterns: dict[str, list[str]] = defaultdict(list)
        members: list[list[tuple[str, nn.Parameter]]] = [[] for _ in self._groups]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                fqn = stored_name(model, name)
                members[match_group(fqn, self._groups)].append((fqn, parameter))
        for index, (config, matched) in enumerate(zip(self._groups, members, strict=True)):
            name = config.optimizer_name
            if self._config.class_of(name) is not None:
                # Its options are constructor arguments, so each group has an optimizer.
                name = f"{name}{_OF_GROUP}{index}"
            if matched:
                groups[name].append(
                    {
                        "params": [parameter for _, parameter in matched],
                        "param_names": [name for name, _ in matched],
                        **_implementation(config.optimizer_name, impl_kwargs),
                        **config.optimizer_kwargs,
                    }
                )
                patterns[name].append(config.pattern)
        return groups, patterns

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the parameters. Options, learning rates included, remain those of this run."""
        own = {key: value for key, value in super().state_dict().items() if self._is_option(key)}
        self.changed = changed_options(state_dict, own, self._name_of)
        super().load_state_dict({**state_dict, **own})

    def _is_option(self, key: str) -> bool:
        """Whether a key of the state is an option, and not state that an optimizer keeps in its group."""
        kind, _, rest = key.partition(".")
        parameter, _, option = rest.rpartition(".")
        if kind != "param_groups":
            return False
        return option not in self._group_state.get(match_group(parameter, self._groups), ())

    def _name_of(self, parameter: str, option: str) -> str:
        """The name of an option of a parameter in the recipe."""
        index = match_group(parameter, self._groups)
        optimizer = self._groups[index].optimizer_name
        if optimizer == "Muon" and option in OF_THE_WHOLE_RUN:
            return OF_THE_WHOLE_RUN[option]
        option = option.removeprefix("initial_")  # the schedule's name of the initial rate
        if self._is_named:
            return f"optimizer.{optimizer.lower()}.{option}"
        return f"optimizer.param_groups.{index}.optimizer_kwargs.{option}"

    @property
    def step_was_skipped(self) -> bool:
        """Whether an optimizer found a non-finite gradient, and skipped its step.

        False if the decision is on the device (`set_found_inf`). True only on the ranks that share these
        parameters, and not on other stages of a pipeline.
        """
        return any(getattr(optimizer, "step_was_skipped", False) for optimizer in self.optimizers)

    def feedback_histories(self) -> list[torch.Tensor]:
        """The history of error feedback for each parameter of this rank; empty if it is off."""
        return [
            entries[self._feedback_key]
            for optimizer in self.optimizers
            for entries in optimizer.state.values()
            if self._feedback_key in entries
        ]

    def learning_rates(self) -> dict[str, float]:
        """The current learning rates, as "lr/Muon", or "lr/AdamW/0" where an optimizer has several groups."""
        rates: dict[str, dict[int, float]] = defaultdict(dict)
        for optimizer in self._unwrapped():
            for group in optimizer.param_groups:
                index = match_group(group["param_names"][0], self._groups)
                rates[f"lr/{type(optimizer).__name__}"][index] = float(group["lr"])
        return {
            f"{name}/{number}" if len(of_groups) > 1 else name: rate
            for name, of_groups in rates.items()
            for number, (_, rate) in enumerate(sorted(of_groups.items()))
        }

    def notes(self) -> list[str]:
        """Warnings about optimizers for which parameters are gathered at each step, which is costly."""
        gathering = {
            type(each.optimizer).__name__
            for optimizer in self.optimizers
            for each in (optimizer, getattr(optimizer, "optimizer", None))
            if isinstance(each, PlainTensorOptimizer) and each.gathers
        }
        return [
            f"{name} updates whole parameters: they are gathered at each step, and every rank of a stage "
            "holds all of its state"
            for name in sorted(gathering)
        ]

    def _unwrapped(self) -> Iterator[torch.optim.Optimizer]:
        for optimizer in self.optimizers:
            while isinstance(optimizer, ErrorFeedback | PlainTensorOptimizer):
                optimizer = optimizer.optimizer
            yield optimizer


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _implementation(name: str, impl_kwargs: dict[str, Any]) -> dict[str, Any]:
    """torchtitan's choice of an optimizer's implementation, if there are several."""
    if name in ("Muon", "Lion") or not (name in FACTORIES or name == "DistMuon"):
        return {}
    if name == "SGD" and impl_kwargs.get("fused"):
        # DTensor has no sharding rule for the fused SGD.
        return {**impl_kwargs, "fused": False, "foreach": True}
    return impl_kwargs


def feedback_if_delayed(config: OptimizersContainer.Config, delayed: bool) -> OptimizersContainer.Config:
    """A run's optimizers: without error feedback, if there is no delay to correct."""
    if delayed or not isinstance(config, AsyncOptimizers.Config):
        return config
    feedback = dataclasses.replace(config.error_feedback, enable=False)
    return dataclasses.replace(config, error_feedback=feedback)


def learning_rates(trainer: Trainer) -> dict[str, float]:
    """The current learning rates, by the names of metrics."""
    if isinstance(trainer.optimizers, AsyncOptimizers):
        return trainer.optimizers.learning_rates()
    return trainer.lr_schedulers.get_metrics()  # type: ignore[no-any-return]


def skip_on_device(optimizers: OptimizersContainer, skip: torch.Tensor) -> bool:
    """Make the next step a no-op where `skip`, a bool scalar on the device, is true.

    Returns:
        Whether the optimizers support that; if not, the host has to decide.
    """
    return isinstance(optimizers, AsyncOptimizers) and optimizers.set_found_inf(skip.float())


def drop_token_counts(modules: Iterable[nn.Module], skip: torch.Tensor | None = None) -> None:
    """Reset the token counts of routers, as if there had been no such batch.

    An update balances the load by these counts and resets them; after a skipped update they would be added to
    those of the next batch.

    Args:
        modules: those that are an `MoE` have counts.
        skip: a bool scalar on the device; where it is false, the counts are kept. None resets them always.
    """
    for module in modules:
        if isinstance(module, MoE):
            counts = local_part(module.tokens_per_expert_E)
            if skip is None:
                counts.zero_()
            else:
                counts.masked_fill_(skip, 0)
