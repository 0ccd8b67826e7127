"""A non-finite gradient on one stage skips the update of all, and does not affect other updates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.poison import poison
from tests.support.selection import slow
from tests.support.trainer_loop import (
    Trained,
    Trainers,
    arguments,
    distance,
    loop,
    merged,
    whole_values,
)
from tests.support.training import RECIPE, train
from tests.training.test_not_finite import keep_warnings
from titan_async.cli import main
from titan_async.errors import UserError
from titan_async.training.telemetry.not_finite import SkippedUpdates


def poison_two_batches(trainer: Any, trained: Trained) -> None:
    """Poison the last stage's gradients of batches 1 and 4; a checkpoint drains batch 1."""
    poison(trainer, {1, 4})
    log = trainer.metrics_processor.log
    keep_warnings(trainer, trained)
    skipped = trained.extra["skipped"] = []

    def logged(*args: Any, **kwargs: Any) -> None:
        skipped.append(kwargs["extra_metrics"]["skipped_updates"])
        log(*args, **kwargs)

    trainer.metrics_processor.log = logged
    step, moved = trainer.optimizers.step, trained.extra.setdefault("moved", [])

    def stepped() -> None:
        before = whole_values(trainer.model_parts)
        step()
        moved.append(distance(before, whole_values(trainer.model_parts)) > 0)

    trainer.optimizers.step = stepped


@pytest.mark.parametrize("optimizer", ["sgd", slow("adamw"), "muon"])
def test_no_stage_updates(runs: Trainers, tmp_path: Path, optimizer: str) -> None:
    argv = arguments(tmp_path, "tiny_llama", "--optimizer.name", optimizer, "--checkpoint.interval", 2)
    results = runs(2, argv, poison_two_batches)
    before, after = merged([r.before for r in results]), merged([r.after for r in results])
    if optimizer == "sgd":
        # The loop's momenta and update history do not include the skipped batches.
        assert distance(after, loop(argv, before, skipped={1, 4}).after) < 2e-6
        assert distance(after, loop(argv, before, skipped={2, 4}).after) > 1e-3
    for result in results:
        # SGD, which cannot skip on the device, is not called.
        updates = [batch not in {1, 4} for batch in range(6)]
        assert result.extra["moved"] == ([True] * 4 if optimizer == "sgd" else updates)
        assert all(value.isfinite().all() for value in result.state.values())
        # Batch 1 is drained after step 2, for a checkpoint; batch 4 is complete after step 6.
        assert result.extra["skipped"] == [0, 1, 1, 1, 1, 2]
    assert [line for line in results[0].extra["warnings"] if line.startswith("step ")] == [
        "step 2: the gradient is not finite, so its update is skipped (1 so far)",
        "step 6: the gradient is not finite, so its update is skipped (2 so far)",
    ]


def spoil_a_gradient(trainer: Any, trained: Trained) -> None:
    """A hook after the clip that makes one of the last stage's gradients infinite, at step 3."""

    def spoil(*_: Any) -> None:
        if trainer.step == 3 and trainer.pp_has_last_stage:
            parameter = trainer.model_parts[0].get_parameter("layers.3.attention.wo.weight")
            parameter.grad[0, 0] = torch.inf
        trained.extra["seen"] = trainer.skipped

    trainer.optimizers.register_step_pre_hook(spoil)


def test_a_non_finite_gradient_found_by_muon_counts_once_on_its_rank(runs: Trainers, tmp_path: Path) -> None:
    argv = arguments(tmp_path, "muon_llama", "--validator.no-enable", "--checkpoint.interval", 6)
    first, last = runs(2, argv, spoil_a_gradient)
    assert [rank.extra["seen"].total for rank in (first, last)] == [0, 1]
    assert last.extra["seen"].in_a_row == 0
    assert all(value.isfinite().all() for value in (*last.after.values(), *last.state.values()))


def test_skipped_updates_are_counted() -> None:
    skipped, warnings = SkippedUpdates(max_in_a_row=3), []
    for step, finite in enumerate([False, False, True, False, False], start=1):
        skipped.count(finite, step, "", warnings.append)
    assert (skipped.total, skipped.in_a_row) == (4, 2)
    assert [line[:6] for line in warnings] == ["step 1", "step 2", "step 4", "step 5"]
    with pytest.raises(UserError, match="not finite 3 times in a row up to step 6: lower the learning rate"):
        skipped.count(False, 6, "", warnings.append)


def test_too_many_in_a_row_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from titan_async.recipes.debug import debug\n"
        "from titan_async.training.trainer import AsyncTrainer\n"
        "from tests.support.poison import poison\n\n"
        "plain_start = AsyncTrainer._start\n\n\n"
        "def start(self):\n    poison(self, range(2, 1000))\n    plain_start(self)\n\n\n"
        "AsyncTrainer._start = start\n\n\n"
        "def poisoned() -> AsyncTrainer.Config:\n    return debug()\n"
    )
    (tmp_path / "own.toml").write_text('recipe = "poisoned"\n')
    run = train(
        tmp_path, "--module", "own", "--metrics.log_freq", 1, "--max_skipped_updates", 4, recipe="own.toml"
    )
    assert run.status == 2
    assert run.err == (
        "the gradient was not finite 4 times in a row up to step 7, first in the gradient of lm_head.weight "
        "on stage 1 (rank 1): lower the learning rate or training.max_norm, or look at the data "
        "(max_skipped_updates sets the limit)\n"
    )
    found = re.findall(r"^step (\d+): the gradient is not finite, so its update is skipped \((\d) so far\)$",
                      run.out, re.MULTILINE)  # fmt: skip
    assert found == [("4", "1"), ("5", "2"), ("6", "3")]
    assert run.steps == [1, 2, 3, 4, 5, 6]


def test_max_skipped_updates_of_0_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main(["train", str(RECIPE), "--max_skipped_updates", "0"]) == 2
    assert capfd.readouterr().err == "max_skipped_updates is 0: set it to at least 1\n"
