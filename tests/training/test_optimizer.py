"""`AsyncOptimizers`: which optimizer updates which parameter, with which options."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from titan_async.config.recipe_file import resolve
from titan_async.errors import UserError
from titan_async.optim import ErrorFeedback, Muon, compiled_adamw

LAYER_MATRICES = {
    "attention.qkv_linear.wq",
    "attention.qkv_linear.wk",
    "attention.qkv_linear.wv",
    "attention.wo",
    "feed_forward.w1",
    "feed_forward.w2",
    "feed_forward.w3",
}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """The debug recipe's model, on the meta device."""
    from titan_async.recipes.debug import debug

    with torch.device("meta"):
        return debug().model_spec.model.build()


class Stage(nn.Module):
    """The middle of a decoder: one layer with a norm, and neither embedding nor head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({"3": nn.ModuleDict({"wq": nn.Linear(4, 6), "norm": nn.LayerNorm(4)})})


def config_of(text: str, folder: Path) -> Any:
    """The optimizer section of a recipe file."""
    path = folder / "x.toml"
    path.write_text(f'recipe = "debug"\n{text}', encoding="utf-8")
    return resolve([str(path)]).optimizer


def build(text: str, folder: Path, model: nn.Module) -> Any:
    return config_of(text, folder).build(model_parts=[model])


def unwrapped(optimizers: Any) -> Iterator[torch.optim.Optimizer]:
    for optimizer in optimizers.optimizers:
        yield optimizer.optimizer if isinstance(optimizer, ErrorFeedback) else optimizer


def names_by_optimizer(optimizers: Any) -> dict[str, set[str]]:
    return {
        type(optimizer).__name__: {name for group in optimizer.param_groups for name in group["param_names"]}
        for optimizer in unwrapped(optimizers)
    }


def train_a_step(model: nn.Module, optimizers: Any, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizers.step()
    optimizers.zero_grad()


def test_the_debug_recipe_gives_hidden_matrices_to_muon_and_the_rest_to_adamw(
    tmp_path: Path, model: nn.Module
) -> None:
    names = names_by_optimizer(build("", tmp_path, model))
    layers = range(6)
    assert names["Muon"] == {f"layers.{i}.{matrix}.weight" for i in layers for matrix in LAYER_MATRICES}
    assert names["AdamW"] == {"tok_embeddings.weight", "norm.weight", "lm_head.weight"} | {
        f"layers.{i}.{norm}.weight" for i in layers for norm in ("attention_norm", "ffn_norm")
    }
    assert len(names) == 2


@pytest.mark.parametrize(("name", "optimizer"), [("adamw", "AdamW"), ("lion", "Lion"), ("sgd", "SGD")])
def test_the_other_names_take_every_parameter(
    name: str, optimizer: str, tmp_path: Path, model: nn.Module
) -> None:
    names = names_by_optimizer(build(f'[optimizer]\nname = "{name}"', tmp_path, model))
    assert names == {optimizer: {name for name, _ in model.named_parameters()}}


def test_settings_of_the_named_optimizers_are_applied(tmp_path: Path) -> None:
    text = """
        [optimizer.muon]
        lr = 0.05
        momentum = 0.9
        nesterov = false
        cautious_weight_decay = true
        adjust_lr = "spectral"
        ns_steps = 4
        ns_coefficients = "polar_express"
        ns_form = "gram"
        compute_dtype = "float32"
        momentum_dtype = "bfloat16"
        bucket_mb = 7
        [optimizer.adamw]
        lr = 0.001
        beta1 = 0.8
        beta2 = 0.99
        eps = 1e-6
        weight_decay = 0.2
    """
    stage = Stage()
    muon, adamw = unwrapped(build(text, tmp_path, stage))
    (group,) = muon.param_groups
    wanted = {
        "lr": 0.05,
        "momentum": 0.9,
        "nesterov": False,
        "cautious_weight_decay": True,
        "adjust_lr": "spectral",
        "weight_decay": 0.1,
        "ns_steps": 4,
        "ns_coefficients": "polar_express",
        "ns_form": "gram",
        "compute_dtype": "float32",
    }
    assert {key: group[key] for key in wanted} == wanted
    assert muon.state[stage.layers["3"]["wq"].weight]["momentum_buffer"].dtype == torch.bfloat16
    assert muon._orthogonalizer.bucket_mb == 7
    (group,) = adamw.param_groups
    wanted = {"lr": 0.001, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.2}
    assert {key: group[key] for key in wanted} == wanted


def test_settings_of_lion_are_applied(tmp_path: Path) -> None:
    text = """
        [optimizer]
        name = "lion"
        [optimizer.lion]
        lr = 0.002
        beta1 = 0.7
        beta2 = 0.8
        weight_decay = 0.5
    """
    (lion,) = unwrapped(build(text, tmp_path, Stage()))
    (group,) = lion.param_groups
    wanted = {"lr": 0.002, "betas": (0.7, 0.8), "weight_decay": 0.5}
    assert {key: value for key, value in group.items() if key not in ("params", "param_names")} == wanted


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_torchtitans_implementation_is_passed_where_supported(implementation: str, tmp_path: Path) -> None:
    # DTensor has no sharding rule for the fused SGD.
    for name, optimizer in (("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD), ("muon", Muon)):
        text = f'[optimizer]\nname = "{name}"\nimplementation = "{implementation}"'
        (group,) = next(unwrapped(build(text, tmp_path, Stage()))).param_groups
        fused = implementation == "fused" and optimizer is torch.optim.AdamW
        foreach = implementation == "foreach" or (implementation == "fused" and not fused)
        if optimizer is Muon:
            assert not {"fused", "foreach"} & group.keys()
        else:
            assert (group["fused"], group["foreach"]) == (fused, foreach)


@pytest.mark.parametrize(
    ("text", "strength", "level", "dtype"),
    [
        ("", 1.0, "update", torch.float32),
        (
            '[optimizer.error_feedback]\nstrength = 0.5\nlevel = "gradient"\ndtype = "bfloat16"',
            0.5,
            "gradient",
            torch.bfloat16,
        ),
    ],
)
def test_error_feedback_is_inside_muon_and_around_the_others(
    text: str, strength: float, level: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    stage = Stage()
    container = build(text, tmp_path, stage)
    muon, adamw = container.optimizers
    assert type(muon) is Muon
    (group,) = muon.param_groups
    assert (group["error_feedback"], group["error_feedback_level"]) == (strength, level)
    assert isinstance(adamw, ErrorFeedback)
    assert (adamw.strength, adamw.level) == (strength, level)
    train_a_step(stage, container, 1)
    for optimizer in container.optimizers:
        for state in optimizer.state.values():
            assert state[f"error_feedback_{level}"].dtype == dtype


@pytest.mark.parametrize("name", ["muon", "adamw", "sgd"])
def test_error_feedback_is_compiled_around_adamw_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []
    monkeypatch.setattr(compiled_adamw, "_compiled", lambda: lambda weight, *_: passes.append(weight))
    stage = Stage()
    container = build(f'[optimizer]\nname = "{name}"\nerror_feedback.compile = true', tmp_path, stage)
    for step in range(3):
        train_a_step(stage, container, step)
    assert len(passes) == 2 * {"muon": 3, "adamw": 4, "sgd": 0}[name]  # the first step is not corrected


@pytest.mark.parametrize("setting", ["enable = false", "strength = 0.0"])
def test_error_feedback_that_is_off_has_no_state(setting: str, tmp_path: Path) -> None:
    optimizers = build(f"[optimizer.error_feedback]\n{setting}", tmp_path, Stage()).optimizers
    assert [type(optimizer) for optimizer in optimizers] == [Muon, torch.optim.AdamW]
    assert optimizers[0].param_groups[0]["error_feedback"] == 0


GROUPS = """
    [[optimizer.param_groups]]
    pattern = 'tok_embeddings|lm_head'
    optimizer_name = "SGD"
    optimizer_kwargs = {lr = 0.5}

    [[optimizer.param_groups]]
    pattern = 'norm|bias'
    optimizer_name = "AdamW"
    optimizer_kwargs = {lr = 0.25, betas = [0.7, 0.8], weight_decay = 0.0}

    [[optimizer.param_groups]]
    pattern = '\\.wq\\.'
    optimizer_name = "AdamW"
    optimizer_kwargs = {lr = 0.125}

    [[optimizer.param_groups]]
    pattern = '\\.wo\\.'
    optimizer_name = "Lion"
    optimizer_kwargs = {lr = 0.0625}

    [[optimizer.param_groups]]
    pattern = '\\.w1\\.'
    optimizer_name = "Muon"
    optimizer_kwargs = {lr = 2, split_sizes = [300, 212], adjust_lr = "spectral"}

    [[optimizer.param_groups]]
    pattern = '.*'
    optimizer_name = "Muon"
    optimizer_kwargs = {lr = 1}
"""


def test_param_groups_of_a_recipe_file(tmp_path: Path, model: nn.Module) -> None:
    optimizers = build(GROUPS, tmp_path, model)
    names = names_by_optimizer(optimizers)
    assert names["SGD"] == {"tok_embeddings.weight", "lm_head.weight"}
    assert {name for name in names["AdamW"] if "norm" not in name} == {
        f"layers.{i}.attention.qkv_linear.wq.weight" for i in range(6)
    }
    assert set.union(*names.values()) == {name for name, _ in model.named_parameters()}
    assert sum(map(len, names.values())) == len(list(model.parameters()))
    (adamw,) = [optimizer for optimizer in unwrapped(optimizers) if type(optimizer) is torch.optim.AdamW]
    assert [group["lr"] for group in adamw.param_groups] == [0.25, 0.125]
    assert adamw.param_groups[0]["betas"] == (0.7, 0.8)
    assert names["Lion"] == {f"layers.{i}.attention.wo.weight" for i in range(6)}
    (muon,) = [optimizer for optimizer in unwrapped(optimizers) if type(optimizer) is Muon]
    assert [group["split_sizes"] for group in muon.param_groups] == [(300, 212), ()]
    assert [group["lr"] for group in muon.param_groups] == [2, 1]


def test_a_pattern_may_match_nothing_on_one_stage(tmp_path: Path) -> None:
    optimizers = build(GROUPS, tmp_path, Stage())
    assert names_by_optimizer(optimizers) == {
        "AdamW": {"layers.3.wq.bias", "layers.3.wq.weight", "layers.3.norm.weight", "layers.3.norm.bias"}
    }
    # One optimizer of two groups, so that the names of its learning rates have a number.
    assert optimizers.learning_rates() == {"lr/AdamW/0": 0.25, "lr/AdamW/1": 0.125}


def test_names_of_learning_rates_follow_the_scheduler(tmp_path: Path) -> None:
    text = "[optimizer.muon]\nlr = 0.5\n[optimizer.adamw]\nlr = 0.25"
    optimizers = build(text, tmp_path, Stage())
    assert optimizers.learning_rates() == {"lr/Muon": 0.5, "lr/AdamW": 0.25}
    from torchtitan.components.optimizer import LRSchedulersContainer

    scheduler = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=10)
    assert optimizers.learning_rates() == {"lr/Muon": 0.25, "lr/AdamW": 0.125}
    optimizers.step()
    scheduler.step()
    assert optimizers.learning_rates() == {"lr/Muon": 0.5, "lr/AdamW": 0.25}


def test_frozen_parameters_need_no_optimizer(tmp_path: Path) -> None:
    stage = Stage()
    stage.layers["3"]["norm"].requires_grad_(False)
    names = names_by_optimizer(build(GROUPS, tmp_path, stage))
    assert names == {"AdamW": {"layers.3.wq.bias", "layers.3.wq.weight"}}


def test_a_parameter_without_group_is_a_mistake(tmp_path: Path) -> None:
    text = "[[optimizer.param_groups]]\npattern = 'norm'\noptimizer_name = 'AdamW'"
    with pytest.raises(
        UserError, match=re.escape("matches the parameter layers.3.wq.weight; add a last group")
    ):
        build(text, tmp_path, Stage())


def test_reading_the_state_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    # torchtitan then initializes the state by a step, which must not count as an update: error feedback would
    # double the first one. (Not with AdamW, which counts steps.)
    asked, other = Stage(), Stage()
    text = '[optimizer]\nname = "sgd"'
    optimizers, others = build(text, tmp_path, asked), build(text, tmp_path, other)
    assert optimizers.state_dict()
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, asked.get_parameter(name)), name
    for seed in (1, 2):
        train_a_step(asked, optimizers, seed)
        train_a_step(other, others, seed)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, asked.get_parameter(name)), name


def test_a_skipped_step_is_reported(tmp_path: Path) -> None:
    stage = Stage()
    optimizers = build("", tmp_path, stage)
    assert not optimizers.step_was_skipped
    for wrong in (True, False):
        for parameter in stage.parameters():
            parameter.grad = torch.ones_like(parameter)
        if wrong:
            stage.layers["3"]["wq"].weight.grad[0, 0] = torch.inf
        optimizers.step()
        assert optimizers.step_was_skipped == wrong


def test_a_step_that_the_device_skips_changes_nothing(tmp_path: Path) -> None:
    """Nor the biases of experts, for which torchtitan has a hook before the step."""
    from torchtitan.components.optimizer import register_moe_load_balancing_hook

    from titan_async.recipes.debug import debug_moe

    recipe = debug_moe()
    torch.manual_seed(0)
    moe_model = recipe.model_spec.model.build()
    for parameter in moe_model.parameters():
        nn.init.normal_(parameter, std=0.1)
    layers = [layer.moe for layer in moe_model.layers.values()]
    optimizers = recipe.optimizer.build(model_parts=[moe_model])
    one_rank = SimpleNamespace(get_optional_mesh=lambda _: None, ep_enabled=False)
    register_moe_load_balancing_hook(optimizers, [moe_model], one_rank)
    found_inf = torch.zeros(())
    assert optimizers.set_found_inf(found_inf)
    for skipped in (1, 0, 1):
        before = {key: value.clone() for key, value in moe_model.state_dict().items()}
        counts = torch.arange(8.0)
        for moe in layers:
            moe.tokens_per_expert_E.copy_(counts)
        for parameter in moe_model.parameters():
            parameter.grad = torch.full_like(parameter, torch.nan if skipped else 1.0)
        found_inf.fill_(skipped)
        optimizers.step()
        unchanged = {key for key, value in moe_model.state_dict().items() if torch.equal(value, before[key])}
        assert unchanged == (before.keys() if skipped else set())
        for moe in layers:
            assert not moe.tokens_per_expert_E.any()
    coeff = layers[0].load_balance_coeff
    torch.testing.assert_close(layers[0].expert_bias_E, torch.tensor([coeff] * 4 + [-coeff] * 4))


def test_all_optimizers_are_conditional_on_the_device_or_none(tmp_path: Path) -> None:
    for text, supported in (("", True), ("[optimizer]\nimplementation = 'foreach'", False)):
        optimizers = build(text, tmp_path, Stage())
        found_inf = torch.ones(())
        assert optimizers.set_found_inf(found_inf) == supported
        expected = found_inf if supported else None
        assert all(getattr(each, "found_inf", None) is expected for each in unwrapped(optimizers))
        assert optimizers.found_inf is expected


@pytest.mark.parametrize(
    ("pattern", "settings", "sentence"),
    [
        (".*weight", "lr = 1", "layers.3.norm.weight"),
        (r"wq\.weight", "split_sizes = [5]", "split_sizes [5] add up to 5, but dimension -2"),
    ],
)
def test_an_error_of_muon_is_a_user_error(pattern: str, settings: str, sentence: str, tmp_path: Path) -> None:
    text = f"""
        [[optimizer.param_groups]]
        pattern = '{pattern}'
        optimizer_name = "Muon"
        optimizer_kwargs = {{{settings}}}
        [[optimizer.param_groups]]
        pattern = '.*'
        optimizer_name = "AdamW"
    """
    with pytest.raises(UserError, match=re.escape(sentence)):
        build(text, tmp_path, Stage())


def test_a_config_is_not_changed_by_building(tmp_path: Path) -> None:
    config = config_of("", tmp_path)
    before = dataclasses.asdict(config)
    config.build(model_parts=[Stage()])
    assert dataclasses.asdict(config) == before
    assert config.param_groups == []
