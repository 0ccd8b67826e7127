"""Rehearses the recipe of a 10B mixture of experts: 64 ranks on 4 stages, 16-way FSDP, 8-way experts.

Training uses the first few layers and a small vocabulary; tests that build all ranks use 16.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import SavePlan
from torchtitan.trainer import Trainer

from titan_async.config.recipe_file import resolve
from titan_async.errors import UserError
from titan_async.rehearsal.narrow_config import narrowed, prepared, world_size
from titan_async.rehearsal.rank import build_at_real_width, for_each, rehearse
from titan_async.rehearsal.save_plans import Entries, check_plans, expected_entries
from titan_async.training.preflight.check import check

ROOT = Path(__file__).parents[2]

WORLD, STAGES = 64, 4
MICROBATCHES = 2 * STAGES - 1
"""The minimum for the recipe's overlapped pairs."""
DIVISOR = 16
"""At 32 a rank has one row of the key projection, the fake all-gather repeats it, and keys are constant."""
DIVISOR_OF_ALL = 32
"""For tests that build all ranks."""
RANKS = [0, 17, 34, 63]
"""One of each stage."""
SHARDS = 4
"""Ranks per stage in tests that build all ranks, with expert parallelism over half of them."""
VOCABULARY = 2048


def of_recipe(shards: int, experts: int) -> Trainer.Config:
    return resolve(
        [
            str(ROOT / "toml_configs/moe_10b_200b.toml"),
            "--parallelism.pipeline_parallel_degree", str(STAGES),
            "--parallelism.data_parallel_shard_degree", str(shards),
            "--parallelism.expert_parallel_degree", str(experts),
            "--parallelism.pipeline_parallel_microbatch_size", "1",
            "--training.local_batch_size", str(MICROBATCHES),
            "--training.global_batch_size", str(MICROBATCHES * shards),
            "--optimizer.muon.compute_dtype", "float32",
        ]
    )  # fmt: skip


def shallow(config: Trainer.Config) -> Trainer.Config:
    """With layers for three stages and a small vocabulary; the last stage has only norm and head."""
    model = config.model_spec.model
    model = dataclasses.replace(
        model,
        layers=model.layers[:6],
        vocab_size=VOCABULARY,
        tok_embeddings=dataclasses.replace(model.tok_embeddings, num_embeddings=VOCABULARY),
        lm_head=dataclasses.replace(model.lm_head, out_features=VOCABULARY),
    )
    return dataclasses.replace(config, model_spec=dataclasses.replace(config.model_spec, model=model))


@pytest.fixture(scope="module")
def config() -> Trainer.Config:
    return of_recipe(WORLD // STAGES, 8)


@pytest.fixture(scope="module")
def plans() -> list[SavePlan]:
    build = partial(rehearse, steps=0, divisor=DIVISOR_OF_ALL)
    config, world = shallow(of_recipe(SHARDS, SHARDS // 2)), STAGES * SHARDS
    calls = [(config, rank, world) for rank in range(world)]
    return [each.plan for each in for_each(build, calls)]


@pytest.fixture(scope="module")
def expected() -> Entries:
    config = shallow(of_recipe(SHARDS, SHARDS // 2))
    expect = partial(expected_entries, divisor=DIVISOR_OF_ALL)
    [entries] = for_each(expect, [(config, STAGES * SHARDS)])
    return entries


def test_degrees_pass_the_preflight_check(config: Trainer.Config, tmp_path: Path) -> None:
    assert world_size(config) == WORLD
    check(prepared(config, steps=2, folder=str(tmp_path)), world_size=WORLD)


def test_every_stage_is_built_at_full_width(config: Trainer.Config) -> None:
    shapes = list(for_each(build_at_real_width, [(config, rank, WORLD) for rank in RANKS]))
    assert [shape.stage for shape in shapes] == [0, 1, 2, 3]
    with torch.device("meta"):
        whole = config.model_spec.model.build()
    assert sum(shape.parameters for shape in shapes) == sum(p.numel() for p in whole.parameters()) > 9.8e9
    modules = [name for shape in shapes for name in shape.modules]
    assert modules == ["tok_embeddings", *(f"layers.{index}" for index in range(30)), "norm", "lm_head"]
    for shape in shapes:
        assert shape.local_parameters == shape.parameters // 16


@pytest.mark.slow
def test_every_stage_trains(config: Trainer.Config) -> None:
    parameters = (31, 30, 30, 2)
    train = partial(rehearse, steps=2, divisor=DIVISOR)
    for trained in for_each(train, [(shallow(config), rank, WORLD) for rank in RANKS]):
        assert trained.updates == 2
        # A router gathers this rank's four rows 16 times, so experts tie, and others may be chosen.
        assert all(name.endswith("router.gate.weight") for name in trained.without_gradient)
        assert trained.changed + len(trained.without_gradient) == parameters[trained.stage]
        assert (trained.loss is not None) == (trained.stage == 3)
        if trained.loss is not None:
            assert math.log(VOCABULARY) - 1 < trained.loss < math.log(VOCABULARY) + 1


def test_unchanged_parameters_are_found(config: Trainer.Config) -> None:
    adamw = dataclasses.replace(config.optimizer.adamw, lr=0.0)
    still = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, adamw=adamw))
    with pytest.raises(RuntimeError, match="with gradients did not change: lm_head.weight, norm.weight"):
        list(for_each(partial(rehearse, steps=2, divisor=DIVISOR), [(shallow(still), 63, WORLD)]))


def test_save_plans_of_all_ranks_cover_the_checkpoint(plans: list[SavePlan], expected: Entries) -> None:
    assert check_plans(plans, expected) == []
    name = "layers.4.moe.routed_experts.inner_experts.w1_EFD"
    shape = (64, 768 // DIVISOR_OF_ALL, 2048 // DIVISOR_OF_ALL)
    for key in (
        name,
        f"optimizer.state.{name}.momentum_buffer",
        f"optimizer.state.{name}.error_feedback_update",
        f"train_state.next_weights.{name}",
    ):
        assert expected[key] == shape
    assert "train_state.next_weights.lm_head.weight" in expected
    assert expected["optimizer.state.lm_head.weight.error_feedback_update_valid"] == ()


@pytest.mark.slow
def test_a_tied_weight_is_saved_once(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('recipe = "tied_llama"\n')
    shards = ("--parallelism.data_parallel_shard_degree", "2")
    config = resolve([str(tmp_path / "x.toml"), "--module", "tests.support.recipes", *shards])
    trained = list(for_each(partial(rehearse, steps=2, divisor=2), [(config, rank, 4) for rank in range(4)]))
    assert all(each.updates == 2 and not each.without_gradient for each in trained)
    [expected] = for_each(partial(expected_entries, divisor=2), [(config, 4)])
    assert check_plans([each.plan for each in trained], expected) == []
    assert not any("lm_head" in key for key in expected)


def without(plans: Sequence[SavePlan], key: str, ranks: Sequence[int]) -> list[SavePlan]:
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if item.index.fqn != key])
        if rank in ranks
        else plan
        for rank, plan in enumerate(plans)
    ]


def with_shifted_region(plan: SavePlan, key: str, shift: int) -> SavePlan:
    """The plan with one region of a tensor shifted along the first dimension."""
    items = []
    for item in plan.items:
        if item.index.fqn == key:
            chunk = item.tensor_data.chunk
            offsets = type(chunk.offsets)((chunk.offsets[0] + shift, *chunk.offsets[1:]))
            data = dataclasses.replace(item.tensor_data, chunk=dataclasses.replace(chunk, offsets=offsets))
            item = dataclasses.replace(item, tensor_data=data)
        items.append(item)
    return dataclasses.replace(plan, items=items)


EXPERTS = "optimizer.state.layers.0.moe.routed_experts.inner_experts.w1_EFD.momentum_buffer"
HEAD = "train_state.next_weights.lm_head.weight"


def test_missing_and_extra_entries_are_found(plans: list[SavePlan], expected: Entries) -> None:
    assert check_plans(without(plans, HEAD, range(len(plans))), expected) == [f"{HEAD} is saved by no rank"]
    fewer = {key: shape for key, shape in expected.items() if key != HEAD}
    assert check_plans(plans, fewer) == [f"{HEAD} is saved but not expected"]
    last, rows = 3 * SHARDS, VOCABULARY // SHARDS
    [wrong] = check_plans(without(plans, HEAD, [last + 2]), expected)
    assert wrong.startswith(f"{HEAD}, of [2048, 64]: [{2 * rows}:{3 * rows}, 0:64] is in no region")
    taller = expected | {HEAD: (2049, 64)}
    assert f"{HEAD} is [2048, 64] on rank {last} but [2049, 64] in the model" in check_plans(plans, taller)


def test_misplaced_shards_are_found(plans: list[SavePlan], expected: Entries) -> None:
    experts = 64 // (SHARDS // 2)
    for rank, shift, problem in (
        (1, 1, f"[{experts}:{experts + 1}, "),  # a hole at rank 1's first expert
        (SHARDS - 1, experts, "exceeds it"),
    ):
        shifted = [
            with_shifted_region(plan, EXPERTS, shift) if at == rank else plan for at, plan in enumerate(plans)
        ]
        [wrong] = check_plans(shifted, expected)
        assert wrong.startswith(f"{EXPERTS}, of [64, 24, 64]: ") and problem in wrong


def test_width_divisors_that_do_not_divide_are_rejected(config: Trainer.Config) -> None:
    with pytest.raises(UserError, match="the width divisor 7 does not divide dim, which is 2048"):
        narrowed(config, 7)
    with pytest.raises(UserError, match=r"the width divisor 128 makes layers\.0\.attention\.rope\.dim odd"):
        narrowed(config, 128)


def test_command_rehearses_a_small_recipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from titan_async.cli import rehearse as verb

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    layout = ["--parallelism.data_parallel_shard_degree", "2", "--parallelism.expert_parallel_degree", "2"]
    recipe = str(ROOT / "toml_configs/debug_moe_cpu.toml")
    # With a weight average, which checkpoints then contain.
    status = verb.run([recipe, *layout, "--steps", "1", "--width-divisor=4", "--ema.decay", "0.9"])
    out = capsys.readouterr().out
    assert status == 0, out
    assert out.startswith("4 ranks on 2 stages. At the real width, on the meta device:\n  stage 0, rank 0: ")
    assert "1 updates at 1/4 of the width:\n  stage 0, rank 0: " in out
    assert out.count("\n  stage 0, rank 0: ") == out.count("\n  stage 1, rank 3: ") == 2
    assert out.endswith(": complete, with each shard once\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rank", "64"], "--rank is 64, but the recipe has 2 ranks: use a rank below 2"),
        (
            ["--steps", "0"],
            "--steps: must be an integer from 1 to 1000000, not 0 (see titan-async rehearse --help)",
        ),
        (["--rank"], "--rank: expected one argument (see titan-async rehearse --help)"),
        (
            ["--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"],
            "a rehearsal supports schedules with one stage per rank, but Interleaved1F1B has several: set "
            'parallelism.pipeline_parallel_schedule to "Async2BW" or "1F1B"',
        ),
        (
            ["--parallelism.data_parallel_shard_degree", "-1"],
            "parallelism.data_parallel_shard_degree is -1, which depends on the number of GPUs: set it to "
            "the degree of the run to rehearse",
        ),
    ],
)
def test_invalid_flags_are_rejected(flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_async.cli import rehearse as verb

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    recipe = str(ROOT / "toml_configs/debug_moe_cpu.toml")
    base = ["--parallelism.data_parallel_shard_degree", "1"]
    with pytest.raises(UserError) as caught:
        verb.run([recipe, *base, *flags])
    assert str(caught.value) == message
