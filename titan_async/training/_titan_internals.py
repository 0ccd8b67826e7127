"""All private names of torch and torchtitan that the training layer uses.

`tests/training/test_titan_internals.py` fails when one of them is removed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _PipelineSchedule,
    _wait_batch_p2p,
)
from torch.distributed.pipelining.stage import _PipelineStageBase
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.distributed import fsdp
from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part, _split_module
from torchtitan.protocols.module import Module

__all__ = [
    "ScheduleParts",
    "keep_modules",
    "leave_head_to",
    "parts_of",
    "saves_at",
    "split_layers",
    "stages_of",
    "unmanaged",
    "without_fsdp",
    "wrap_initializers",
    "wrap_waits",
]


class ScheduleParts(NamedTuple):
    """The arguments with which `pipeline_llm` builds a schedule."""

    stage: _PipelineStageBase
    n_microbatches: int
    loss_fn: Callable[..., Any] | None


def parts_of(schedule: PipelineScheduleSingle) -> ScheduleParts:
    """The arguments of a schedule of one stage."""
    return ScheduleParts(schedule._stage, schedule._n_microbatches, schedule._loss_fn)


def stages_of(schedule: _PipelineSchedule) -> list[_PipelineStageBase]:
    """The stages that this rank's schedule runs."""
    if isinstance(schedule, PipelineScheduleSingle):
        return [schedule._stage]
    return list(schedule._stages)


def wrap_waits(around: Callable[[Callable[[], None]], None]) -> None:
    """Let all of torch's schedules in this process call `around` with each function that waits for messages.

    A later call replaces `around`.
    """
    schedules._wait_batch_p2p = lambda works: around(partial(_wait_batch_p2p, works))


def saves_at(checkpointer: Any, step: int, last_step: bool) -> bool:
    """Whether torchtitan's checkpointer will save after `step`."""
    return bool(checkpointer.enable and checkpointer._should_save(step, last_step))


def split_layers(num_stages: int, num_layers: int, first_less: int, last_less: int) -> list[list[str]]:
    """torchtitan's split of a decoder into stages, as module names; ValueError if it cannot be done."""
    return _generate_llm_fqn_per_model_part(num_stages, num_layers, first_less, last_less)


def keep_modules(model: nn.Module, names: list[str]) -> nn.Module:
    """A copy of a decoder on the meta device with these modules only, as torchtitan builds it for a stage."""
    return _split_module(model, names)


def leave_head_to(loss: ChunkedLossWrapper, part: nn.Module) -> None:
    """Let a chunked loss apply the output projection of the last stage's `part`, as the trainer does."""
    loss.set_lm_head(part.lm_head)
    part._skip_lm_head = True


def unmanaged(head: nn.Module) -> Any:
    """An output projection for a chunked loss, which then does not manage FSDP around it.

    The loss would gather, reduce and free its weights for each microbatch; a pipeline that stashes several
    weight versions does so for each batch.
    """
    return partial(head)


@contextmanager
def without_fsdp() -> Iterator[None]:
    """Let torchtitan's `parallelize_fn` of any decoder not apply FSDP.

    torchtitan applies it to a single rank too, for its mixed precision.
    """
    applied = fsdp.fully_shard
    fsdp.fully_shard = lambda module, **options: module
    try:
        yield
    finally:
        fsdp.fully_shard = applied


def wrap_initializers(module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace every function with which torchtitan initializes a parameter inside `module`."""
    for submodule in module.modules():
        if isinstance(submodule, Module) and submodule._param_init is not None:
            submodule._param_init = {name: wrap(init) for name, init in submodule._param_init.items()}
