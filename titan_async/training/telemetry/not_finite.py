"""Updates skipped because of a non-finite gradient: how many, and where the first non-finite value was."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.components.checkpointer.utils import canonical_fqn

from titan_async.errors import UserError
from titan_async.local_tensors import local_part
from titan_async.training.models.tying import is_copy

__all__ = ["Search", "SkippedUpdates"]


@dataclass
class SkippedUpdates:
    """Counts skipped updates.

    All ranks count alike, since the norm of a gradient is global. What a hook makes of gradients after that
    is known to, and counted by, the ranks of that stage alone.
    """

    most_in_a_row: int
    """With this many in a row the run stops."""
    total: int = 0
    in_a_row: int = 0

    def note(self, finite: bool, step: int, where: str, warn: Callable[[str], None]) -> None:
        """Count the update of `step`, made if its gradient is `finite` and skipped otherwise.

        Args:
            where: what is known of the place of the first value that is not; see `not_finite.Search`.
            warn: is told of an update that is skipped.

        Raises:
            UserError: if as many as `most_in_a_row` were skipped without one that was made.
        """
        self.in_a_row = 0 if finite else self.in_a_row + 1
        self.total += not finite
        if self.in_a_row >= self.most_in_a_row:
            raise UserError(
                f"the gradient was not finite {self.in_a_row} times in a row up to step {step}{where}: "
                "lower the learning rate or training.max_norm, or look at the data (max_skipped_updates says "
                "how many)"
            )
        if not finite:
            warn(
                f"step {step}: the gradient is not finite{where}, so its update is skipped "
                f"({self.total} so far)"
            )


class _Found(NamedTuple):
    """What one rank knows of a batch."""

    forwards: list[int]
    """Its stages that gave on what is not finite though they got nothing of the kind."""
    gradients: list[tuple[int, str]]
    """Its stages with a gradient that is not finite, and the parameter or layer where a backward meets it
    first."""


class Search:
    """Looks at whole batches, from when a skipped update is known to when one that was made is.

    Looking costs a reduction over what stages take and give, and over gradients, and telling waits for the
    device; as long as all gradients are finite nothing is looked at.

    Args:
        stages: of this rank, by their number in the pipeline.
    """

    def __init__(self, stages: Iterable[tuple[int, nn.Module]]) -> None:
        self._stages = dict(stages)
        self._hooks: list[Any] = []
        self._begun = self._clipped = self._updates = 0
        self._since = 0  # the first batch that is looked at as a whole
        self._begins: dict[int, dict[int, Tensor]] = defaultdict(dict)  # batch, stage: a flag
        # update, stage: of each parameter's gradient
        self._largest: dict[int, dict[int, tuple[list[str], Tensor]]] = defaultdict(dict)

    def begin_batch(self) -> None:
        """Note that the forwards of another batch follow."""
        self._begun += 1

    def look_at_gradients(self) -> None:
        """Look at the gradient in `.grad`, before a clip spreads over all of it what is in a part.

        Once for each update.
        """
        self._clipped += 1
        if not self._hooks:
            return
        for number, module in self._stages.items():
            gradients = {
                name: local_part(parameter.grad)
                for name, parameter in module.named_parameters()
                # A tied weight's gradient is that of both its stages, and the backward ends at the first.
                if parameter.grad is not None and not is_copy(module, name)
            }
            parts = {name: part for name, part in gradients.items() if part.numel()}
            if parts:
                largest = [torch.linalg.vector_norm(part, torch.inf).float() for part in parts.values()]
                self._largest[self._clipped][number] = list(parts), torch.stack(largest)

    def end_update(self, finite: bool) -> str:
        """Note what is known of the next update. If its gradient was not `finite`, a collective of all ranks.

        It may be known when later gradients have been looked at.

        Returns:
            Where its batch had the first value that is not finite, in words that follow a comma; empty if
            that is not known.
        """
        self._updates += 1
        if finite:
            self._stop()
            return ""
        if not self._hooks:
            self._start()
            return ""
        # Every rank decides alike here, since all count the same batches.
        if self._updates < self._since or dist.get_backend() == "fake":
            return ""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self._found())
        return _describe(everyone)

    def _start(self) -> None:
        self._since = self._begun + 1
        for number, module in self._stages.items():

            def look(module: nn.Module, args: tuple, kwargs: dict, output: Any, number: int = number) -> None:
                if torch.is_grad_enabled() and module.training:
                    begins = ~_are_finite(output) & _are_finite((*args, *kwargs.values()))
                    seen = self._begins[self._begun]
                    seen[number] = begins | seen[number] if number in seen else begins

            self._hooks.append(module.register_forward_hook(look, with_kwargs=True))

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._begins.clear()
        self._largest.clear()

    def _found(self) -> _Found:
        begins = self._begins.pop(self._updates, {})
        gradients = []
        for number, (names, largest) in self._largest.pop(self._updates, {}).items():
            wrong = (~largest.isfinite()).nonzero().flatten().tolist()
            if wrong:
                gradients.append((number, _first_in_backward([names[index] for index in wrong])))
        return _Found([number for number, flag in begins.items() if flag], gradients)


def _are_finite(values: Any) -> Tensor:
    """Whether all numbers in the tensors among `values` are, as a tensor without dimensions."""
    flags = [
        local_part(value.detach()).isfinite().all()
        for value in (values if isinstance(values, tuple) else (values,))
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    return torch.stack(flags).all() if flags else torch.tensor(True)


def _first_in_backward(parameters: list[str]) -> str:
    """The one of these parameters that a backward comes to first, or, if several are in its layer, that."""
    names = [canonical_fqn(name).split(".") for name in parameters]
    # Layers are in the order of the forward; what is inside of one need not be.
    layer = names[-1][:2]
    inside = [name for name in names if name[:2] == layer]
    return ".".join(layer if len(inside) > 1 else names[-1])


def _describe(everyone: list[_Found]) -> str:
    forwards = [(number, rank) for rank, found in enumerate(everyone) for number in found.forwards]
    if forwards:
        number, rank = min(forwards)
        return f", first in the output of stage {number} (rank {rank})"
    gradients = [
        (number, -rank, name) for rank, found in enumerate(everyone) for number, name in found.gradients
    ]
    if gradients:
        number, rank, name = max(gradients)
        return f", first in the gradient of {name} on stage {number} (rank {-rank})"
    return ""
