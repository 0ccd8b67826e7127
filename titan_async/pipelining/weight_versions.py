"""Two versions of a plain module's weights, so that a backward uses the weights of its forward.

Autograd saves the parameters themselves, so a parameter that a pending backward needs must not be written to.
Here the optimizer's parameters (the master weights) are never part of a graph. Forward and backward use
shadow parameters, two for each master, and storages rotate: a batch reads the storage of the masters; before
the optimizer may write, the masters move to the storage of the version that no microbatch needs any more.
That is two copies of the weights, and one copy operation per batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from titan_async.local_tensors import canonical_name
from titan_async.pipelining._torch_internals import ParameterWatch, assignment, has_hooks

__all__ = ["WeightVersions"]

_HOME = 0  # the version whose storage the masters have at the start


class _Weight(NamedTuple):
    name: str
    master: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]  # every module and attribute that holds this parameter
    shadows: tuple[nn.Parameter, nn.Parameter]


def _can_hold(target: Tensor, values: Tensor) -> bool:
    return (
        target.data_ptr() != values.data_ptr()
        and target.shape == values.shape
        and target.stride() == values.stride()
        and target.dtype == values.dtype
        and target.device == values.device
    )


def _collect(module: nn.Module) -> list[_Weight]:
    names = {parameter: canonical_name(name) for name, parameter in module.named_parameters()}
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for submodule in module.modules():
        for name, parameter in submodule.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.requires_grad:
                owners.setdefault(parameter, []).append((submodule, name))
    at: dict[int, str] = {}
    for parameter in owners:
        _refuse(parameter, names[parameter])
        other = at.setdefault(parameter.data_ptr(), names[parameter])
        if other != names[parameter] and parameter.numel():
            raise NotImplementedError(
                f"the parameters {other} and {names[parameter]} share storage without being one parameter; "
                "tie them by assigning one nn.Parameter to both modules"
            )
    return [
        _Weight(names[parameter], parameter, tuple(places), (_shadow(parameter), _shadow(parameter)))
        for parameter, places in owners.items()
    ]


def _refuse(parameter: nn.Parameter, name: str) -> None:
    if type(parameter) is not nn.Parameter:
        raise NotImplementedError(
            f"the parameter {name} is a {type(parameter).__name__}; Async2BW supports plain nn.Parameters"
        )
    if has_hooks(parameter):
        raise NotImplementedError(
            f"the parameter {name} has hooks on its gradient, which Async2BW would not run; change the "
            "gradient in .grad after step() instead"
        )


def _shadow(parameter: nn.Parameter) -> nn.Parameter:
    # Not of detach(), which would share autograd's version counter with the parameter.
    shadow = nn.Parameter(parameter.data)
    shadow.__dict__.update(parameter.__dict__)  # attributes that a forward may read from its weights
    return shadow


class WeightVersions:
    """Keeps the trainable parameters of `module` in two versions.

    Between batches the module holds its own parameters, and the next batch reads their values. While batches
    are in flight their storage changes from batch to batch, so that a tensor taken as `p.data` or
    `p.detach()` does not follow later updates; after `freeze` it is the first storage again. Frozen
    parameters have no versions. Gradients of a batch accumulate on the shadow parameters.

    Args:
        module: a module whose trainable parameters are plain `nn.Parameter`s, on any device.

    Raises:
        NotImplementedError: if one is of another class, has hooks, or shares storage with another.
    """

    is_gathering = False  # the weights of a plain module are complete when a batch begins

    def __init__(self, module: nn.Module) -> None:
        self._weights = _collect(module)
        self._watch = ParameterWatch(module)
        self._assignments = {
            version: assignment(
                (submodule, name, weight.master if version is None else weight.shadows[version])
                for weight in self._weights
                for submodule, name in weight.owners
            )
            for version in (None, 0, 1)
        }
        self._master_version = _HOME  # the version whose storage the masters have
        self._frozen: int | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The module's own trainable parameters, which the optimizer updates."""
        return [weight.master for weight in self._weights]

    @property
    def names(self) -> list[str]:
        """Their names, in the same order."""
        return [weight.name for weight in self._weights]

    def begin_batch(self) -> int:
        """The version of a new batch: the masters' current values, or the frozen ones."""
        if self._frozen is not None:
            version, self._frozen = self._frozen, None
            return version
        version = self._master_version
        for weight in self._weights:
            # Also follows a master whose storage was replaced from outside, by a load or a move.
            weight.shadows[version].data = weight.master.data
        return version

    def finish_gather(self) -> None:
        """Does nothing; see `is_gathering`."""

    def activate(self, version: int | None) -> None:
        """Put `version` into the module, or its own parameters (None)."""
        self._assignments[version]()

    def stash(self, version: int) -> None:
        """Protect `version` from the next optimizer step. The other version must no longer be needed."""
        if version != self._master_version:
            return
        spare = 1 - version
        self._copy_masters_to(spare)
        for weight in self._weights:
            weight.master.data = weight.shadows[spare].data
        self._master_version = spare

    def free_other(self, version: int) -> None:
        """Free the storage of the version other than `version`, unless the masters use it."""
        if version != self._master_version:
            return
        for weight in self._weights:
            other = weight.shadows[1 - version]
            if other.numel():
                other.data = other.data.new_empty(0)

    def freeze(self) -> None:
        """Keep the masters' current values for the next batch, whatever update comes first.

        No batch may be in flight. The masters get back the storage that they had first: code that reads or
        writes a model between batches, such as a checkpointer, may hold references to it.
        """
        if self._frozen is not None:
            return
        if self._master_version == _HOME:
            self._frozen = 1 - _HOME
            self._copy_masters_to(self._frozen)
        else:
            self._frozen = self._master_version
            self.stash(self._master_version)

    def unfreeze(self) -> None:
        """Let the next batch read the masters when it begins. No batch may be in flight."""
        self._frozen = None

    def state_dict(self) -> dict[str, Tensor]:
        """The values that the next batch will read, by parameter name: the frozen version, or copies."""
        if self._frozen is None:
            return {weight.name: weight.master.detach().clone() for weight in self._weights}
        return {weight.name: weight.shadows[self._frozen].detach() for weight in self._weights}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Let the next batch read `state_dict`, which names every trainable parameter."""
        for weight in self._weights:
            if state_dict[weight.name].shape != weight.master.shape:
                raise ValueError(
                    f"the weight {weight.name} has shape {tuple(weight.master.shape)} in the module but "
                    f"{tuple(state_dict[weight.name].shape)} in what is loaded"
                )
        self.freeze()
        assert self._frozen is not None
        with torch.no_grad():
            for weight in self._weights:
                weight.shadows[self._frozen].copy_(state_dict[weight.name])

    def _copy_masters_to(self, version: int) -> None:
        shadows: list[Tensor] = [weight.shadows[version] for weight in self._weights]
        masters = [weight.master.data for weight in self._weights]
        for shadow, master in zip(shadows, masters, strict=True):
            if not _can_hold(shadow, master):
                shadow.data = torch.empty_like(master)
        if masters:
            with torch.no_grad():
                # On the shadows themselves, so that autograd sees the write: a backward that still needed the
                # old values raises instead of computing a wrong gradient.
                torch._foreach_copy_(shadows, masters)

    def training_state(self) -> None:
        """None: a plain module has no state within a forward or backward."""

    def set_training_state(self, state: object) -> None:
        """See `training_state`."""

    def pop_grads(self, version: int) -> list[Tensor | None]:
        """Remove and return the gradients accumulated on `version`, in the order of the parameters."""
        grads = []
        for weight in self._weights:
            shadow = weight.shadows[version]
            grads.append(shadow.grad)
            shadow.grad = None
        return grads

    def check_unchanged(self) -> None:
        """Refuse a module whose trainable parameters have changed since the start.

        Raises:
            RuntimeError: if one was replaced, frozen, added, or changed its dtype or device.
            NotImplementedError: if one has a hook now.
        """
        if self._watch.changed() or not all(
            weight.master.dtype == weight.shadows[_HOME].dtype
            and weight.master.device == weight.shadows[_HOME].device
            for weight in self._weights
        ):
            raise RuntimeError(
                "the trainable parameters of the stage's module were replaced, frozen, added or moved while "
                "it was training; call drain() before such a change and build a new schedule after it"
            )
        for weight in self._weights:
            _refuse(weight.master, weight.name)
