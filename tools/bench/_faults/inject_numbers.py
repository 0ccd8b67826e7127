"""Non-finite values, losses that are too large, and batches without labels, injected into the trainer.

A fault has a place, the steps of the batches that it affects, and options of its place. Because the pipeline
delivers gradients one batch late, the update of step 5's batch is in step 6.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.models.common.moe import GroupedExperts

from titan_async.training.trainer import AsyncTrainer

MICROBATCH = 1
"""The microbatch of a batch that a fault affects."""

NORMS = "norms-{rank}.json"
"""File with the norms of clipped gradients on a rank (place "norms")."""


def install(rank: int, faults: Sequence[Mapping[str, Any]]) -> None:
    """Injects the faults into the trainer of this rank."""
    plain_start = AsyncTrainer._start

    def start(trainer: AsyncTrainer) -> None:
        for fault in faults:
            options = dict(fault)
            _PLACES[options.pop("place")](trainer, rank, **options)
        plain_start(trainer)

    AsyncTrainer._start = start


def _spoil_activations(
    trainer: AsyncTrainer, rank: int, *, stage: int, layer: str, steps: Sequence[int], value: float
) -> None:
    """Changes one element of a layer's output, in one microbatch."""
    if rank == stage:
        is_affected = _forwards(trainer, steps)

        def spoil(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
            return _with(output, value) if is_affected() else None

        trainer.model_parts[0].get_submodule(layer).register_forward_hook(spoil)


def _spoil_expert(
    trainer: AsyncTrainer, rank: int, *, stage: int, layer: str, steps: Sequence[int], value: float
) -> None:
    """Changes the outputs of a layer's most used expert, in one microbatch."""
    if rank == stage:
        is_affected = _forwards(trainer, steps)

        def spoil(module: torch.nn.Module, inputs: tuple[Tensor, Tensor], output: Tensor) -> Tensor | None:
            if not is_affected():
                return None
            behind, busiest = inputs[1].cumsum(0), int(inputs[1].argmax())
            output = output.clone()
            output[int(behind[busiest] - inputs[1][busiest]) : int(behind[busiest])] = value
            return output

        layers = trainer.model_parts[0].get_submodule(layer).modules()
        (experts,) = (module for module in layers if isinstance(module, GroupedExperts))
        experts.register_forward_hook(spoil)


def _spoil_gradient(
    trainer: AsyncTrainer, rank: int, *, stage: int, parameter: str, steps: Sequence[int], value: float
) -> None:
    """Changes one element of a parameter's gradient, in one microbatch."""
    if rank == stage:
        schedule, done = trainer.pp_schedule, 0
        backward = schedule._stage.backward_one_chunk

        def spoil(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            result = backward(*args, **kwargs)
            batch, microbatch = divmod(done, schedule._n_microbatches)
            done += 1
            if batch + 1 in steps and microbatch == MICROBATCH:
                # The module has the weight version that this backward uses.
                trainer.model_parts[0].get_parameter(parameter).grad.view(-1)[0] = value
            return result

        schedule._stage.backward_one_chunk = spoil


def _scale_loss(trainer: AsyncTrainer, rank: int, *, steps: Sequence[int], factor: float) -> None:
    """Scales the losses of whole batches."""
    schedule, loss_fn = trainer.pp_schedule, trainer.pp_schedule._loss_fn

    def scaled(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        loss = loss_fn(output, *args, **kwargs)
        return loss * factor if output.requires_grad and trainer.step in steps else loss

    schedule._loss_fn = scaled


def _draw_tokens(trainer: AsyncTrainer, rank: int, *, steps: Sequence[int]) -> None:
    """Replaces inputs and labels of whole batches by random tokens, the same on all ranks."""

    def draw(inputs: dict[str, Tensor], labels: Tensor, generator: torch.Generator) -> Any:
        tokens = torch.randint(0, 2048, labels.shape, generator=generator)
        return inputs | {"input": tokens}, tokens.roll(1, dims=1)

    _change_batches(trainer, steps, draw)


def _ignore_labels(trainer: AsyncTrainer, rank: int, *, steps: Sequence[int]) -> None:
    """Ignores all labels of whole batches."""
    _change_batches(trainer, steps, lambda inputs, labels, _: (inputs, torch.full_like(labels, IGNORE_INDEX)))


def _watch_norms(trainer: AsyncTrainer, rank: int) -> None:
    """Injects no fault; writes the norms of gradients after clipping."""
    norms, clip = [], trainer._clip

    def watched() -> Tensor:
        norm = clip()
        gradients = [parameter.grad for part in trainer.model_parts for parameter in part.parameters()]
        norms.append(float(torch.stack([gradient.norm() for gradient in gradients]).norm()))
        Path(trainer.config.dump_folder, NORMS.format(rank=rank)).write_text(json.dumps(norms))
        return norm

    trainer._clip = watched


def _undo_updates(trainer: AsyncTrainer, rank: int, *, steps: Sequence[int]) -> None:
    """Makes the updates of these batches, and then reverts everything that they changed.

    This is an independent computation of the state of a run that skips them.
    """
    update, done = trainer._update, 0

    def undone() -> None:
        nonlocal done
        done += 1
        if done not in steps:
            return update()
        tensors = list(_tensors_of(trainer))
        before = [tensor.clone() for tensor in tensors]
        update()
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)

    trainer._update = torch.no_grad()(undone)


def _tensors_of(trainer: AsyncTrainer) -> Any:
    """All tensors that an update changes, except counters."""
    for part in trainer.model_parts:
        yield from (parameter.data for parameter in part.parameters())
        yield from (buffer for name, buffer in part.named_buffers() if "tokens_per_expert" not in name)
    for optimizer in trainer.optimizers.optimizers:
        # With error feedback these are its history and the state of the wrapped optimizer.
        for entries in optimizer.state.values():
            yield from entries.values()
    if trainer.average is not None:
        yield from trainer.average.state_dict().values()


def _forwards(trainer: AsyncTrainer, steps: Sequence[int]) -> Callable[[], bool]:
    """A function that each forward calls, and that returns whether a fault of these steps affects it."""
    step, done = 0, 0

    def is_affected() -> bool:
        nonlocal step, done
        if trainer.step != step:
            step, done = trainer.step, 0
        done += 1
        return trainer.pp_schedule._has_backward and step in steps and done - 1 == MICROBATCH

    return is_affected


def _with(tensor: Tensor, value: float) -> Tensor:
    # As a sum, so that the gradient is propagated.
    spoiled = torch.zeros_like(tensor)
    spoiled.view(-1)[0] = value
    return tensor + spoiled


def _change_batches(trainer: AsyncTrainer, steps: Sequence[int], change: Callable[..., Any]) -> None:
    next_batch = trainer._next_batch

    def changed(data_iterator: Any) -> Any:
        groups, valid = next_batch(data_iterator)
        if trainer.step not in steps:
            return groups, valid
        generator = torch.Generator().manual_seed(trainer.step)
        groups = [[change(*microbatch, generator) for microbatch in group] for group in groups]
        labels = [labels for group in groups for _, labels in group]
        return groups, torch.stack([(part != IGNORE_INDEX).sum() for part in labels]).sum()

    trainer._next_batch = changed


_PLACES: dict[str, Callable[..., None]] = {
    "activations": _spoil_activations,
    "expert": _spoil_expert,
    "gradient": _spoil_gradient,
    "loss": _scale_loss,
    "tokens": _draw_tokens,
    "labels": _ignore_labels,
    "norms": _watch_norms,
    "undo": _undo_updates,
}
