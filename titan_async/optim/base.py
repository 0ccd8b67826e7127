"""The base class of this package's optimizers: checks of parameters, closures, and loading of state."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from titan_async.local_tensors import as_dtensor, local_part

__all__ = ["BaseOptimizer", "check_duplicates", "check_lr_and_weight_decay", "describe"]


class BaseOptimizer(Optimizer):
    """Base class of `Muon`, `Lion` and `ErrorFeedback`.

    All subclasses implement ``_step``; those with their own ``momentum_buffer`` also ``_check_options``,
    ``_check_param`` and ``_create_state_of``.
    """

    found_inf: Tensor | None = None
    """A float32 scalar on the parameters' device; with 1 the next steps change nothing. See
    `set_found_inf`."""

    _BUFFERS: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    """Keys of state tensors that have the shape and placements of their parameter."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; raises like the constructor, without changes."""
        check_duplicates(self, self.param_groups, param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_options(group)
            names: Sequence[str | None] = group.get("param_names") or [None] * len(group["params"])
            for param, name in zip(group["params"], names, strict=True):
                self._check_param(param, name, group)
        except (ValueError, NotImplementedError):
            self.param_groups.pop()
            raise
        self._create_state()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss, which `step` returns; called once.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Buffers keep their dtypes, while `torch.optim.Optimizer` casts them to the parameter's. Buffers that
        ``state_dict`` lacks are set to zero.

        Raises:
            ValueError: a buffer of another shape or placements than its parameter's, or groups that do not
                match. The optimizer is then unchanged.
        """
        own = dict(self.state)
        loaded: dict[str, Any] = {}

        def before(optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            loaded.update(given)
            for param, _, entries in self._saved(given):
                self._check_buffers(param, entries)
            return {**given, "state": {}, "param_groups": self._groups_to_load(given["param_groups"])}

        def after(optimizer: Optimizer) -> None:
            self.state.update(own)
            self._restore(loaded)

        # The last hook before torch's loading and the first one after it: other hooks may replace the state
        # dict, and read the result.
        with (
            self.register_load_state_dict_pre_hook(before),
            self.register_load_state_dict_post_hook(after, prepend=True),
        ):
            super().load_state_dict(state_dict)

    def _check_buffers(self, param: Tensor, entries: dict[str, Any]) -> None:
        for key in self._BUFFERS:
            if key in entries and not _is_sharded_like(entries[key], param):
                raise ValueError(
                    f"the {key} of shape {list(entries[key].shape)} does not fit {describe(param, None)}, or "
                    f"its placements differ: load state of the same parameters in the same order"
                )

    @torch.no_grad()
    def _restore(self, loaded: dict[str, Any]) -> None:
        """Copy the state of a state dict into that of this optimizer."""
        self._create_state()
        for param, group, entries in self._saved(loaded):
            if "momentum_buffer" in entries:  # also if the parameter is currently frozen
                self._create_state_of(param, group)
                momentum = local_part(self.state[param]["momentum_buffer"])
                momentum.copy_(local_part(entries["momentum_buffer"]))
            elif "momentum_buffer" in self.state.get(param, {}):
                local_part(self.state[param]["momentum_buffer"]).zero_()

    def _saved(self, loaded: dict[str, Any]) -> Iterator[tuple[Tensor, dict[str, Any], dict[str, Any]]]:
        """Each parameter with its group and its entries in a state dict; torch raises if groups differ."""
        for saved, group in zip(loaded["param_groups"], self.param_groups, strict=False):
            for index, param in zip(saved["params"], group["params"], strict=False):
                yield param, group, loaded["state"].get(index, {})

    @torch.no_grad()
    def _create_state(self) -> None:
        """Create missing state of all trainable parameters; checkpoints are loaded into existing state."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.requires_grad or param.grad is not None:
                    self._create_state_of(param, group)

    def _create_state_of(self, param: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _check_options(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _check_param(self, param: Tensor, name: str | None, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _groups_to_load(self, loaded: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return loaded

    def _step(self) -> None:
        raise NotImplementedError


def describe(tensor: Tensor, name: str | None) -> str:
    """A parameter for an error message: its name, if it has one, and its shape."""
    shape = list(tensor.shape)
    return f"parameter {name!r} of shape {shape}" if name is not None else f"a parameter of shape {shape}"


def check_duplicates(
    optimizer: Optimizer, groups: Sequence[dict[str, Any]], param_group: dict[str, Any]
) -> None:
    """Check that a group has no parameter twice, and none of ``groups``; its parameters become a list.

    Raises:
        ValueError: it has one.
    """
    if isinstance(param_group["params"], (Tensor, set)):  # a single parameter; torch rejects sets
        return
    if not isinstance(param_group["params"], list):
        param_group["params"] = list(param_group["params"])
    names = param_group.get("param_names") or [None] * len(param_group["params"])
    seen = {param for group in groups for param in group["params"]}
    for name, param in zip(names, param_group["params"], strict=False):
        if isinstance(param, tuple):
            name, param = param[:2]
        if isinstance(param, Tensor) and param in seen:
            raise ValueError(
                f"{type(optimizer).__name__} got {describe(param, name)} twice, which would update it twice "
                f"per step: list each parameter once, even if two modules share it"
            )
        if isinstance(param, Tensor):
            seen.add(param)


def check_lr_and_weight_decay(group: dict[str, Any]) -> None:
    """Check a group's learning rate and weight decay.

    Raises:
        ValueError: one is negative or not finite, or a learning rate has several elements.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must have one element, but has shape {list(lr.shape)}")
    for key in ("lr", "weight_decay"):
        if not (float(group[key]) >= 0 and math.isfinite(group[key])):
            raise ValueError(f"{key} must be a finite number, zero or more, not {group[key]!r}")


def _is_sharded_like(tensor: Tensor, param: Tensor) -> bool:
    """Whether both tensors have the same global shape, and the same part on this rank."""
    one, other = as_dtensor(tensor), as_dtensor(param)
    return (
        tensor.shape == param.shape
        and local_part(tensor.detach()).shape == local_part(param.detach()).shape
        and (one is None or other is None or one.placements == other.placements)
    )
