"""Runs an optimizer of another package, or of the user, on parameters that may be DTensors.

The optimizer itself gets plain tensors only. An elementwise one gets this rank's shards. One that needs full
parameters gets them gathered, with their gradients, at each step: every rank then computes the same full
update, keeps its shard of it, and holds the full state.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from titan_async.local_tensors import local_part
from titan_async.optim.shard_regions import shard_regions

__all__ = ["PlainTensorOptimizer", "Traits"]


@dataclass(frozen=True)
class Traits:
    """Properties of an optimizer, which `optimizer.trial` determines."""

    needs_whole: bool = False
    """Whether the update of an element depends on others of its parameter."""
    couples: bool = False
    """Whether the update of a parameter depends on other parameters."""
    idle_steps: int = 0
    """Steps at the beginning that change no parameter, such as SOAP's first."""
    sharded_state: frozenset[str] = frozenset()
    """State that has its parameter's shape."""
    group_state: frozenset[str] = frozenset()
    """Keys of a parameter group that are state: they change from step to step."""


class PlainTensorOptimizer(Optimizer):
    """Wraps an optimizer, which gets plain tensors.

    Groups, options and state are those of the wrapped optimizer. State is flat: a list ``GG`` of tensors is
    ``GG.0``, ``GG.1``. Sharded state is returned as DTensors, so that checkpoints do not depend on the
    layout.

    Args:
        cls: the class of the wrapped optimizer.
        groups: its parameter groups.
        traits: its properties.
        options: further arguments of its constructor.
    """

    optimizer: Optimizer

    def __init__(
        self, cls: type[Optimizer], groups: list[dict[str, Any]], *, traits: Traits, **options: Any
    ) -> None:
        params = [list(group["params"]) for group in groups]
        stand_ins = {param: _stand_in(param, traits.needs_whole) for group in params for param in group}
        inner = cls(
            # Some classes read options from their groups only, others from their arguments only.
            [{**options, **group, "params": [stand_ins[p] for p in group["params"]]} for group in groups],
            **options,
        )
        # As unpickling creates an optimizer with existing groups and state.
        super().__setstate__(
            {
                "optimizer": inner,
                "traits": traits,
                "_stand_ins": stand_ins,
                "_params": params,
                "_steps": 0,
            }
        )
        for group, own in zip(inner.param_groups, params, strict=True):
            group["params"] = own
        self._release()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    @property
    def state(self) -> Mapping[Tensor, Any]:  # type: ignore[override]
        """The state of each parameter, flat; the tensors are live."""
        return _FlatState(self)

    @property
    def skipped_params(self) -> Collection[Tensor]:
        """The parameters that the last step did not change: all, if it was an idle one."""
        return self._stand_ins.keys() if self._steps <= self.traits.idle_steps else ()

    @property
    def gathers(self) -> bool:
        """Whether it gathers shards of parameters."""
        return self.traits.needs_whole and any(isinstance(param, DTensor) for param in self._stand_ins)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters; a collective over the ranks that share them, if it needs full ones."""
        full = self.traits.needs_whole
        for param, stand_in in self._stand_ins.items():
            stand_in.grad = None
            stand_in.data = _plain(param.detach(), full)
            if param.grad is not None:
                stand_in.grad = _plain(_placed_like(param, param.grad), full)
        with self._given_plain_tensors():
            self.optimizer.step()
        self._steps += 1
        for param, stand_in in self._stand_ins.items():
            local, new = local_part(param.detach()), stand_in.detach()
            if full and isinstance(param, DTensor):
                new = new[_own_region(param)]
            if new.data_ptr() != local.data_ptr():
                local.copy_(new)
        self._release()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self._stand_ins:
            if set_to_none or param.grad is None:
                param.grad = None
            else:
                param.grad.detach_().zero_()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` into existing state.

        Raises:
            KeyError: an entry is missing.
        """
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})
        indices = (index for saved in state_dict["param_groups"] for index in saved["params"])
        for index, stand_in in zip(indices, self._stand_ins.values(), strict=True):
            if index in state_dict["state"] and stand_in in self.optimizer.state:
                live = self.optimizer.state[stand_in]
                for key in list(live):
                    live[key] = _restored(live[key], state_dict["state"][index], str(key))
        self._steps = self.traits.idle_steps

    @contextlib.contextmanager
    def _given_plain_tensors(self) -> Iterator[None]:
        """Let the groups, which both optimizers share, hold plain tensors within the context."""
        try:
            for group, own in zip(self.param_groups, self._params, strict=True):
                group["params"] = [self._stand_ins[param] for param in own]
            yield
        finally:
            for group, own in zip(self.param_groups, self._params, strict=True):
                group["params"] = own

    def _release(self) -> None:
        """Free the tensors of a step."""
        for stand_in in self._stand_ins.values():
            stand_in.grad = None
            stand_in.data = stand_in.data.new_empty(0)

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: self.__dict__[name] for name in ("optimizer", "traits", "_stand_ins", "_params", "_steps")
        }


class _FlatState(Mapping[Tensor, Any]):
    def __init__(self, owner: PlainTensorOptimizer) -> None:
        self._owner = owner

    def __getitem__(self, param: Tensor) -> dict[str, Any]:
        owner = self._owner
        stand_in = owner._stand_ins[param]
        if stand_in not in owner.optimizer.state:  # which would create an entry
            raise KeyError(param)
        flat = dict(_flattened(owner.optimizer.state[stand_in]))
        if not isinstance(param, DTensor) or owner.traits.needs_whole:
            return flat
        return {
            name: _sharded_like(param, value) if name in owner.traits.sharded_state else value
            for name, value in flat.items()
        }

    def __iter__(self) -> Iterator[Tensor]:
        owner = self._owner
        return (param for param, other in owner._stand_ins.items() if other in owner.optimizer.state)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _stand_in(param: Tensor, full: bool) -> nn.Parameter:
    local = local_part(param.detach())
    if full and isinstance(param, DTensor):
        local = local.new_zeros(param.shape)  # filled in the first step
    return nn.Parameter(local, requires_grad=param.requires_grad)


def _plain(tensor: Tensor, full: bool) -> Tensor:
    return tensor.full_tensor() if full and isinstance(tensor, DTensor) else local_part(tensor)


def _placed_like(param: Tensor, grad: Tensor) -> Tensor:
    if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
        return grad.redistribute(param.device_mesh, param.placements)
    return grad


def _own_region(param: DTensor) -> tuple[slice, ...]:
    """The region of a parameter that is on this rank."""
    mesh = param.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    index = 0
    for size, place in zip(mesh.shape, coordinate, strict=True):
        index = index * size + place
    return tuple(slice(*edges) for edges in shard_regions(param.shape, param.placements, mesh.shape)[index])


def _sharded_like(param: DTensor, local: Tensor) -> DTensor:
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def _flattened(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        yield name, value
        return
    for key, item in items:
        yield from _flattened(item, f"{name}.{key}" if name else key)


def _restored(live: Any, saved: Mapping[str, Any], name: str) -> Any:
    """A replacement for `live` of the same structure, with the saved values; its tensors are kept."""
    if isinstance(live, Tensor):
        return live.copy_(local_part(saved[name]))
    if isinstance(live, dict):
        return {key: _restored(item, saved, f"{name}.{key}") for key, item in live.items()}
    if isinstance(live, list | tuple):
        return type(live)(_restored(item, saved, f"{name}.{index}") for index, item in enumerate(live))
    return saved[name]
