"""Does an optimizer survive a delay? `DelayedGradients` answers on one process, without a pipeline.

It trains any model with any optimizer by the recurrence of asynchronous pipelines:

    W[b+1] = W[b] - update(g_b),    g_b = gradient of batch b at W[max(b-k, 0)]

PipeDream-2BW (arXiv 2006.09503) has delay k = 1 for every weight, whatever the number of stages;
`titan_async.pipelining.ScheduleAsync2BW` has the same trajectory as this with k = 1. The original PipeDream
(arXiv 1806.03377) has one delay a stage, which grows with the depth of the pipeline: `pipedream_delays`.
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
from titan_async.optim.tensors import named

__all__ = ["DelayedGradients", "pipedream_delays"]


@dataclass(frozen=True)
class _Weight:
    """A trainable parameter and the versions of it that batches to come are to read."""

    name: str
    param: nn.Parameter
    delay: int
    # Oldest first: before batch b, W[max(b-delay, 0)] to W[b-1]. None of these is ever written.
    versions: deque[Tensor] = field(default_factory=deque)

    def show_oldest(self) -> None:
        newest = self.param.detach().clone()
        if self.versions:
            self.param.copy_(self.versions[0])
        if len(self.versions) == self.delay:
            self.versions.popleft()
        self.versions.append(newest)

    def show_newest(self) -> None:
        # Also where they are equal: a backward that comes too late must find the parameter written.
        self.param.copy_(self.versions[-1])

    def undo_show_oldest(self, count: int) -> None:
        newest = self.versions.pop()
        if len(self.versions) < count:
            self.versions.appendleft(self.param.detach().clone())
        self.param.copy_(newest)


class DelayedGradients:
    """Lets a model compute its gradients at weights that are some updates old.

    Forward and backward of a batch go into ``with delayed.batch():``, and nothing else changes. Inside, the
    parameters hold the old weights; after it they hold the newest ones again, and ``.grad`` is the
    gradient at the old ones. So clipping, optimizer, learning-rate schedule, evaluation and checkpoints
    are those of any training loop, and none of them knows about the delay:

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
    Every ``batch()`` counts as one b of the recurrence, also if its update is skipped. The first one takes
    the weights as they are for W[0]: build a new object to start a delay in the middle of a run.

    With delay 0 the loop is bit by bit the plain one. An exception inside ``batch()`` puts the newest weights
    back, and the batch counts as not begun.

    Parameters stay the same objects in the same memory, so that tied weights, hooks, activation
    checkpointing, `torch.compile` and DTensors (`fully_shard` included) work as they do without a delay. Not
    delayed are buffers, such as the running statistics of a batch normalization: they go on from batch
    to batch, as in the plain loop. An optimizer that evaluates the model itself (L-BFGS with a
    closure) does so at the newest weights, that is without a delay.

    Memory: k further copies of a parameter with delay k, and during a copy one more of a single parameter.
    Time: three copies of the weights a batch.

    Args:
        model: its trainable parameters are delayed. Frozen ones cost nothing.
        delay: number of updates k, at least 0, for every parameter; or one for each trainable parameter,
            from `pipedream_delays` or such as ``{p: 2 for p in model.head.parameters()}``.

    Raises:
        ValueError: a delay that is no whole number of at least 0, a trainable parameter without a
            delay, or a delay for what is no parameter of the model.

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
                f"a delay is given for {named(param, None)}, which is not one of the model's: "
                f"take the parameters from model.parameters()"
            )
        self._weights: list[_Weight] = []
        for name, param in params.items():
            if not param.requires_grad:
                continue
            if param not in delays:
                raise ValueError(f"there is no delay for {named(param, name)}: give it one, 0 for none")
            self._weights.append(_Weight(canonical_name(name), param, _checked_delay(delays[param])))

    @property
    def delays(self) -> dict[str, int]:
        """The delay of every trainable parameter, by its name in the model."""
        return {weight.name: weight.delay for weight in self._weights}

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Show the weights that this batch reads; forward and backward of the whole batch belong inside.

        A backward after it raises torch's error about variables modified by an inplace operation, unless
        activation checkpointing hides from autograd that it needs the weights.

        Raises:
            RuntimeError: within another ``batch()``, or if trainable parameters were replaced, frozen,
                added, moved or converted; from ``optimizer.step()`` inside, which would be lost.
        """
        self._refuse_inside()
        self._check_unchanged()
        delayed = [weight for weight in self._weights if weight.delay]
        counts = [len(weight.versions) for weight in delayed]
        shown = 0
        self._inside = True
        handle = register_optimizer_step_pre_hook(functools.partial(_refuse_step, self._weights))
        try:
            with torch.no_grad():
                for weight in delayed:
                    weight.show_oldest()
                    shown += 1
            yield
            with torch.no_grad():
                for weight in delayed:
                    weight.show_newest()
        except BaseException:
            with torch.no_grad():
                for weight, count in zip(delayed[:shown], counts, strict=False):
                    weight.undo_show_oldest(count)
            raise
        finally:
            handle.remove()
            self._inside = False

    def state_dict(self) -> dict[str, Any]:
        """What a run needs, beside model and optimizer, to go on exactly.

        Returns:
            ``"delays"``: the property of that name. ``"weights"``: for every parameter's name the versions
            that later batches read, oldest first, at most as many as its delay. The tensors are those in
            use; they are never written.

        Raises:
            RuntimeError: inside ``batch()``.
        """
        self._refuse_inside()
        return {
            "delays": self.delays,
            "weights": {weight.name: list(weight.versions) for weight in self._weights},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned, which is copied. Load model and optimizer, too.

        Raises:
            ValueError: saved with other delays or for other parameters, or incomplete; nothing is changed.
            RuntimeError: inside ``batch()``.
        """
        self._refuse_inside()
        if state_dict["delays"] != self.delays:
            raise ValueError(
                f"the state was saved with the delays {_brief(state_dict['delays'])}, but this model has "
                f"{_brief(self.delays)}: build DelayedGradients with the same model and delay"
            )
        saved = state_dict["weights"]
        batches = max((len(versions) for versions in saved.values()), default=0)
        for weight in self._weights:
            versions = saved.get(weight.name, [])
            if len(versions) != min(batches, weight.delay):
                raise ValueError(
                    f"the state has {len(versions)} versions of {named(weight.param, weight.name)} after "
                    f"{batches} or more batches with delay {weight.delay}: it is not complete, save it again"
                )
            for version in versions:
                if version.shape != weight.param.shape or version.dtype != weight.param.dtype:
                    raise ValueError(
                        f"a version of shape {list(version.shape)} and {version.dtype} does not fit "
                        f"{named(weight.param, weight.name)} and {weight.param.dtype}: load the state of the "
                        f"same model"
                    )
        for weight in self._weights:
            copies = [version.detach().to(weight.param.device, copy=True) for version in saved[weight.name]]
            weight.versions.clear()
            weight.versions.extend(copies)

    def _refuse_inside(self) -> None:
        if self._inside:
            raise RuntimeError("a batch() is open, in which the model has old weights: leave it first")

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
                "DelayedGradients was built: build a new one"
            )


def pipedream_delays(stages: Sequence[nn.Module | Iterable[nn.Parameter]]) -> dict[nn.Parameter, int]:
    """The delays of the original PipeDream, which grow with the number d of stages.

    Stage r of d has delay d - 1 - r, because that many batches are between its forward and its backward
    (arXiv 1806.03377, section 3.3, weight stashing); the last stage has none.

    Args:
        stages: the model's parts from input to output, modules or groups of parameters, such as
            ``[model.embedding, *model.layers, model.head]``. They need not be pipeline stages in the model.

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
        # A set: one stage may name a parameter twice.
        for param in set(stage.parameters() if isinstance(stage, nn.Module) else stage):
            if param in delays:
                raise ValueError(
                    f"{named(param, None)} is in the stages {len(stages) - 1 - delays[param]} and {index}, "
                    f"which have different delays: put it into one of them"
                )
            delays[param] = delay
    return delays


def _refuse_step(weights: list[_Weight], optimizer: Optimizer, args: object, kwargs: object) -> None:
    known = {param for group in optimizer.param_groups for param in group["params"]}
    if any(weight.param in known for weight in weights):
        raise RuntimeError(
            "optimizer.step() inside batch() would update old weights and be lost: "
            "move it after the with block"
        )


def _checked_delay(delay: Any) -> int:
    if isinstance(delay, bool) or not isinstance(delay, int) or delay < 0:
        raise ValueError(f"a delay must be a whole number of updates, 0 or more, not {delay!r}")
    return delay


def _brief(delays: Mapping[str, int]) -> str:
    """Delays in the words of an error message."""
    shown = ", ".join(f"{name}: {delay}" for name, delay in list(delays.items())[:3])
    return f"{{{shown}{', ...' if len(delays) > 3 else ''}}}"
