"""One rank of a run, built and trained for a few steps in a process of its own."""

import contextlib
import gc
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import SavePlan
from torch.distributed.tensor import DTensor

from titan_async.config.device import ensure_device

ensure_device()

from torchtitan.components.checkpointer.utils import canonical_fqn  # noqa: E402
from torchtitan.config import TORCH_DTYPE_MAP  # noqa: E402
from torchtitan.tools import utils  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from titan_async.rehearsal._torch_internals import stage_of, state_messages  # noqa: E402
from titan_async.rehearsal.narrow import narrowed, prepared  # noqa: E402
from titan_async.rehearsal.peers import Peers  # noqa: E402
from titan_async.rehearsal.saved import plan_of  # noqa: E402

__all__ = ["Shape", "Trained", "build_at_real_width", "rehearse"]


@dataclass(frozen=True)
class Shape:
    """What lies on a rank."""

    rank: int
    stage: int
    modules: tuple[str, ...]
    """The parts of the model, without those that hold no parameter."""
    parameters: int
    """Of the rank's stage."""
    local_parameters: int
    """Of the rank itself."""


@dataclass(frozen=True)
class Trained:
    """What a rank did in a rehearsal, and what it would have saved after it."""

    rank: int
    stage: int
    updates: int
    moved: int
    """Parameters of which this rank holds a part that has had a gradient; all of these have changed."""
    still: tuple[str, ...]
    """The parameters whose part here has never had a gradient other than zero."""
    loss: float | None
    """Of the last step, on the last stage."""
    plan: SavePlan


def build_at_real_width(config: Trainer.Config, rank: int, world: int) -> Shape:
    """Build a rank on the meta device, where tensors have shapes and no values.

    For a process of its own, as all functions here: torch keeps the rank for good.
    """
    with _as_rank(rank, world), tempfile.TemporaryDirectory() as folder:
        before = utils.device_type
        utils.device_type = "meta"  # where torchtitan puts the parameters
        try:
            trainer = prepared(config, steps=1, folder=folder).build()
        finally:
            utils.device_type = before
        part = trainer.model_parts[0]
        named = list(part.named_parameters())
        return Shape(
            rank=rank,
            stage=_stage_index(trainer),
            modules=tuple(_modules(part)),
            parameters=sum(parameter.numel() for _, parameter in named),
            local_parameters=sum(_local(parameter).numel() for _, parameter in named),
        )


def rehearse(config: Trainer.Config, rank: int, world: int, *, steps: int, divisor: int) -> Trained:
    """Train a rank for a few steps among imaginary peers, and plan its part of a checkpoint.

    Args:
        config: the recipe's; not changed.
        rank: which one to be.
        world: ranks of the run.
        steps: updates; with none the rank is built, and plans the checkpoint of its state as it then is.
        divisor: of all widths.

    Raises:
        RuntimeError: a part of a parameter has had a gradient and is what it was, or is no longer finite; or
            there was another number of updates.
    """
    with _as_rank(rank, world), tempfile.TemporaryDirectory() as folder, Peers(seed=rank):
        trainer = narrowed(prepared(config, steps=steps, folder=folder), divisor).build()
        if trainer.parallel_dims.pp_enabled:
            _state_messages(trainer)
        watch = _Watch(trainer)
        saved: dict[str, Any] = {}

        def save(state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            saved.update(state)

        trainer.checkpointer.dcp_save = save
        if steps:
            trainer.train()
        else:
            trainer.checkpointer.save(0, last_step=True)
        moved, still = watch.judge(steps)
        return Trained(
            rank=rank,
            stage=_stage_index(trainer),
            updates=watch.updates,
            moved=moved,
            still=still,
            loss=watch.loss,
            plan=plan_of(saved, rank),
        )


@contextlib.contextmanager
def _as_rank(rank: int, world: int) -> Iterator[None]:
    """Let this process be one of a run's, without a word."""
    os.environ |= {"NGPU": str(world), "WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": "0"}
    os.environ["LOG_RANK"] = ",".join(map(str, range(world)))
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.freeze()  # torchtitan collects garbage often: not that of the imports
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _state_messages(trainer: Trainer) -> None:
    training, microbatch = (
        trainer.config.training,
        trainer.config.parallelism.pipeline_parallel_microbatch_size,
    )
    tokens = torch.Size((microbatch, training.seq_len))
    state_messages(
        stage_of(trainer.pp_schedule),
        tokens,
        torch.Size((*tokens, trainer.model_config.dim)),
        TORCH_DTYPE_MAP[training.mixed_precision_param],
    )


def _stage_index(trainer: Trainer) -> int:
    return stage_of(trainer.pp_schedule).stage_index if trainer.parallel_dims.pp_enabled else 0


def _modules(part: nn.Module) -> Iterator[str]:
    for name, child in part.named_children():
        if name == "layers":
            yield from (f"layers.{index}" for index, _ in child.named_children())
        elif any(True for _ in child.parameters()):
            yield name


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Watch:
    """Sees which parameters have had gradients, and whether they have moved."""

    def __init__(self, trainer: Trainer) -> None:
        self._parameters = {
            canonical_fqn(name): parameter
            for part in trainer.model_parts
            for name, parameter in part.named_parameters()
        }
        self._before = {name: _local(value).detach().clone() for name, value in self._parameters.items()}
        self._had_gradient: set[str] = set()
        self.updates = 0
        self.loss: float | None = None
        step, run = trainer.optimizers.step, trainer.forward_backward_step

        def counted_step(*args: Any, **kwargs: Any) -> Any:
            self._look_at_gradients()
            self.updates += 1
            return step(*args, **kwargs)

        def observed_run(**kwargs: Any) -> torch.Tensor:
            loss = run(**kwargs)
            if not trainer.parallel_dims.pp_enabled or trainer.pp_has_last_stage:
                self.loss = float(loss)
            return loss

        trainer.optimizers.step = counted_step
        trainer.forward_backward_step = observed_run

    def _look_at_gradients(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and bool(_local(parameter.grad).any()):
                self._had_gradient.add(name)

    def judge(self, steps: int) -> tuple[int, tuple[str, ...]]:
        """How many parts of parameters have moved, and which have had no gradient."""
        if self.updates != steps:
            raise RuntimeError(f"{steps} batches led to {self.updates} updates")
        unmoved = [
            name
            for name in sorted(self._had_gradient)
            if torch.equal(_local(self._parameters[name]), self._before[name])
        ]
        if unmoved:
            raise RuntimeError(f"gradients but no change: {', '.join(unmoved)}")
        broken = [name for name, value in self._parameters.items() if not _local(value).isfinite().all()]
        if broken:
            raise RuntimeError(f"not finite after {steps} updates: {', '.join(broken)}")
        there = {name for name, value in self._before.items() if value.numel()}
        return len(self._had_gradient), tuple(sorted(there - self._had_gradient))
