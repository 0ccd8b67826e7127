"""A run that skips updates reports the first non-finite value; a batch without labels has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.selection import slow
from tests.support.trainer_loop import Trained, Trainers, arguments

FROM = 2
"""The first batch that is spoiled, counted from 1; so are all later ones."""


def spoil_activations(trainer: Any, trained: Trained) -> None:
    """A NaN in the output of the first layer, and so in all later ones and in all gradients."""

    def spoil(module: Any, inputs: Any, output: torch.Tensor) -> Any:
        return output * torch.nan if trainer.step >= FROM and module.training else None

    if "0" in trainer.model_parts[0].layers:
        trainer.model_parts[0].layers["0"].register_forward_hook(spoil)
    keep_warnings(trainer, trained)


def spoil_gradients(trainer: Any, trained: Trained) -> None:
    """A NaN in the backward of the last layer, which does not change the loss."""

    def spoil(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if trainer.step >= FROM and output.requires_grad:
            output.register_hook(lambda gradient: gradient * torch.inf * 0)

    if "3" in trainer.model_parts[-1].layers:
        trainer.model_parts[-1].layers["3"].attention.wo.register_forward_hook(spoil)
    keep_warnings(trainer, trained)


def keep_warnings(trainer: Any, trained: Trained) -> None:
    warnings = trained.extra["warnings"] = []
    warn = trainer.reporter.warn

    def keep(text: str) -> None:
        warnings.append(text)
        warn(text)

    trainer.reporter.warn = keep


OUTPUT = ", first in the output of stage 0 (rank 0)"
GRADIENT = ", first in the gradient of layers.3 on stage 1 (rank 1)"


@pytest.mark.parametrize(
    ("spoil", "schedule", "where"),
    [
        (spoil_activations, "Async2BW", OUTPUT),
        (spoil_gradients, "Async2BW", GRADIENT),
        slow(spoil_gradients, "1F1B", GRADIENT),
    ],
)
def test_the_first_non_finite_value_is_reported_once_a_whole_batch_was_checked(
    runs: Trainers, tmp_path: Path, spoil: Any, schedule: str, where: str
) -> None:
    # A checkpoint in between lets a batch be drained.
    flags = (
        "--parallelism.pipeline_parallel_schedule", schedule, "--checkpoint.interval", 4,
        "--validator.no-enable",
    )  # fmt: skip
    results = runs(2, arguments(tmp_path, "tiny_llama", *flags), spoil)
    for result in results:
        places = [
            line.partition("not finite")[2].partition(", so")[0]
            for line in result.extra["warnings"]
            if "is skipped" in line
        ]
        # A gradient is checked after the launch of the next step, and a delayed one a batch later still.
        unknown = 3 if schedule == "Async2BW" else 2
        assert places == [""] * unknown + [where] * (5 - unknown)
        assert all(value.isfinite().all() for value in (*result.after.values(), *result.state.values()))


def leave_labels_out(trainer: Any, trained: Trained) -> None:
    """Ignore all labels of batch 3 and, if the ranks share a batch, those of rank 1 in batch 4."""
    from torchtitan.components.loss import IGNORE_INDEX

    shared = trainer.parallel_dims.dp_enabled and torch.distributed.get_rank() == 1
    next_batch, log = trainer._next_batch, trainer.metrics_processor.log
    logged = trained.extra["logged"] = []

    def emptied(data_iterator: Any) -> Any:
        groups, valid = next_batch(data_iterator)
        if trainer.step == 3 or (trainer.step == 4 and shared):
            groups = [[(x, torch.full_like(y, IGNORE_INDEX)) for x, y in group] for group in groups]
            valid = torch.zeros_like(valid)
        return groups, valid

    def keep(step: int, average: float, largest: float, norm: float | None, **kwargs: Any) -> None:
        logged.append((step, average, largest, norm))
        log(step, average, largest, norm, **kwargs)

    trainer._next_batch, trainer.metrics_processor.log = emptied, keep
    trained.extra["skipped"] = trainer.skipped


@pytest.mark.parametrize("stages", [slow(1), 2])
def test_a_batch_without_labels_has_a_loss_and_a_gradient_of_zero(
    runs: Trainers, tmp_path: Path, stages: int
) -> None:
    # 1F1B reports the norm of a batch with its loss.
    flags = (
        "--parallelism.pipeline_parallel_degree", stages, "--parallelism.pipeline_parallel_schedule", "1F1B",
        "--parallelism.data_parallel_shard_degree", 2 // stages, "--checkpoint.no-enable",
        "--training.steps", 5,
    )  # fmt: skip
    results = runs(2, arguments(tmp_path, "tiny_llama", *flags), leave_labels_out)
    for result in results:
        assert result.extra["skipped"].total == 0
        assert [step for step, average, *_ in result.extra["logged"] if not average] == [3]
        assert [step for step, *_, norm in result.extra["logged"] if not norm] == [3]
        assert torch.tensor(result.extra["logged"], dtype=torch.float64).isfinite().all()
