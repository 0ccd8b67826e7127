"""Mixtures of experts under Async2BW: weights, routers' biases and token counts follow the recurrence.

The bias follows the counts as the weights follow the gradient: batch b counts at weights and biases of
version max(b-1, 0), and its counts move the bias once, with its gradient.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.poison import poison
from tests.support.selection import slow
from tests.support.trainer_loop import Trained, Trainers, arguments, distance, loop, merged


def in_float32(trainer: Any, trained: Trained) -> None:
    """Let experts compute in float32: in torchtitan's bfloat16, sums in another order may differ by 1e-2."""
    torch.Tensor.bfloat16 = torch.Tensor.float


def count_pairs(trainer: Any, trained: Trained) -> None:
    """`in_float32`, and the number of overlapped pairs of the rank."""
    in_float32(trainer, trained)
    trained.extra["pairs"], overlap = 0, trainer.pp_schedule._executor._overlap
    if overlap is None:
        return
    run = overlap.run

    def counting_run(*args: Any) -> None:
        trained.extra["pairs"] += 1
        run(*args)

    overlap.run = counting_run


EXPERT_PARALLEL = ("--parallelism.data_parallel_shard_degree", 2, "--parallelism.expert_parallel_degree", 2)
"""The experts are spread over the two data-parallel ranks of a stage."""

COMPILED = ("--compile.enable", "--compile.backend", "aot_eager", "--validator.no-enable")

OVERLAP = "--pipeline.overlap"

LAYOUTS = [
    slow(2, 1, "tiny_moe", (), id="2 stages"),
    slow(2, 1, "tiny_mixed", (), id="a stage without experts"),
    slow(2, 1, "tiny_moe", ("activation_checkpoint:full",), id="full checkpointing"),
    pytest.param(2, 1, "tiny_mixed", ("activation_checkpoint:full",), id="mixed, full checkpointing"),
    slow(2, 1, "tiny_moe", ("activation_checkpoint:selective",), id="selective checkpointing"),
    slow(2, 1, "tiny_moe", ("--training.global_batch_size", 8, *COMPILED), id="accumulation, compiled"),
    slow(4, 2, "tiny_moe", ("--parallelism.data_parallel_shard_degree", 2), id="FSDP"),
    slow(4, 2, "tiny_moe", EXPERT_PARALLEL, id="EP"),
    slow(4, 2, "muon_moe", EXPERT_PARALLEL, id="EP, Muon"),
    pytest.param(
        4,
        2,
        "muon_moe",
        (*EXPERT_PARALLEL, "activation_checkpoint:full", OVERLAP),
        id="EP, Muon, full checkpointing, overlapped pairs",
    ),
    slow(4, 2, "muon_mixed", (*EXPERT_PARALLEL, "activation_checkpoint:full"), id="EP, mixed, full"),
    *[
        slow(
            4,
            2,
            "tiny_mixed" if "full" in checkpointing else "tiny_moe",
            (*EXPERT_PARALLEL, *checkpointing.split(), OVERLAP, *compiled),
            id=f"overlapped pairs, {checkpointing or 'no'} checkpointing{', compiled' if compiled else ''}",
        )
        for checkpointing in ("", "activation_checkpoint:selective", "activation_checkpoint:full")
        for compiled in ((), COMPILED)
    ],
]


@pytest.mark.parametrize(("ranks", "shares", "recipe", "flags"), LAYOUTS)
def test_experts_follow_the_recurrence(
    runs: Trainers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    shares: int,
    recipe: str,
    flags: tuple[object, ...],
) -> None:
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    argv = arguments(tmp_path, recipe, *flags)
    results = runs(ranks, argv, count_pairs)
    assert all((result.extra["pairs"] > 0) == (OVERLAP in flags) for result in results)
    before, after = merged([r.before for r in results]), merged([r.after for r in results])
    assert not any(map(is_repeated, before.values()))
    wanted = loop(argv, before, shares=shares)
    assert distance(after, wanted.after) < 3e-6
    synchronous = loop(argv, before, shares=shares, delay=0)
    assert distance(after, synchronous.after) > 1e-3
    assert distance(biases(after), biases(wanted.after)) < 1e-7
    assert distance(biases(after), biases(synchronous.after)) > 1e-3
    counts = counts_of(results, ranks // shares)
    # A checkpointed layer counts in forward and, unless it is compiled, once more in its recomputation;
    # torchtitan halves that.
    counts_twice = any("checkpoint:" in str(flag) for flag in flags) and COMPILED[0] not in flags
    times = 2 if counts_twice else 1
    assert len(counts) == len(wanted.counts)
    for found, expected in zip(counts, wanted.counts, strict=True):
        assert distance(found, {name: times * value for name, value in expected.items()}) == 0
    for result in results:
        assert result.losses == pytest.approx(wanted.losses, abs=1e-5)


def is_repeated(weights: torch.Tensor) -> bool:
    """Whether both halves of a matrix or of a stack are equal, as if each shard were drawn alone."""
    half = len(weights) // 2
    return weights.ndim > 1 and torch.equal(weights[:half], weights[half:])


def biases(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if name.endswith("expert_bias_E")}


def counts_of(results: list[Trained], stages: int) -> list[dict[str, torch.Tensor]]:
    """For each update the counts of all layers, summed over the data-parallel ranks of a stage."""
    shares = len(results) // stages
    updates = zip(*(result.counts for result in results), strict=True)
    return [
        {
            name: sum(rank[name] for rank in update[first : first + shares])
            for first in range(0, len(results), shares)
            for name in update[first]
        }
        for update in updates
    ]


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [pytest.param(2, (), id="2 stages"), slow(4, (*EXPERT_PARALLEL, OVERLAP), id="EP, overlapped pairs")],
)
def test_resuming_does_not_change_training(
    runs: Trainers, tmp_path: Path, ranks: int, flags: tuple[object, ...]
) -> None:
    flags = (*flags, "--lr_scheduler.total_steps", 4, "--optimizer.name", "adamw", "--training.steps")
    undisturbed = runs(ranks, arguments(tmp_path / "whole", "tiny_moe", *flags, 4))
    first = runs(ranks, arguments(tmp_path / "halves", "tiny_moe", *flags, 2))
    resumed = runs(ranks, arguments(tmp_path / "halves", "tiny_moe", *flags, 4))
    assert [len(each.counts) for each in (first[0], resumed[0])] == [2, 2]
    for one, other in zip(undisturbed, resumed, strict=True):
        assert distance(one.after, other.after) == 0
        assert distance(one.state, other.state) == 0
        assert any(name.endswith("expert_bias_E") for name in one.state), "the next batch's bias is not saved"


def poison_batch_2(trainer: Any, trained: Trained) -> None:
    in_float32(trainer, trained)
    poison(trainer, {2})


@pytest.mark.parametrize("flags", [(), slow((OVERLAP,))], ids=["", "overlapped pairs"])
def test_counts_of_a_skipped_update_are_dropped(
    runs: Trainers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    argv = arguments(tmp_path, "tiny_moe", "--validator.no-enable", *flags)
    results = runs(2, argv, poison_batch_2)
    before, after = merged([r.before for r in results]), merged([r.after for r in results])
    wanted = loop(argv, before, skipped={2})
    assert distance(after, wanted.after) < 3e-6
    counts = counts_of(results, 2)
    assert len(counts) == 5
    for found, expected in zip(counts, [c for b, c in enumerate(wanted.counts) if b != 2], strict=True):
        assert distance(found, expected) == 0
