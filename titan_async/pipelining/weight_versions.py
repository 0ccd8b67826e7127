"""Two versions of a plain module's weights, so that a backward uses the weights of its forward.

Autograd saves the parameters themselves, so a parameter that a pending backward needs must not be written.
Here the optimizer's parameters (the masters) are never part of a graph. Forward and backward run on
stand-ins, two for each master, and storage goes round in a circle: a batch reads the storage that the
masters are in; before the optimizer may write, the masters move on to the storage of the version that no
microbatch needs any more. Two copies of the weights in all, and one copy of them a batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from titan_async.local_tensors import canonical_name
from titan_async.pipelining._torch_internals import ParameterWatch, assignment, has_hooks

__all__ = ["WeightVersions"]

_HOME = 0  # the version whose storage is that of the masters at the start


class _Weight(NamedTuple):
    name: str
    master: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]  # every place in the module that shows this parameter
    stand_ins: tuple[nn.Parameter, nn.Parameter]


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
        _Weight(names[parameter], parameter, tuple(places), (_stand_in(parameter), _stand_in(parameter)))
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


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    # Not of detach(), which would share autograd's version counter with the parameter.
    stand_in = nn.Parameter(parameter.data)
    stand_in.__dict__.update(parameter.__dict__)  # what a forward may read from its weights
    return stand_in


class WeightVersions:
    """Keeps the trainable parameters of `module` in two versions.

    Between batches the module shows its own parameters, and their values are what the next batch reads.
    While batches are in flight their storage changes from batch to batch, so that a tensor taken as
    `p.data` or `p.detach()` does not follow later updates; after `hold` it is the first one again.
    Frozen parameters have no versions. Gradients of a batch gather on the stand-ins.

    Args:
        module: a module whose trainable parameters are plain `nn.Parameter`s, on any device.

    Raises:
        NotImplementedError: if one is of another class, has hooks, or shares storage with another.
    """

    def __init__(self, module: nn.Module) -> None:
        self._weights = _collect(module)
        self._watch = ParameterWatch(module)
        self._assignments = {
            version: assignment(
                (submodule, name, weight.master if version is None else weight.stand_ins[version])
                for weight in self._weights
                for submodule, name in weight.owners
            )
            for version in (None, 0, 1)
        }
        self._master_version = _HOME  # the version whose storage the masters are in
        self._held: int | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The module's own trainable parameters, which the optimizer knows."""
        return [weight.master for weight in self._weights]

    @property
    def names(self) -> list[str]:
        """Their names, in the same order."""
        return [weight.name for weight in self._weights]

    def read(self) -> int:
        """The version that the next batch is to use: the masters' values now, or those that were held."""
        if self._held is not None:
            version, self._held = self._held, None
            return version
        version = self._master_version
        for weight in self._weights:
            # Also follows a master whose storage was replaced from outside, by a load or a move.
            weight.stand_ins[version].data = weight.master.data
        return version

    def finish_reading(self) -> None:
        """Nothing: a plain module's weights are all there when a batch begins."""

    def preserve(self, version: int) -> None:
        """Make `version` safe from the next update. The other version must no longer be needed."""
        if version != self._master_version:
            return
        spare = 1 - version
        self._copy_masters_to(spare)
        for weight in self._weights:
            weight.master.data = weight.stand_ins[spare].data
        self._master_version = spare

    def hold(self) -> None:
        """Keep the masters' values of now for the next batch, whatever update comes first.

        No batch may be in flight. Leaves the masters in the storage that they had at the very first:
        what reads or writes a model between batches, such as a checkpointer, may know it from then.
        """
        if self._held is not None:
            return
        if self._master_version == _HOME:
            self._held = 1 - _HOME
            self._copy_masters_to(self._held)
        else:
            self._held = self._master_version
            self.preserve(self._master_version)

    def drop(self) -> None:
        """Let the next batch read the masters as they then are. No batch may be in flight."""
        self._held = None

    def next_weights(self) -> dict[str, Tensor]:
        """What the next batch will read, by parameter name: the held version itself, or a copy."""
        if self._held is None:
            return {weight.name: weight.master.detach().clone() for weight in self._weights}
        return {weight.name: weight.stand_ins[self._held].detach() for weight in self._weights}

    def set_next_weights(self, values: dict[str, Tensor]) -> None:
        """Let the next batch read `values`, which name every trainable parameter. None may be in flight."""
        for weight in self._weights:
            if values[weight.name].shape != weight.master.shape:
                raise ValueError(
                    f"the weight {weight.name} has shape {tuple(weight.master.shape)} in the module but "
                    f"{tuple(values[weight.name].shape)} in what is loaded"
                )
        self.hold()
        assert self._held is not None
        with torch.no_grad():
            for weight in self._weights:
                weight.stand_ins[self._held].copy_(values[weight.name])

    def _copy_masters_to(self, version: int) -> None:
        stand_ins: list[Tensor] = [weight.stand_ins[version] for weight in self._weights]
        masters = [weight.master.data for weight in self._weights]
        for stand_in, master in zip(stand_ins, masters, strict=True):
            if not _can_hold(stand_in, master):
                stand_in.data = torch.empty_like(master)
        if masters:
            with torch.no_grad():
                # On the stand-ins themselves: autograd then sees the write, and a backward that still needed
                # the old values raises instead of computing a wrong gradient.
                torch._foreach_copy_(stand_ins, masters)

    def release_other(self, version: int) -> None:
        """Free the storage of the version that is not `version`, unless the masters are in it."""
        if version != self._master_version:
            return
        for weight in self._weights:
            other = weight.stand_ins[1 - version]
            if other.numel():
                other.data = other.data.new_empty(0)

    def show(self, version: int | None) -> None:
        """Let the module show `version`, or its own parameters (None)."""
        self._assignments[version]()

    @property
    def is_gathering(self) -> bool:
        """No: a plain module's weights are all there when a batch begins."""
        return False

    def pass_state(self) -> object:
        """None: a plain module keeps no state within a forward or backward."""
        return None

    def set_pass_state(self, saved: object) -> None:
        """See `pass_state`."""

    def take_gradients(self, version: int) -> list[Tensor | None]:
        """Remove and return the gradients gathered on `version`, in the order of the parameters."""
        gradients = []
        for weight in self._weights:
            stand_in = weight.stand_ins[version]
            gradients.append(stand_in.grad)
            stand_in.grad = None
        return gradients

    def check_unchanged(self) -> None:
        """Refuse to go on with a module whose trainable parameters are no longer those of the start.

        Raises:
            RuntimeError: if one was replaced, frozen, added, or changed its dtype or device.
            NotImplementedError: if one has got a hook.
        """
        if self._watch.changed() or not all(
            weight.master.dtype == weight.stand_ins[_HOME].dtype
            and weight.master.device == weight.stand_ins[_HOME].device
            for weight in self._weights
        ):
            raise RuntimeError(
                "the trainable parameters of the stage's module were replaced, frozen, added or moved while "
                "it was training; call drain() before such a change and build a new schedule after it"
            )
        for weight in self._weights:
            _refuse(weight.master, weight.name)
