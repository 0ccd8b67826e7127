"""Determines the properties of another package's optimizer by trial runs on a few small tensors.

Whether it is elementwise, so that it can run on shards; whether it can be resumed exactly; what state it
keeps. So no optimizer needs to be listed.
"""

import functools
import json
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torchtitan.components.optimizer.utils import (
    get_flat_optim_state_dict,
    init_optim_state,
    load_flat_optim_state_dict,
)

from titan_async.errors import UserError
from titan_async.training.optimizer.plain_tensor_optimizer import PlainTensorOptimizer, Traits

__all__ = ["state_elements", "try_out"]

_SHAPES = {1: (130,), 2: (130, 136), 3: (2, 130, 136)}
"""By number of dimensions. Above 128, below which some optimizers use another algorithm."""

_SIZES = (1.0, 0.3, 3.0, 0.5, 2.0)
_STEPS = len(_SIZES)
_SAVED_AFTER = 2
_TOLERANCE = 1e-5
"""Relative; sums over other numbers of elements are rounded differently."""

_PLAIN = (Tensor, int, float, str, type(None))


def try_out(optimizer: type[Optimizer], options: dict[str, Any], dimensions: Sequence[int]) -> Traits:
    """The traits of an optimizer with these options, for parameters with these numbers of dimensions.

    Raises:
        UserError: it cannot train here; the message continues a sentence with the reason.
    """
    return _try_out(optimizer, json.dumps(options), tuple(sorted(set(dimensions))))


@functools.cache
def _try_out(optimizer: type[Optimizer], options: str, dimensions: tuple[int, ...]) -> Traits:
    # JSON turns tuples into lists, as in recipe files.
    arguments = json.loads(options)
    weights = [_numbers(_SHAPES.get(n, (2,) * n), n) for n in dimensions]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trial = _Trial(optimizer, arguments, weights)
        before = [dict(group) for group in trial.optimizer.param_groups]
        _check_rate(trial)
        moved = [trial.step(number) for number in range(_STEPS)]
        _check_state(trial)
        _check_resuming(optimizer, arguments, weights, trial)
        alone = [_Trial(optimizer, arguments, [weight]).train()[0] for weight in weights]
        return Traits(
            needs_whole=_has_other_state(trial)
            or not all(
                _is_close(torch.cat(_trained_halves(optimizer, arguments, weight, dim), dim), whole)
                for weight, whole in zip(weights, alone, strict=True)
                for dim in range(weight.dim())
            ),
            couples=not all(map(_is_close, trial.displacements(weights), alone)),
            idle_steps=moved.index(True) if True in moved else 0,
            sharded_state=frozenset(_state_like_parameters(trial)),
            group_state=frozenset(_changing_keys(before, trial)),
        )


class _Trial:
    """A few small parameters, and an optimizer that trains them with random gradients."""

    def __init__(
        self,
        optimizer: type[Optimizer],
        options: dict[str, Any],
        weights: Sequence[Tensor],
        gradients: Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        self.params = [nn.Parameter(weight.clone()) for weight in weights]
        self._gradients = gradients or [_gradients(weight) for weight in weights]
        group = {"params": self.params, "param_names": [str(n) for n in range(len(self.params))]}
        try:
            self.optimizer = PlainTensorOptimizer(optimizer, [group], traits=Traits(), **options)
        except Exception as error:  # the class's own code may raise anything
            raise UserError(
                "it cannot be created with only parameters and these options "
                f"({type(error).__name__}: {_line(error)})"
            ) from error

    def step(self, number: int) -> bool:
        """Run a step. Returns whether it changed a parameter."""
        before = [param.detach().clone() for param in self.params]
        for param, gradients in zip(self.params, self._gradients, strict=True):
            param.grad = gradients[number].clone()
        torch.manual_seed(number)
        try:
            self.optimizer.step()
        except Exception as error:  # the class's own code may raise anything
            raise UserError(
                f"its step() fails on plain gradients ({type(error).__name__}: {_line(error)}): choose an "
                "optimizer that needs no closure, only gradients"
            ) from error
        self.optimizer.zero_grad()
        return not all(torch.equal(old, new) for old, new in zip(before, self.params, strict=True))

    def train(self) -> list[Tensor]:
        before = [param.detach().clone() for param in self.params]
        for number in range(_STEPS):
            self.step(number)
        return self.displacements(before)

    def displacements(self, before: Sequence[Tensor]) -> list[Tensor]:
        return [param.detach() - old for param, old in zip(self.params, before, strict=True)]


def _check_rate(trial: _Trial) -> None:
    if not all("lr" in group for group in trial.optimizer.param_groups):
        raise UserError('it has no option "lr", which the schedule of the learning rate sets')


def _check_state(trial: _Trial) -> None:
    for entries in trial.optimizer.state.values():
        for name, value in entries.items():
            if not isinstance(value, _PLAIN):
                raise UserError(
                    f'its state "{name}" is a {type(value).__name__}, which no checkpoint can hold: choose '
                    "an optimizer that keeps tensors and numbers"
                )


def _check_resuming(
    optimizer: type[Optimizer], options: dict[str, Any], weights: Sequence[Tensor], unbroken: _Trial
) -> None:
    """Refuse an optimizer that does not resume bit for bit."""
    stopped, resumed = _Trial(optimizer, options, weights), _Trial(optimizer, options, weights)
    for number in range(_SAVED_AFTER):
        stopped.step(number)
    init_optim_state(resumed.optimizer)
    if any(bool(moved.any()) for moved in resumed.displacements(weights)):
        raise UserError(
            "it changes parameters in a step without gradient and learning rate, which initializes its state "
            "before a checkpoint is loaded: choose another optimizer"
        )
    with torch.no_grad():
        for param, saved in zip(resumed.params, stopped.params, strict=True):
            param.copy_(saved)
    why = ""
    try:
        load_flat_optim_state_dict(resumed.optimizer, get_flat_optim_state_dict(stopped.optimizer))
    except Exception as error:  # its state has another structure than at the first step
        why = f" ({type(error).__name__}: {_line(error)})"
    for number in range(_SAVED_AFTER, _STEPS):
        resumed.step(number)
    if why or not all(map(torch.equal, resumed.params, unbroken.params)):
        raise UserError(
            f"it cannot be resumed from a checkpoint exactly{why}: its state and its parameter groups do not "
            "hold all that its next step depends on; choose another optimizer"
        )


def _trained_halves(
    optimizer: type[Optimizer], options: dict[str, Any], weight: Tensor, dim: int
) -> list[Tensor]:
    """The displacements of the two halves of a parameter, each trained by its own optimizer."""
    halves = zip(weight.chunk(2, dim), *(each.chunk(2, dim) for each in _gradients(weight)), strict=True)
    return [_Trial(optimizer, options, [half], [gradients]).train()[0] for half, *gradients in halves]


def _changing_keys(before: Sequence[dict[str, Any]], trial: _Trial) -> set[str]:
    return {
        key
        for old, new in zip(before, trial.optimizer.param_groups, strict=True)
        for key, value in new.items()
        if key != "params" and (key not in old or not _is_same(old[key], value))
    }


def _state_like_parameters(trial: _Trial) -> set[str]:
    return {
        name
        for param, entries in trial.optimizer.state.items()
        for name, value in entries.items()
        if isinstance(value, Tensor) and value.shape == param.shape
    }


def _has_other_state(trial: _Trial) -> bool:
    """Whether some state is neither a scalar nor of its parameter's shape."""
    return any(
        isinstance(value, Tensor) and value.numel() > 1 and value.shape != param.shape
        for param, entries in trial.optimizer.state.items()
        for value in entries.values()
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _numbers(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _gradients(weight: Tensor) -> list[Tensor]:
    """The gradients of all steps: a constant direction, noise, and a scale that changes from step to step.

    This reveals optimizers that use the norm of all gradients, to clip them or to choose a learning rate.
    """
    direction = weight + _numbers(weight.shape, 100 + weight.dim())
    return [
        size ** weight.dim() * (direction + _numbers(weight.shape, 1000 * weight.dim() + number))
        for number, size in enumerate(_SIZES)
    ]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _is_close(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) <= _TOLERANCE * float(other.abs().max())


def state_elements(
    optimizer: type[Optimizer], options: dict[str, Any], shape: Sequence[int]
) -> dict[str, int] | None:
    """The number of elements of an optimizer's state for a parameter of this shape, by name; on the meta
    device.

    None if it is unknown, because a step needs values.
    """
    return _state_elements(optimizer, json.dumps(options), tuple(shape))


@functools.cache
def _state_elements(
    optimizer: type[Optimizer], options: str, shape: tuple[int, ...]
) -> dict[str, int] | None:
    param = nn.Parameter(torch.empty(shape, device="meta"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            group: dict[str, Any] = {"params": [param]}
            built = PlainTensorOptimizer(optimizer, [group], traits=Traits(), **json.loads(options))
            param.grad = torch.empty(shape, device="meta")
            built.step()
    except Exception:  # the class's own code may raise anything
        return None
    return {
        name: value.numel() for name, value in built.state.get(param, {}).items() if isinstance(value, Tensor)
    }
