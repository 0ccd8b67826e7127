"""Delayed gradients in one process, without a pipeline, to test optimizers under a delay.

Any model is trained with any optimizer by the recurrence of asynchronous pipelines:

    W[b+1] = W[b] - update(g_b),    g_b = gradient of batch b at W[max(b-k, 0)]

PipeDream-2BW (arXiv 2006.09503) has delay k = 1 for every weight, whatever the number of stages;
`titan_async.pipelining.ScheduleAsync2BW` has the trajectory of k = 1. The original PipeDream
(arXiv 1806.03377) has one delay per stage, which grows with the depth of the pipeline: `pipedream_delays`.
"""

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from titan_async.local_tensors import canonical_name
from titan_async.optim.base import describe

__all__ = ["DelayedGradients", "pipedream_delays"]


@dataclass(frozen=True)
class _Weight:
    """A trainable parameter, and its versions that later batches read."""

    name: str
    param: nn.Parameter
    delay: int
    # Oldest first: before batch b, W[max(b-delay, 0)] to W[b-1]. Never modified.
    versions: deque[Tensor] = field(default_factory=deque)

    def activate_oldest(self) -> None:
        newest = self.param.detach().clone()
        if self.versions:
            self.param.copy_(self.versions[0])
        if len(self.versions) == self.delay:
            self.versions.popleft()
        self.versions.append(newest)

    def activate_newest(self) -> None:
        # Even if they are equal: the write lets autograd detect a backward after the batch.
        self.param.copy_(self.versions[-1])

    def undo_activate_oldest(self, count: int) -> None:
        newest = self.versions.pop()
        if len(self.versions) < count:
            self.versions.appendleft(self.param.detach().clone())
        self.param.copy_(newest)


class DelayedGradients:
    """Computes the gradients of a model at weights that are some updates old.

    Run forward and backward of a batch inside ``with delayed.batch():``. Inside, the parameters hold the old
    weights; afterwards they hold the newest ones, and ``.grad`` is the gradient at the old ones. Clipping,
    optimizer, learning-rate schedule, evaluation and checkpoints do not depend on the delay:

        import torch
        from titan_async.optim import DelayedGradients, ErrorFeedback

        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1)
        inputs = torch.randn(200, 16, 8)
        targets = inputs.sum(-1, keepdim=True)
        optimizer = ErrorFeedback(torch.optim.AdamW(model.parameters(), lr=0.05))
        delayed = DelayedGradients(model, delay=1)
        for x, y in zip(inputs, targets):
            with delayed.batch():
                loss = (model(x) - y).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    Several microbatches, each with its backward, may run inside one ``batch()``; all read the same weights.
    Every ``batch()`` is one b of the recurrence, also if its update is skipped. W[0] are the weights at the
    first one: create a new object to start a delay in the middle of a run.

    With delay 0 the loop is bitwise equal to one without `DelayedGradients`. An exception inside ``batch()``
    restores the newest weights, and the batch is not counted.

    Parameters remain the same objects in the same memory, so tied weights, hooks, activation checkpointing,
    `torch.compile` and DTensors (including `fully_shard`) work as without a delay. Buffers,
    such as the running statistics of batch normalization, are not delayed. An optimizer that evaluates the
    model itself (L-BFGS with a closure) does so at the newest weights, that is, without a delay.

    Memory: k copies of a parameter with delay k, and during a copy one more of a single parameter.
    Time: three copies of the weights per batch.

    Args:
        model: its trainable parameters are delayed.
        delay: number of updates k, at least 0, of all parameters; or a mapping from each trainable parameter
            to its own, from `pipedream_delays` or such as ``{p: 2 for p in model.head.parameters()}``.

    Raises:
        ValueError: a delay that is not an integer of at least 0, a trainable parameter without a delay, or a
            delay of a parameter that is not the model's.

    Examples:
        Gradient descent on w^2 / 2, whose gradient is w. The first two batches read 1, and the third 0.5:

        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> delayed = DelayedGradients(model, delay=1)
        >>> for _ in range(3):
        ...     with delayed.batch():
        ...         loss = (model(torch.ones(1)) ** 2 / 2).sum()
        ...         loss.backward()
        ...     print(f"gradient {model.weight.grad.item()} for {model.weight.item()}")
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        gradient 1.0 for 1.0
        gradient 1.0 for 0.5
        gradient 0.5 for 0.0
    """

    def __init__(self, model: nn.Module, delay: int | Mapping[nn.Parameter, int] = 1) -> None:
        self._model = model
        self._inside = False
        params = dict(model.named_parameters())
        delays = delay if isinstance(delay, Mapping) else dict.fromkeys(params.values(), delay)
        for param in delays.keys() - set(params.values()):
            raise ValueError(
                f"a delay is given for {describe(param, None)}, which is not in the model: use parameters "
                f"from model.parameters()"
            )
        self._weights: list[_Weight] = []
        for name, param in params.items():
            if not param.requires_grad:
                continue
            if param not in delays:
                raise ValueError(f"no delay is given for {describe(param, name)}: give one, 0 for no delay")
            self._weights.append(_Weight(canonical_name(name), param, _checked_delay(delays[param])))

    @property
    def delays(self) -> dict[str, int]:
        """The delay of every trainable parameter, by name."""
        return {weight.name: weight.delay for weight in self._weights}

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Activate the weights that this batch reads, for its forward and backward.

        A later backward raises torch's error about variables modified by an inplace operation, except with
        activation checkpointing, which hides from autograd that it needs the weights.

        Raises:
            RuntimeError: inside another ``batch()``, or if trainable parameters were replaced, frozen,
                added, moved or converted; from ``optimizer.step()`` inside, whose update would be lost.
        """
        self._check_not_inside()
        self._check_unchanged()
        delayed = [weight for weight in self._weights if weight.delay]
        counts = [len(weight.versions) for weight in delayed]
        activated = 0
        self._inside = True
        handle = register_optimizer_step_pre_hook(functools.partial(_reject_step, self._weights))
        try:
            with torch.no_grad():
                for weight in delayed:
                    weight.activate_oldest()
                    activated += 1
            yield
            with torch.no_grad():
                for weight in delayed:
                    weight.activate_newest()
        except BaseException:
            with torch.no_grad():
                for weight, count in zip(delayed[:activated], counts, strict=False):
                    weight.undo_activate_oldest(count)
            raise
        finally:
            handle.remove()
            self._inside = False

    def state_dict(self) -> dict[str, Any]:
        """The state that a run needs, besides model and optimizer, to resume exactly.

        Returns:
            ``"delays"``: the property of that name. ``"weights"``: for every parameter's name the versions
            that later batches read, oldest first, at most as many as its delay. The tensors are not copied;
            they are never modified.

        Raises:
            RuntimeError: inside ``batch()``.
        """
        self._check_not_inside()
        return {
            "delays": self.delays,
            "weights": {weight.name: list(weight.versions) for weight in self._weights},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of what `state_dict` returned. Load model and optimizer too.

        Raises:
            ValueError: saved with other delays or for other parameters, or incomplete; without changes.
            RuntimeError: inside ``batch()``.
        """
        self._check_not_inside()
        if state_dict["delays"] != self.delays:
            raise ValueError(
                f"the state was saved with the delays {_brief(state_dict['delays'])}, but this model has "
                f"{_brief(self.delays)}: create DelayedGradients with the same model and delay"
            )
        saved = state_dict["weights"]
        batches = max((len(versions) for versions in saved.values()), default=0)
        for weight in self._weights:
            versions = saved.get(weight.name, [])
            if len(versions) != min(batches, weight.delay):
                raise ValueError(
                    f"the state has {len(versions)} versions of {describe(weight.param, weight.name)} after "
                    f"{batches} or more batches with delay {weight.delay}: it is incomplete, save it again"
                )
            for version in versions:
                if version.shape != weight.param.shape or version.dtype != weight.param.dtype:
                    raise ValueError(
                        f"a version of shape {list(version.shape)} and {version.dtype} does not fit "
                        f"{describe(weight.param, weight.name)} and {weight.param.dtype}: load the state "
                        f"of the same model"
                    )
        for weight in self._weights:
            copies = [version.detach().to(weight.param.device, copy=True) for version in saved[weight.name]]
            weight.versions.clear()
            weight.versions.extend(copies)

    def _check_not_inside(self) -> None:
        if self._inside:
            raise RuntimeError("the model has old weights inside batch(): exit the with block first")

    def _check_unchanged(self) -> None:
        now = [param for param in self._model.parameters() if param.requires_grad]
        same = len(now) == len(self._weights) and all(
            param is weight.param
            and all(
                param.dtype == version.dtype
                and param.device == version.device
                and param.shape == version.shape
                for version in weight.versions
            )
            for param, weight in zip(now, self._weights, strict=True)
        )
        if not same:
            raise RuntimeError(
                "the model's trainable parameters were replaced, frozen, added, moved or converted since "
                "DelayedGradients was created: create a new one"
            )


def pipedream_delays(stages: Sequence[nn.Module | Iterable[nn.Parameter]]) -> dict[nn.Parameter, int]:
    """The delays of the original PipeDream, which grow with the number d of stages.

    Stage r of d has delay d - 1 - r, the number of batches between its forward and its backward
    (arXiv 1806.03377, section 3.3, weight stashing); the last stage has none.

    Args:
        stages: the model's parts from input to output, modules or groups of parameters, such as
            ``[model.embedding, *model.layers, model.head]``.

    Returns:
        The delay of every parameter, for `DelayedGradients`.

    Raises:
        ValueError: a parameter in two stages, as a tied weight may be.

    Examples:
        >>> stages = [nn.Linear(2, 2, bias=False) for _ in range(3)]
        >>> list(pipedream_delays(stages).values())
        [2, 1, 0]
    """
    delays: dict[nn.Parameter, int] = {}
    for index, stage in enumerate(stages):
        delay = len(stages) - 1 - index
        # A set: a stage may list a parameter twice.
        for param in set(stage.parameters() if isinstance(stage, nn.Module) else stage):
            if param in delays:
                raise ValueError(
                    f"{describe(param, None)} is in the stages {len(stages) - 1 - delays[param]} and "
                    f"{index}, which have different delays: list it in one of them"
                )
            delays[param] = delay
    return delays


def _reject_step(weights: list[_Weight], optimizer: Optimizer, args: object, kwargs: object) -> None:
    known = {param for group in optimizer.param_groups for param in group["params"]}
    if any(weight.param in known for weight in weights):
        raise RuntimeError(
            "optimizer.step() inside batch() would update old weights and be lost: "
            "move it after the with block"
        )


def _checked_delay(delay: Any) -> int:
    if isinstance(delay, bool) or not isinstance(delay, int) or delay < 0:
        raise ValueError(f"a delay must be an integer, 0 or more, not {delay!r}")
    return delay


def _brief(delays: Mapping[str, int]) -> str:
    """Delays for an error message."""
    shown = ", ".join(f"{name}: {delay}" for name, delay in list(delays.items())[:3])
    return f"{{{shown}{', ...' if len(delays) > 3 else ''}}}"
