"""One rank of a run, built and trained for a few steps in its own process with a fake process group."""

import contextlib
import gc
import logging
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import SavePlan
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_async.config.device import ensure_device

ensure_device()

from torchtitan.components.checkpointer.utils import canonical_fqn  # noqa: E402
from torchtitan.config import TORCH_DTYPE_MAP  # noqa: E402
from torchtitan.tools import utils  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from titan_async.rehearsal._torch_internals import set_message_metas, stage_of  # noqa: E402
from titan_async.rehearsal.narrow_config import narrowed, prepared  # noqa: E402
from titan_async.rehearsal.save_plans import plan_of  # noqa: E402

__all__ = ["Shape", "Trained", "build_at_real_width", "for_each", "rehearse"]


@dataclass(frozen=True)
class Shape:
    """The stage of a rank."""

    rank: int
    stage: int
    modules: tuple[str, ...]
    """Its modules that have parameters."""
    parameters: int
    """Of the stage."""
    local_parameters: int
    """Of this rank's shard."""


@dataclass(frozen=True)
class Trained:
    """The result of a rank's training in a rehearsal, and its save plan."""

    rank: int
    stage: int
    updates: int
    changed: int
    """Number of parameters whose shard on this rank had a gradient; all of them changed."""
    without_gradient: tuple[str, ...]
    """Parameters whose gradients were all zero on this rank."""
    loss: float | None
    """Of the last step, on the last stage."""
    plan: SavePlan


def build_at_real_width(config: Trainer.Config, rank: int, world: int) -> Shape:
    """Build a rank on the meta device, where tensors have shapes and no values.

    Call it through `for_each`: torch does not reset the rank of a process.
    """
    with _as_rank(rank, world), tempfile.TemporaryDirectory() as folder:
        before = utils.device_type
        utils.device_type = "meta"  # where torchtitan allocates parameters
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
    """Train a rank for a few steps with a fake process group, and plan its part of a checkpoint.

    Call it through `for_each`: torch does not reset the rank of a process.

    Args:
        config: the recipe's; not changed.
        rank: of this process.
        world: ranks of the run.
        steps: updates; with 0 the rank is only built, and its save plan is that of the initial state.
        divisor: of all widths.

    Raises:
        RuntimeError: if a parameter's shard had a gradient and did not change, or is not finite, or the
            number of updates is not `steps`.
    """
    with _as_rank(rank, world), tempfile.TemporaryDirectory() as folder, FakeReceives(seed=rank):
        trainer = narrowed(prepared(config, steps=steps, folder=folder), divisor).build()
        if trainer.parallel_dims.pp_enabled:
            _set_message_metas(trainer)
        tracker = _ParameterTracker(trainer)
        saved: dict[str, Any] = {}

        def save(state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            saved.update(state)

        trainer.checkpointer.dcp_save = save
        if steps:
            trainer.train()
        else:
            trainer.checkpointer.save(0, last_step=True)
        changed, without_gradient = tracker.check(steps)
        return Trained(
            rank=rank,
            stage=_stage_index(trainer),
            updates=tracker.updates,
            changed=changed,
            without_gradient=without_gradient,
            loss=tracker.loss,
            plan=plan_of(saved, rank),
        )


def for_each(function: Callable[..., Any], calls: Iterable[tuple]) -> Iterator[Any]:
    """The results of `function(*call)` for each of `calls`, in their order.

    Each call runs in its own process, because torch does not reset the rank of a process; as many run at a
    time as there are cores. The processes are forked from one that has only imported this module.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["titan_async.rehearsal.rank"])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ProcessPoolExecutor(cores, mp_context=context, max_tasks_per_child=1) as pool:
        futures = [pool.submit(function, *call) for call in calls]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


class FakeReceives(TorchDispatchMode):
    """Completes torch's backend "fake": received tensors are filled with normally distributed noise.

    That backend returns immediately. Its collectives behave as if all ranks had this rank's data, but it does
    not write to the buffer of a receive, and an uneven all-to-all lacks data if this rank sends too little.

    Args:
        seed: of the noise.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.c10d.alltoall_base_.default and args[3]:
            # (output, input, group, output splits, input splits, ...): input as large as the output.
            sent = self._noise(args[0])
            args = (args[0], sent, args[2], args[3], args[3], *args[5:])
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.c10d.recv_.default:
            for tensor in args[0]:
                with torch.no_grad():
                    tensor.copy_(self._noise(tensor))
        return result

    def _noise(self, like: Tensor) -> Tensor:
        if not like.is_floating_point():
            return torch.zeros_like(like)
        noise = torch.randn(like.shape, generator=self._generator, dtype=torch.float32)
        return noise.to(like)


@contextlib.contextmanager
def _as_rank(rank: int, world: int) -> Iterator[None]:
    """Set this process up as one rank of a run, without output."""
    os.environ |= {"NGPU": str(world), "WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": "0"}
    os.environ["LOG_RANK"] = ",".join(map(str, range(world)))
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.freeze()  # excludes imported objects from torchtitan's frequent garbage collections
    with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _set_message_metas(trainer: Trainer) -> None:
    training = trainer.config.training
    microbatch = trainer.config.parallelism.pipeline_parallel_microbatch_size
    tokens = torch.Size((microbatch, training.seq_len))
    set_message_metas(
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


class _ParameterTracker:
    """Tracks which parameters had nonzero gradients, and whether they changed."""

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
            self._note_gradients()
            self.updates += 1
            return step(*args, **kwargs)

        def observed_run(**kwargs: Any) -> torch.Tensor:
            loss = run(**kwargs)
            if not trainer.parallel_dims.pp_enabled or trainer.pp_has_last_stage:
                self.loss = float(loss)
            return loss

        trainer.optimizers.step = counted_step
        trainer.forward_backward_step = observed_run

    def _note_gradients(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and bool(_local(parameter.grad).any()):
                self._had_gradient.add(name)

    def check(self, steps: int) -> tuple[int, tuple[str, ...]]:
        """The number of shards that changed, and the parameters without gradient.

        Raises:
            RuntimeError: see `rehearse`.
        """
        if self.updates != steps:
            raise RuntimeError(f"{self.updates} updates after {steps} batches")
        unchanged = [
            name
            for name in sorted(self._had_gradient)
            if torch.equal(_local(self._parameters[name]), self._before[name])
        ]
        if unchanged:
            raise RuntimeError(f"parameters with gradients did not change: {', '.join(unchanged)}")
        not_finite = [n for n, value in self._parameters.items() if not _local(value).isfinite().all()]
        if not_finite:
            raise RuntimeError(f"parameters are not finite after {steps} updates: {', '.join(not_finite)}")
        sharded_here = {name for name, value in self._before.items() if value.numel()}
        return len(self._had_gradient), tuple(sorted(sharded_here - self._had_gradient))
