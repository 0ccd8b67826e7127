"""Updates skipped because of a non-finite gradient: how many, and where the first non-finite value was."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.trainer import Trainer

from titan_async.errors import UserError
from titan_async.local_tensors import local_part
from titan_async.training.callbacks import Callback, Update
from titan_async.training.models.tying import is_copy
from titan_async.training.telemetry.reporter import Reporter
from titan_async.training.transfer import Deferred

__all__ = ["GradientCheck", "NonFiniteSearch", "SkippedUpdates"]


class GradientCheck(Callback):
    """Counts skipped updates, and looks for their cause.

    Args:
        skipped: counts them.
        search: finds the cause.
        deferred: runs the check of an update once its norm is on the host.
        reporter: prints warnings.
    """

    def __init__(
        self,
        skipped: "SkippedUpdates",
        search: "NonFiniteSearch",
        deferred: Deferred,
        reporter: Reporter,
    ) -> None:
        self.skipped, self._search, self._deferred, self._reporter = skipped, search, deferred, reporter
        self.grad_norm: float | None = None
        """The norm of the gradient, of the latest update whose norm is on the host."""

    def before_batch(self, trainer: Trainer) -> None:
        """Count the batch."""
        self._search.begin_batch()

    def before_clip(self, trainer: Trainer) -> None:
        """Check the gradient during a search."""
        self._search.check_gradients()

    def after_update(self, trainer: Trainer, update: Update) -> None:
        """Check whether the update was made, once its norm is on the host."""
        self._deferred.add(trainer.step, partial(self._end_update, trainer.step, update))

    def _end_update(self, step: int, update: Update) -> None:
        self.grad_norm = float(update.norm.read())
        finite = math.isfinite(self.grad_norm)
        where = self._search.end_update(finite)
        self.skipped.count(finite and update.found_finite, step, where, self._reporter.warn)


@dataclass
class SkippedUpdates:
    """Counts skipped updates.

    The norm of a gradient is global, so the counts of all ranks are equal. Only the ranks of a stage count
    what a hook does to the gradients of that stage after the clip.
    """

    max_in_a_row: int
    """The run stops after this many in a row."""
    total: int = 0
    in_a_row: int = 0

    def count(self, finite: bool, step: int, where: str, warn: Callable[[str], None]) -> None:
        """Count the update of `step`, made if its gradient is `finite` and skipped otherwise.

        Args:
            where: a description of the first non-finite value; see `NonFiniteSearch.end_update`.
            warn: prints a warning for a skipped update.

        Raises:
            UserError: `max_in_a_row` updates in a row were skipped.
        """
        self.in_a_row = 0 if finite else self.in_a_row + 1
        self.total += not finite
        if self.in_a_row >= self.max_in_a_row:
            raise UserError(
                f"the gradient was not finite {self.in_a_row} times in a row up to step {step}{where}: "
                "lower the learning rate or training.max_norm, or look at the data (max_skipped_updates sets "
                "the limit)"
            )
        if not finite:
            warn(
                f"step {step}: the gradient is not finite{where}, so its update is skipped "
                f"({self.total} so far)"
            )


class _Found(NamedTuple):
    """The findings of one rank in a batch."""

    forwards: list[int]
    """Its stages with non-finite output from finite input."""
    gradients: list[tuple[int, str]]
    """Its stages with a non-finite gradient, and the parameter or layer where a backward meets it first."""


class NonFiniteSearch:
    """Checks whole batches from the first skipped update to the next one that is made.

    A check costs a reduction over the inputs and outputs of stages, and over gradients; reading its result
    synchronizes with the device. While all gradients are finite, nothing is checked.

    Args:
        stages: of this rank, by their number in the pipeline.
    """

    def __init__(self, stages: Iterable[tuple[int, nn.Module]]) -> None:
        self._stages = dict(stages)
        self._hooks: list[Any] = []
        self._batches = self._gradients = self._updates = 0  # counts
        self._first_batch = 0  # the first one that is checked as a whole
        self._causes: dict[int, dict[int, Tensor]] = defaultdict(dict)  # batch, stage: a flag
        # update, stage: the names of parameters, and the largest entry of each gradient
        self._largest: dict[int, dict[int, tuple[list[str], Tensor]]] = defaultdict(dict)

    def begin_batch(self) -> None:
        """Count a batch, whose forwards follow."""
        self._batches += 1

    def check_gradients(self) -> None:
        """Check the gradient in `.grad`, once for each update, before a clip makes all of it non-finite."""
        self._gradients += 1
        if not self._hooks:
            return
        for number, module in self._stages.items():
            gradients = {
                name: local_part(parameter.grad)
                for name, parameter in module.named_parameters()
                # A tied weight's gradient is that of both its stages, and the backward ends at the first.
                if parameter.grad is not None and not is_copy(module, name)
            }
            shards = {name: shard for name, shard in gradients.items() if shard.numel()}
            if shards:
                largest = [torch.linalg.vector_norm(shard, torch.inf).float() for shard in shards.values()]
                self._largest[self._gradients][number] = list(shards), torch.stack(largest)

    def end_update(self, finite: bool) -> str:
        """Count an update. If its gradient was not `finite`, a collective of all ranks.

        It may be known after later gradients were checked.

        Returns:
            A description of its batch's first non-finite value, beginning with a comma; empty if unknown.
        """
        self._updates += 1
        if finite:
            self._stop()
            return ""
        if not self._hooks:
            self._start()
            return ""
        # The same on all ranks, since they count the same batches.
        if self._updates < self._first_batch or dist.get_backend() == "fake":
            return ""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self._found())
        return _describe(everyone)

    def _start(self) -> None:
        self._first_batch = self._batches + 1
        for number, module in self._stages.items():

            def check(
                module: nn.Module, args: tuple, kwargs: dict, output: Any, number: int = number
            ) -> None:
                if torch.is_grad_enabled() and module.training:
                    is_cause = ~_are_finite(output) & _are_finite((*args, *kwargs.values()))
                    causes = self._causes[self._batches]
                    causes[number] = is_cause | causes[number] if number in causes else is_cause

            self._hooks.append(module.register_forward_hook(check, with_kwargs=True))

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._causes.clear()
        self._largest.clear()

    def _found(self) -> _Found:
        causes = self._causes.pop(self._updates, {})
        gradients = []
        for number, (names, largest) in self._largest.pop(self._updates, {}).items():
            wrong = (~largest.isfinite()).nonzero().flatten().tolist()
            if wrong:
                gradients.append((number, _first_in_backward([names[index] for index in wrong])))
        return _Found([number for number, flag in causes.items() if flag], gradients)


def _are_finite(values: Any) -> Tensor:
    """Whether all entries of the tensors among `values` are finite, as a scalar tensor."""
    flags = [
        local_part(value.detach()).isfinite().all()
        for value in (values if isinstance(values, tuple) else (values,))
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    return torch.stack(flags).all() if flags else torch.tensor(True)


def _first_in_backward(parameters: list[str]) -> str:
    """The first of these parameters in the order of the backward, or its layer if several are in it."""
    names = [canonical_fqn(name).split(".") for name in parameters]
    # Layers are in the order of the forward; parameters inside a layer need not be.
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
