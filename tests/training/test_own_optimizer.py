"""Optimizers of other packages, and of users, in `AsyncOptimizers`."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.support.optimizers import (
    Averaged,
    Closed,
    Coupled,
    Forgetful,
    Idle,
    Keeper,
    Loaded,
    Normed,
    Rateless,
    Restless,
)
from tests.support.processes import Pools
from tests.support.training import train
from tests.training.test_optimizer import Stage, config_of, train_a_step, unwrapped
from tests.training.test_optimizer_state import assert_same, both, written_and_read
from titan_async.errors import UserError
from titan_async.optim import ErrorFeedback
from titan_async.training.optimizer.config import HIDDEN_MATRICES
from titan_async.training.optimizer.container import AsyncOptimizers
from titan_async.training.optimizer.trial import state_elements, try_out
from titan_async.training.preflight.optimizer import check_optimizer


def section(tmp_path: Path, *calls: tuple[type, dict[str, Any]], text: str = "") -> AsyncOptimizers.Config:
    config = config_of(text, tmp_path)
    for cls, options in calls:
        config = config.using(cls, **options)
    return config


def test_one_call_gives_all_parameters_or_a_group_to_an_optimizer(tmp_path: Path) -> None:
    for calls, expected in (
        ([(Averaged, {"lr": 0.5})], {"Averaged": {"wq.weight", "wq.bias", "norm.weight", "norm.bias"}}),
        (
            [(Averaged, {"pattern": HIDDEN_MATRICES, "beta": 0.5})],
            {"Averaged": {"wq.weight"}, "AdamW": {"wq.bias", "norm.weight", "norm.bias"}},
        ),
        (
            [(Averaged, {"pattern": "norm", "lr": 0.5}), (Normed, {"pattern": r"norm\.bias"})],
            {
                "Normed": {"norm.bias"},
                "Averaged": {"norm.weight"},
                "Muon": {"wq.weight"},
                "AdamW": {"wq.bias"},
            },
        ),
    ):
        optimizers = section(tmp_path, *calls).build(model_parts=[Stage()])
        names = {
            type(optimizer).__name__: {
                name.removeprefix("layers.3.")
                for group in optimizer.param_groups
                for name in group["param_names"]
            }
            for optimizer in unwrapped_fully(optimizers)
        }
        assert names == expected
        for optimizer in optimizers.optimizers:
            assert isinstance(optimizer, ErrorFeedback) or type(optimizer).__name__ == "Muon"


def unwrapped_fully(optimizers: AsyncOptimizers) -> list[torch.optim.Optimizer]:
    return [getattr(optimizer, "optimizer", optimizer) for optimizer in unwrapped(optimizers)]


def test_two_groups_of_one_class_have_their_own_options(tmp_path: Path) -> None:
    config = section(
        tmp_path, (Averaged, {"lr": 0.25, "beta": 0.5}), (Averaged, {"pattern": "norm", "lr": 0.5})
    )
    optimizers = config.build(model_parts=[Stage()])
    found = {o.param_groups[0]["lr"]: o.param_groups[0]["beta"] for o in unwrapped_fully(optimizers)}
    assert found == {0.25: 0.5, 0.5: 0.9}
    assert optimizers.learning_rates() == {"lr/Averaged/0": 0.5, "lr/Averaged/1": 0.25}


def test_a_name_that_is_taken_is_prefixed_by_its_module(tmp_path: Path) -> None:
    class AdamW(Averaged):
        pass

    config = section(tmp_path, (AdamW, {}))
    assert config.param_groups[0].optimizer_name == f"{__name__}.AdamW"
    (optimizer,) = unwrapped_fully(config.build(model_parts=[Stage()]))
    assert type(optimizer) is AdamW
    config = section(tmp_path, (torch.optim.AdamW, {"lr": 0.1}))
    assert config.param_groups[0].optimizer_name == "AdamW" and not config.classes


@pytest.mark.parametrize("cls", [Averaged, Normed, torch.optim.NAdam])
@pytest.mark.parametrize("feedback", ["", "[optimizer.error_feedback]\nenable = false"])
def test_it_updates_parameters_as_it_does_alone_and_is_corrected(
    cls: type, feedback: str, tmp_path: Path
) -> None:
    stage, alone = Stage(), Stage()
    optimizers = section(tmp_path, (cls, {"lr": 0.05}), text=feedback).build(model_parts=[stage])
    oracle: Any = cls(alone.parameters(), lr=0.05)
    if not feedback:
        oracle = ErrorFeedback(oracle)
    for seed in (1, 2, 3):
        train_a_step(stage, optimizers, seed)
        train_a_step(alone, oracle, seed)
    assert_same(alone, stage)


def test_an_update_after_an_idle_step_is_not_corrected(tmp_path: Path) -> None:
    # Otherwise the update would be doubled, since the previous one is known to be zero.
    stage = Stage()
    start = stage.layers["3"]["wq"].weight.detach().clone()
    optimizers = section(tmp_path, (Idle, {"lr": 1.0})).build(model_parts=[stage])
    for seed, moved in ((1, 0.0), (2, 1.0), (3, 2.0)):
        train_a_step(stage, optimizers, seed)
        assert torch.allclose(start - stage.layers["3"]["wq"].weight, torch.full_like(start, moved))


@pytest.mark.parametrize(
    "cls", [Averaged, Normed, Idle, torch.optim.RAdam, torch.optim.Adafactor, "SOAP", "Adan"]
)
def test_it_resumes_bit_for_bit(cls: Any, tmp_path: Path) -> None:
    if isinstance(cls, str):
        cls = getattr(pytest.importorskip("pytorch_optimizer"), cls)
    config = section(tmp_path, (cls, {"lr": 0.05}))

    def make(text: str, folder: Path, stage: Stage) -> AsyncOptimizers:
        return config.build(model_parts=[stage])

    unbroken, resumed, loaded = both(make, make, "", tmp_path)
    assert loaded.changed == []
    assert_same(unbroken, resumed)


def test_two_stages_resume_as_one_and_one_as_two(tmp_path: Path) -> None:
    class Other(Stage):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({"4": self.layers["3"]})

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({"3": Stage().layers["3"], "4": Other().layers["4"]})

    for name, cls in (("elements", Averaged), ("whole", Normed)):
        config = section(tmp_path, (cls, {"pattern": "wq", "lr": 0.05}))
        parts, whole = [Stage(), Other()], Both()
        stages = [config.build(model_parts=[part]) for part in parts]
        one = config.build(model_parts=[whole])
        for stage, optimizers in zip(parts, stages, strict=True):
            for seed in (1, 2):
                train_a_step(stage, optimizers, seed)
        state = {key: value for each in stages for key, value in each.state_dict().items()}
        dcp.save({"optimizer": state}, checkpoint_id=tmp_path / name, no_dist=True)
        loaded = {"optimizer": one.state_dict()}
        dcp.load(loaded, checkpoint_id=tmp_path / name, no_dist=True)
        one.load_state_dict(loaded["optimizer"])
        assert one.state_dict().keys() == state.keys()
        again = [config.build(model_parts=[part]) for part in (Stage(), Other())]
        dcp.save({"optimizer": one.state_dict()}, checkpoint_id=tmp_path / f"{name}-one", no_dist=True)
        for optimizers, before in zip(again, stages, strict=True):
            back = {"optimizer": optimizers.state_dict()}
            dcp.load(back, checkpoint_id=tmp_path / f"{name}-one", no_dist=True)
            optimizers.load_state_dict(back["optimizer"])
            for key, value in before.state_dict().items():
                now = optimizers.state_dict()[key]
                assert torch.equal(now, value) if isinstance(value, torch.Tensor) else now == value, key


def test_options_are_those_of_the_recipe_and_the_count_of_steps_is_the_checkpoints(tmp_path: Path) -> None:
    stage = Stage()
    optimizers = section(tmp_path, (Averaged, {"beta": 0.5})).build(model_parts=[stage])
    for seed in (1, 2, 3):
        train_a_step(stage, optimizers, seed)
    loaded = section(tmp_path, (Averaged, {"beta": 0.25})).build(model_parts=[Stage()])
    written_and_read(optimizers, tmp_path / "checkpoint", loaded)
    (inner,) = unwrapped_fully(loaded)
    assert (inner.param_groups[0]["beta"], inner.param_groups[0]["step"]) == (0.25, 3)
    assert loaded.changed == ["optimizer.param_groups.0.optimizer_kwargs.beta 0.5 -> 0.25"]


def test_the_traits_of_optimizers_are_found() -> None:
    assert not try_out(Averaged, {}, [1, 2]).needs_whole and not try_out(Averaged, {}, [1, 2]).couples
    assert try_out(Averaged, {}, [2]).sharded_state == {"sums.0", "sums.1.last"}
    assert try_out(Averaged, {}, [2]).group_state == {"step"}
    assert try_out(Normed, {}, [2]).needs_whole and not try_out(Normed, {}, [1, 2]).couples
    assert try_out(Coupled, {}, [1, 2]).couples
    assert (try_out(Idle, {}, [2]).idle_steps, try_out(Averaged, {}, [2]).idle_steps) == (1, 0)
    assert not try_out(torch.optim.AdamW, {}, [1, 2]).needs_whole
    assert try_out(torch.optim.Muon, {}, [2]).needs_whole
    assert state_elements(Averaged, {}, (30, 20)) == {"sums.0": 600, "sums.1.last": 600}


def test_a_trial_does_not_change_the_random_state() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    try_out(Averaged, {"lr": 0.123}, [2])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("cls", "options", "words"),
    [
        (Closed, {}, "needs no closure"),
        (torch.optim.LBFGS, {}, "needs no closure"),
        (Forgetful, {}, "cannot be resumed from a checkpoint exactly"),
        (Loaded, {}, "cannot be resumed from a checkpoint exactly"),
        (Restless, {}, "without gradient and learning rate"),
        (Keeper, {}, 'its state "set" is a set'),
        (Rateless, {}, 'no option "lr"'),
        (Coupled, {}, "uses all gradients together"),
        (Averaged, {"bet": 0.5}, "did you mean beta?"),
        (Averaged, {"lr": "fast"}, "optimizer_kwargs.lr must be a number"),
    ],
)
def test_an_optimizer_that_cannot_train_is_refused(
    cls: type, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = section(tmp_path, (cls, options))
    with torch.device("meta"):
        model = Stage()
    with pytest.raises(UserError, match=re.escape(words)) as refusal:
        check_optimizer(config, model, is_divided=True)
    assert str(refusal.value).startswith("optimizer.param_groups.0") or "did you mean" in words
    assert "\n" not in str(refusal.value)
    if cls is Coupled:
        check_optimizer(config, model)


def test_other_classes_and_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="takes a subclass of torch.optim.Optimizer"):
        section(tmp_path, (nn.Linear, {}))
    with pytest.raises(UserError, match="the option name of Averaged is a builtin"):
        section(tmp_path, (Averaged, {"name": print}))


def test_flags_and_a_saved_recipe_set_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_async.config.recipe_file import resolve_recipe

    (tmp_path / "own_optimizer_recipe.py").write_text(
        "import dataclasses\n"
        "from tests.support.optimizers import Averaged\n"
        "from titan_async.recipes.debug import debug\n\n"
        "def mine():\n"
        "    config = debug()\n"
        "    section = config.optimizer.using(Averaged, pattern='norm', lr=0.5, name='a', flag=True)\n"
        "    return dataclasses.replace(config, optimizer=section)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.toml").write_text('recipe = "mine"\n')
    kwargs = "--optimizer.param_groups.0.optimizer_kwargs"
    flags = [f"{kwargs}.lr", "0.25", f"{kwargs}.name", "b", f"{kwargs}.flag", "false"]
    resolved = resolve_recipe([str(tmp_path / "mine.toml"), "--module", "own_optimizer_recipe", *flags])
    (tmp_path / "saved.toml").write_text(resolved.to_toml())
    again = resolve_recipe([str(tmp_path / "saved.toml"), "--module", "own_optimizer_recipe"]).config
    assert dataclasses.asdict(again.optimizer) == dataclasses.asdict(resolved.config.optimizer)
    group = again.optimizer.param_groups[0]
    assert group.optimizer_kwargs == {"lr": 0.25, "name": "b", "flag": False}
    assert again.optimizer.class_of(group.optimizer_name) is Averaged


def sharded(rank: int, group: Any, name: str, folder: Path) -> tuple[list[str], bool, bool]:
    """Train on shards, resume on shards from a checkpoint of one process, and compare with whole weights."""
    cls = {"Averaged": Averaged, "Normed": Normed}.get(name) or getattr(
        importlib.import_module("pytorch_optimizer"), name
    )
    config = section(folder / str(rank), (cls, {"lr": 0.05}))
    plain, resumed = Stage(), Stage()
    optimizers = config.build(model_parts=[plain])
    mesh = init_device_mesh("cpu", (group.size(),))
    stage = Stage()
    for model in (stage, resumed):
        fully_shard(model, mesh=mesh)
    others, loaded = (config.build(model_parts=[model]) for model in (stage, resumed))
    for seed in (1, 2):
        train_a_step(plain, optimizers, seed)
        step_sharded(stage, plain, others, seed)
    state = others.state_dict()
    dcp.save({"optimizer": state}, checkpoint_id=folder / "checkpoint")
    same = {"optimizer": loaded.state_dict()}
    dcp.load(same, checkpoint_id=folder / "checkpoint")
    loaded.load_state_dict(same["optimizer"])
    with torch.no_grad():
        for mine, other in zip(resumed.parameters(), stage.parameters(), strict=True):
            mine.to_local().copy_(other.to_local())
    whole = config.build(model_parts=[at_rest := Stage()])
    at_rest.load_state_dict(plain.state_dict())
    back = {"optimizer": whole.state_dict()}
    dcp.load(back, checkpoint_id=folder / "checkpoint")
    whole.load_state_dict(back["optimizer"])
    for seed in (3, 4):
        train_a_step(plain, optimizers, seed)
        train_a_step(at_rest, whole, seed)
        step_sharded(stage, plain, others, seed)
        step_sharded(resumed, plain, loaded, seed)
    equal = all(
        torch.equal(a.full_tensor(), b.full_tensor())
        for a, b in zip(stage.parameters(), resumed.parameters(), strict=True)
    )
    close = all(
        torch.allclose(p, model_param, atol=1e-5)
        for model in (stage, at_rest)
        for p, q in zip(plain.parameters(), model.parameters(), strict=True)
        for model_param in [q.full_tensor() if isinstance(q, DTensor) else q]
    )
    return others.notes(), equal, close


def step_sharded(model: nn.Module, plain: nn.Module, optimizers: Any, seed: int) -> None:
    """As `train_a_step`, with the same gradients in shards."""
    torch.manual_seed(seed)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        grad = torch.randn_like(other)
        param.grad = dist.tensor.distribute_tensor(grad, param.device_mesh, param.placements)
    optimizers.step()
    optimizers.zero_grad()


@pytest.mark.parametrize("name", ["Averaged", "Normed", "SOAP"])
def test_shards_are_updated_as_full_parameters(name: str, pools: Pools, tmp_path: Path) -> None:
    if name == "SOAP":
        pytest.importorskip("pytorch_optimizer")
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    for notes, equal, close in pools(2).run(2, sharded, name, tmp_path):
        assert equal and close
        assert notes == ([] if name == "Averaged" else [
            f"{name} updates whole parameters: they are gathered at each step, and every rank of a stage "
            "holds all of its state"
        ])  # fmt: skip


def test_soap_has_a_section_and_takes_the_matrices(tmp_path: Path) -> None:
    soap = pytest.importorskip("pytorch_optimizer").SOAP
    text = '[optimizer]\nname = "soap"\n[optimizer.soap]\nlr = 0.5\nbeta1 = 0.8\nprecondition_frequency = 3'
    config = config_of(text, tmp_path)
    optimizers = config.build(model_parts=[Stage()])
    (first, second) = unwrapped_fully(optimizers)
    assert (type(first), type(second)) == (soap, torch.optim.AdamW)
    (group,) = first.param_groups
    assert group["param_names"] == ["layers.3.wq.weight"]
    assert (group["lr"], group["betas"], group["precondition_frequency"]) == (0.5, (0.8, 0.95), 3)
    with torch.device("meta"):
        check_optimizer(config, Stage(), is_divided=True)


def test_soap_without_its_package_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    config = config_of('[optimizer]\nname = "soap"', tmp_path)
    with (
        pytest.raises(UserError, match=re.escape('pip install "pytorch-optimizer>=4.1,<5"')),
        torch.device("meta"),
    ):
        check_optimizer(config, Stage())


@pytest.mark.slow
def test_soap_trains_on_shards_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_optimizer")
    flags = ("--optimizer.name", "soap", "--optimizer.soap.precondition_frequency", 2,
             "--parallelism.data_parallel_shard_degree", 2, "--lr_scheduler.total_steps", 6,
             "--metrics.log_freq", 1, "--training.steps", 6)  # fmt: skip
    whole = train(tmp_path, *flags, "--dump_folder", "whole")
    part = train(tmp_path, *flags, "--training.steps", 3)
    rest = train(tmp_path, *flags)
    assert [run.status for run in (whole, part, rest)] == [0, 0, 0], rest.err
    assert "SOAP updates whole parameters: they are gathered at each step" in whole.out + whole.err
    assert part.losses + rest.losses == whole.losses
