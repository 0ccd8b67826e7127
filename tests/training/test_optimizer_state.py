"""Checkpoints of `AsyncOptimizers` hold all state, with each form of error feedback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.optimizer import LRSchedulersContainer

from tests.training.test_optimizer import Stage, build, train_a_step, unwrapped
from titan_async.checkpoint._dcp_internals import ChecksumReader, WeightsOnlyLoadPlanner
from titan_async.optim import ErrorFeedback, Muon
from titan_async.training.checkpoint.checkpointer import existing_state
from titan_async.training.optimizer.container import AsyncOptimizers

FEEDBACKS = {
    "update": "",
    "gradient": '[optimizer.error_feedback]\nlevel = "gradient"',
    "off": "[optimizer.error_feedback]\nenable = false",
}


def build_wrapped(text: str, folder: Path, stage: Stage) -> AsyncOptimizers:
    """The same with error feedback wrapped around Muon as around the others, as in earlier versions."""
    optimizers = build(text, folder, stage)
    (muon, wrapped) = optimizers.optimizers
    assert type(muon) is Muon and isinstance(wrapped, ErrorFeedback)
    (group,) = muon.param_groups
    names = zip(group["param_names"], group["params"], strict=True)
    of_this_form = {"error_feedback", "error_feedback_level", "error_feedback_dtype"}
    options = {k: v for k, v in group.items() if k not in ("params", "param_names", *of_this_form)}
    alone = Muon([{"params": list(names), **options}])
    optimizers.optimizers = [
        ErrorFeedback(alone, strength=group["error_feedback"], level=group["error_feedback_level"]),
        wrapped,
    ]
    return optimizers


def written_and_read(optimizers: AsyncOptimizers, folder: Path, into: AsyncOptimizers) -> None:
    """Save and load by torch.distributed.checkpoint, as the checkpointer does."""
    dcp.save({"optimizer": optimizers.state_dict()}, checkpoint_id=folder, no_dist=True)
    reader = ChecksumReader(folder)
    state = existing_state({"optimizer": into}, reader.index.state_dict_metadata)
    dcp.load(state, storage_reader=reader, planner=WeightsOnlyLoadPlanner(), no_dist=True)
    into.load_state_dict(state["optimizer"])


def both(
    make: Callable[..., AsyncOptimizers], remake: Callable[..., AsyncOptimizers], text: str, folder: Path
) -> tuple[Stage, Stage, AsyncOptimizers]:
    """Four updates by one form, and two by that and two by another that has loaded its state."""
    unbroken, broken, resumed = Stage(), Stage(), Stage()
    optimizers, others = make(text, folder, unbroken), make(text, folder, broken)
    for seed in (1, 2):
        train_a_step(unbroken, optimizers, seed)
        train_a_step(broken, others, seed)
    resumed.load_state_dict(broken.state_dict())
    loaded = remake(text, folder, resumed)
    written_and_read(others, folder / "checkpoint", loaded)
    for seed in (3, 4):
        train_a_step(unbroken, optimizers, seed)
        train_a_step(resumed, loaded, seed)
    return unbroken, resumed, loaded


def assert_same(one: Stage, other: Stage) -> None:
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name


@pytest.mark.parametrize("feedback", FEEDBACKS)
def test_state_goes_through_torchtitans_checkpointing(feedback: str, tmp_path: Path) -> None:
    unbroken, resumed, loaded = both(build, build, FEEDBACKS[feedback], tmp_path)
    assert_same(unbroken, resumed)
    # Keys are the parameters' names, whatever stage they are on.
    state = loaded.state_dict()
    matrix = "layers.3.wq.weight"
    assert any(key.startswith(f"state.{matrix}.momentum_buffer") for key in state)
    histories = {key for key in state if key.startswith("state.") and "error_feedback_" in key}
    wanted = {
        f"state.{name}.error_feedback_{feedback}{flag}"
        for name, _ in resumed.named_parameters()
        for flag in ("", "_valid")
    }
    assert histories == (wanted if feedback != "off" else set())


FORMS: dict[str, Callable[..., AsyncOptimizers]] = {"wrapped": build_wrapped, "inside": build}


@pytest.mark.parametrize("level", ["update", "gradient"])
@pytest.mark.parametrize(("saving", "loading"), [("wrapped", "inside"), ("inside", "wrapped")])
def test_each_form_of_error_feedback_loads_the_other(
    saving: str, loading: str, level: str, tmp_path: Path
) -> None:
    unbroken, resumed, loaded = both(FORMS[saving], FORMS[loading], FEEDBACKS[level], tmp_path)
    assert_same(unbroken, resumed)
    if loading == "inside":
        assert loaded.optimizers[0].param_groups[0]["error_feedback"] == 1.0


@pytest.mark.parametrize(("saved", "now"), [("off", "update"), ("update", "off"), ("gradient", "update")])
def test_error_feedback_options_are_those_of_the_run(saved: str, now: str, tmp_path: Path) -> None:
    # A synchronous run may resume delayed, and vice versa; without a history nothing is corrected.
    first, second, alone = Stage(), Stage(), Stage()
    optimizers = build(FEEDBACKS[saved], tmp_path, first)
    train_a_step(first, optimizers, 1)
    plain = build(FEEDBACKS["off"], tmp_path, alone)
    for stage in (second, alone):
        stage.load_state_dict(first.state_dict())
    loaded = build(FEEDBACKS[now], tmp_path, second)
    written_and_read(optimizers, tmp_path / "first", loaded)
    written_and_read(optimizers, tmp_path / "second", plain)
    assert loaded.optimizers[0].param_groups[0]["error_feedback"] == (now != "off")
    train_a_step(second, loaded, 2)
    train_a_step(alone, plain, 2)
    assert_same(second, alone)
    train_a_step(second, loaded, 3)
    train_a_step(alone, plain, 3)
    differs = any(not torch.equal(p, alone.get_parameter(name)) for name, p in second.named_parameters())
    assert differs == (now != "off")


OF_GROUPS = """
    [[optimizer.param_groups]]
    pattern = 'norm'
    optimizer_name = "Lion"
    optimizer_kwargs = {{ lr = 0.01, betas = {0} }}

    [[optimizer.param_groups]]
    pattern = '.*'
    optimizer_name = "AdamW"
    optimizer_kwargs = {{ lr = 0.02, eps = {1} }}
"""

CHANGES = {
    "muon": (
        """
        [optimizer.muon]
        lr = 0.5
        momentum = 0.9
        weight_decay = 0.25
        ns_steps = 4
        adjust_lr = "spectral"
        compute_dtype = "bfloat16"
        [optimizer.adamw]
        beta1 = 0.5
        """,
        "[optimizer.error_feedback]\nstrength = 0.5",
        {
            "optimizer.muon.lr 0.5 -> 0.01",
            "optimizer.muon.momentum 0.9 -> 0.95",
            "optimizer.muon.weight_decay 0.25 -> 0.1",
            "optimizer.muon.ns_steps 4 -> 5",
            'optimizer.muon.adjust_lr "spectral" -> "match_rms_adamw"',
            'optimizer.muon.compute_dtype "bfloat16" -> "float32"',
            "optimizer.error_feedback.strength 1.0 -> 0.5",
            "optimizer.adamw.betas [0.5, 0.95] -> [0.9, 0.95]",
        },
    ),
    "lion": (
        '[optimizer]\nname = "lion"\n[optimizer.lion]\nweight_decay = 0.5',
        '[optimizer]\nname = "lion"\n[optimizer.lion]\nlr = 0.5\nbeta2 = 0.5',
        {
            "optimizer.lion.lr 0.0003 -> 0.5",
            "optimizer.lion.betas [0.9, 0.99] -> [0.9, 0.5]",
            "optimizer.lion.weight_decay 0.5 -> 1.0",
        },
    ),
    "sgd": (
        '[optimizer]\nname = "sgd"\nimplementation = "for-loop"',
        '[optimizer]\nname = "sgd"\n[optimizer.sgd]\nmomentum = 0.5',
        {"optimizer.sgd.momentum 0.9 -> 0.5"},
    ),
    "groups": (
        OF_GROUPS.format("[0.5, 0.5]", 1e-8),
        OF_GROUPS.format("[0.5, 0.75]", 1e-6),
        {
            "optimizer.param_groups.0.optimizer_kwargs.betas [0.5, 0.5] -> [0.5, 0.75]",
            "optimizer.param_groups.1.optimizer_kwargs.eps 1e-08 -> 1e-06",
        },
    ),
    "nothing": ("", "", set()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_options_are_those_of_the_recipe_and_changes_are_reported(name: str, tmp_path: Path) -> None:
    then, now, changed = CHANGES[name]
    first, fresh = Stage(), Stage()
    optimizers, loaded, unloaded = (
        build(then, tmp_path, first),
        build(now, tmp_path, Stage()),
        build(now, tmp_path, fresh),
    )
    for each in (optimizers, loaded, unloaded):
        LRSchedulersContainer.Config(warmup_steps=4).build(optimizers=each, training_steps=8)
    train_a_step(first, optimizers, 1)
    written_and_read(optimizers, tmp_path / "checkpoint", loaded)
    assert set(loaded.changed) == changed and len(loaded.changed) == len(changed)
    for mine, wanted in zip(unwrapped(loaded), unwrapped(unloaded), strict=True):
        for group, other in zip(mine.param_groups, wanted.param_groups, strict=True):
            assert {k: v for k, v in group.items() if k != "params"} == {
                k: v for k, v in other.items() if k != "params"
            }


class Old(AsyncOptimizers):
    """Writes checkpoints like earlier versions, in which Muon had fewer options."""

    def state_dict(self) -> dict[str, Any]:
        later = (
            "ns_form", "cautious_weight_decay", "split_sizes", "split_dim", "input_dim", "momentum_dtype",
            "error_feedback", "error_feedback_level", "error_feedback_dtype",
        )  # fmt: skip
        state = super().state_dict()
        return {key: value for key, value in state.items() if key.rpartition(".")[2] not in later}


def build_old(text: str, folder: Path, stage: Stage) -> AsyncOptimizers:
    optimizers = build_wrapped(text, folder, stage)
    optimizers.__class__ = Old
    return optimizers


def test_a_checkpoint_from_before_muon_had_all_its_options_loads(tmp_path: Path) -> None:
    unbroken, resumed, _ = both(build_old, build, "", tmp_path)
    assert_same(unbroken, resumed)


@pytest.mark.parametrize(
    ("saved", "now"), [("muon", "lion"), ("lion", "muon"), ("sgd", "lion"), ("muon", "sgd")]
)
def test_the_state_of_another_optimizer_does_not_load(saved: str, now: str, tmp_path: Path) -> None:
    # All of them have a momentum_buffer.
    first, second = (build(f'[optimizer]\nname = "{name}"', tmp_path, Stage()) for name in (saved, now))
    with pytest.raises(dcp.api.CheckpointException, match="Missing key"):
        written_and_read(first, tmp_path / "checkpoint", second)
