"""The moving average of the weights: its formula, saved and resumed, off by default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.poison import poison
from tests.support.selection import slow
from tests.support.trainer_loop import Trained, Trainers, Values, arguments, distance, merged, whole_values
from tests.support.training import RECIPE
from titan_async.config.recipe_file import resolve
from titan_async.errors import UserError

DECAY = 0.75
SECTION = ("--ema.decay", DECAY)
PARALLEL = "--parallelism."
SHARDED = (f"{PARALLEL}pipeline_parallel_degree", 2, f"{PARALLEL}data_parallel_shard_degree", 2)
SCHEDULE = ("--lr_scheduler.total_steps", 6)
"""The learning rates of six steps, for runs of fewer."""
EMA = "train_state.ema_weights."


def keep_weights(trainer: Any, trained: Trained) -> None:
    """Keep the weights before training and after each update; a NaN skips that of batch 1."""
    poison(trainer, {1})
    keep_weights_of_all_updates(trainer, trained)


def keep_weights_of_all_updates(trainer: Any, trained: Trained) -> None:
    trained.extra["weights"] = kept = []
    start, step = trainer._start, trainer.optimizers.step

    def started() -> None:
        kept.append(whole_values(trainer.model_parts))
        start()

    def stepped() -> None:
        step()
        kept.append(whole_values(trainer.model_parts))

    trainer._start, trainer.optimizers.step = started, stepped


def by_formula(results: list[Trained], start: Values | None = None) -> Values:
    """ema = decay * ema + (1 - decay) * weights after each update, in double precision."""
    first, *updates = [
        merged([r.extra["weights"][i] for r in results]) for i in range(len(results[0].extra["weights"]))
    ]
    average = {name: value.double() for name, value in (start or first).items() if "expert_bias" not in name}
    for weights in updates:
        average = {name: DECAY * value + (1 - DECAY) * weights[name] for name, value in average.items()}
    return average


def saved(folder: Path, step: int) -> Values:
    """All tensors of a checkpoint."""
    file = folder / "saved.pt"
    dcp_to_torch_save(folder / f"checkpoint/step-{step}", file)
    state = torch.load(file, weights_only=False)
    averages = state["train_state"].get("ema_weights", {})
    weights = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return weights | {EMA + name: value for name, value in averages.items()}


def average_in(folder: Path, step: int) -> Values:
    return {name.removeprefix(EMA): v for name, v in saved(folder, step).items() if name.startswith(EMA)}


def keys_of(folder: Path, step: int) -> set[str]:
    return set(FileSystemReader(folder / f"checkpoint/step-{step}").read_metadata().state_dict_metadata)


@pytest.mark.parametrize(
    ("ranks", "recipe", "flags"),
    [
        pytest.param(2, "tiny_llama", (), id="delayed"),
        slow(2, "tiny_llama", (f"{PARALLEL}pipeline_parallel_schedule", "1F1B"), id="synchronous"),
        slow(4, "tiny_moe", SHARDED, id="shards and experts"),
        slow(2, "muon_llama", (), id="Muon"),
    ],
)
def test_the_average_follows_its_formula_without_skipped_updates(
    runs: Trainers, tmp_path: Path, ranks: int, recipe: str, flags: tuple
) -> None:
    results = runs(ranks, arguments(tmp_path, recipe, *flags, *SECTION), keep_weights)
    assert len(results[0].extra["weights"]) == 1 + 5, "six batches, one of which made no update"
    mine, expected = average_in(tmp_path, 6), by_formula(results)
    assert distance(mine, expected) < 1e-6
    newest = {name: value for name, value in saved(tmp_path, 6).items() if name in mine}
    assert distance(mine, newest) > 1e-3, "and not the weights"


@pytest.mark.slow
def test_one_stage_alone(runs: Trainers, tmp_path: Path) -> None:
    argv = arguments(tmp_path, "tiny_llama", f"{PARALLEL}pipeline_parallel_degree", 1, *SECTION)
    results = runs(1, argv, keep_weights_of_all_updates)
    assert len(results[0].extra["weights"]) == 1 + 6
    assert distance(average_in(tmp_path, 6), by_formula(results)) < 1e-6


@pytest.mark.slow
def test_the_average_resumes_bit_for_bit(runs: Trainers, tmp_path: Path) -> None:
    runs(2, arguments(tmp_path / "whole", "tiny_llama", *SECTION))
    runs(2, arguments(tmp_path / "halves", "tiny_llama", *SECTION, "--training.steps", 3, *SCHEDULE))
    runs(2, arguments(tmp_path / "halves", "tiny_llama", *SECTION))
    one, other = average_in(tmp_path / "whole", 6), average_in(tmp_path / "halves", 6)
    assert one.keys() == other.keys() and one
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_the_average_resumes_at_other_degrees_or_starts(runs: Trainers, tmp_path: Path) -> None:
    flags = ("--training.steps", 3, *SCHEDULE, "--checkpoint.interval", 3)
    runs(2, arguments(tmp_path, "tiny_llama", *flags))
    assert not any("ema" in key for key in keys_of(tmp_path, 3)), "off by default"
    # A checkpoint without one: it starts from that checkpoint's weights.
    results = runs(
        2,
        arguments(tmp_path, "tiny_llama", *SECTION, *flags[2:], "--training.steps", 4),
        keep_weights_of_all_updates,
    )
    first = merged([r.extra["weights"][0] for r in results])
    there = saved(tmp_path, 3)
    assert all(torch.equal(there[name], value) for name, value in first.items())
    begun = average_in(tmp_path, 4)
    assert distance(begun, by_formula(results)) < 1e-6
    # Two stages of two shards each.
    more = ("--training.steps", 5, "--checkpoint.exclude_from_loading", "dataloader")
    results = runs(
        4,
        arguments(tmp_path, "tiny_llama", *SECTION, *SHARDED, *SCHEDULE, *more),
        keep_weights_of_all_updates,
    )
    assert distance(average_in(tmp_path, 5), by_formula(results, start=begun)) < 1e-6
    assert distance(average_in(tmp_path, 5), by_formula(results)) > 1e-4
    # And a run without one drops it.
    more = ("--training.steps", 6, "--checkpoint.exclude_from_loading", "dataloader")
    runs(2, arguments(tmp_path, "tiny_llama", *SCHEDULE, *more))
    assert not any("ema" in key for key in keys_of(tmp_path, 6))


@pytest.mark.parametrize("decay", ["1.0", "-0.1", "nan"])
def test_a_decay_out_of_range_is_refused(decay: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve([str(RECIPE), "--ema.decay", decay])
    sentence = "set it to a number from 0, which keeps no average, to below 1, such as 0.999"
    message = f"{RECIPE}: ema.decay is {decay}: {sentence}"
    assert str(caught.value) == ("--ema.decay must be a number, not nan" if decay == "nan" else message)
