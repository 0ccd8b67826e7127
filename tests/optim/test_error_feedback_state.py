"""State of error feedback: torch's state dicts, distributed checkpoints, torchtitan's functions."""

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from titan_async.optim import ErrorFeedback, Muon

LEVELS = ["update", "gradient"]
BUILD = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1),
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, 0.1),
    "adamw_fused": lambda params: torch.optim.AdamW(params, 0.1, fused=True),
    "muon": lambda params: Muon(params, 0.1),
}


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 3, bias=False))
    return layers.to(dtype)


def wrapped(layers: torch.nn.Module, name: str, level: str) -> ErrorFeedback:
    return ErrorFeedback(BUILD[name](layers.named_parameters()), level=level)


def train(layers: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: range) -> None:
    for batch in batches:
        for i, param in enumerate(layers.parameters()):
            generator = torch.Generator().manual_seed(100 * batch + i)
            noise = torch.randn(param.shape, generator=generator).to(param.dtype)
            # The second parameter has no gradient in batch 2, just before the state is saved.
            param.grad = None if (batch, i) == (2, 1) else noise + 0.5 * param.detach()
        optimizer.step()
        optimizer.zero_grad()


def assert_equal_weights(one: torch.nn.Module, two: torch.nn.Module) -> None:
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


def assert_invalid_but_complete(layers: torch.nn.Module, optimizer: ErrorFeedback) -> None:
    key = f"error_feedback_{optimizer.level}"
    for param in layers.parameters():
        entries = optimizer.state[param]
        assert entries[key].shape == param.shape
        assert not entries[key].any()
        assert not entries[f"{key}_valid"]


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("saved_after", [0, 1, 3])
def test_resuming_is_bitwise_exact(name, level, dtype, saved_after):
    layers = model(dtype)
    optimizer = wrapped(layers, name, level)
    train(layers, optimizer, range(saved_after))
    saved_weights, saved = copy.deepcopy((layers.state_dict(), optimizer.state_dict()))
    train(layers, optimizer, range(saved_after, 7))

    resumed_layers = model(dtype)
    resumed = wrapped(resumed_layers, name, level)
    # Loading replaces this state.
    train(resumed_layers, resumed, range(20, 22))
    resumed_layers.load_state_dict(saved_weights)
    resumed.load_state_dict(saved)
    train(resumed_layers, resumed, range(saved_after, 7))
    assert_equal_weights(layers, resumed_layers)


def test_float32_history_of_bfloat16_parameters_is_loaded_exactly():
    """torch.optim.Optimizer.load_state_dict casts every floating-point state to the parameter's dtype."""
    layers = model(torch.bfloat16)
    optimizer = wrapped(layers, "sgd", "update")
    train(layers, optimizer, range(2))
    for param in layers.parameters():
        optimizer.state[param]["error_feedback_update"].add_(2.0**-20)
    saved = copy.deepcopy(optimizer.state_dict())
    other_layers = model(torch.bfloat16)
    other = wrapped(other_layers, "sgd", "update")
    other.load_state_dict(saved)
    for mine, theirs in zip(layers.parameters(), other_layers.parameters(), strict=True):
        history = optimizer.state[mine]["error_feedback_update"]
        loaded = other.state[theirs]["error_feedback_update"]
        assert loaded.dtype == torch.float32
        assert torch.equal(history, loaded)
        assert not torch.equal(history, history.bfloat16().float())


@pytest.mark.parametrize("level", LEVELS)
def test_state_has_the_entries_of_the_wrapped_optimizer_and_the_history(level):
    layers = model()
    optimizer = wrapped(layers, "adamw", level)
    assert not optimizer.state
    assert optimizer.state_dict()["state"] == {}
    train(layers, optimizer, range(1))
    names = {"step", "exp_avg", "exp_avg_sq", f"error_feedback_{level}", f"error_feedback_{level}_valid"}
    assert len(optimizer.state) == 2
    assert list(optimizer.state) == list(layers.parameters())
    for index, param in enumerate(layers.parameters()):
        assert set(optimizer.state[param]) == names
        assert set(optimizer.state_dict()["state"][index]) == names
        # The wrapped optimizer has only its own entries.
        assert set(optimizer.optimizer.state[param]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("level", LEVELS)
def test_state_is_complete_without_every_gradient(level):
    layers = model()
    optimizer = wrapped(layers, "momentum", level)
    first, second = layers.parameters()
    first.grad = torch.ones_like(first)
    optimizer.step()
    assert optimizer.state[first][f"error_feedback_{level}_valid"]
    assert not optimizer.state[second][f"error_feedback_{level}_valid"]
    assert f"error_feedback_{level}" in optimizer.state_dict()["state"][1]


def test_state_of_the_plain_optimizer_loads_with_an_empty_history():
    """A synchronous run can be continued with a delay and error feedback."""
    layers = model()
    plain = BUILD["adamw"](layers.named_parameters())
    train(layers, plain, range(2))
    other_layers = model()
    optimizer = wrapped(other_layers, "adamw", "update")
    train(other_layers, optimizer, range(1))
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert_invalid_but_complete(other_layers, optimizer)
    assert optimizer.state_dict()["state"][0]["step"] == 2

    wrapping = ErrorFeedback(plain)
    assert_invalid_but_complete(layers, wrapping)
    assert len(wrapping.state) == 2


def test_history_of_the_other_level_is_not_loaded():
    layers = model()
    optimizer = wrapped(layers, "adamw", "update")
    train(layers, optimizer, range(2))
    other_layers = model()
    other = wrapped(other_layers, "adamw", "gradient")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_invalid_but_complete(other_layers, other)
    assert set(other.optimizer.state[next(other_layers.parameters())]) == {"step", "exp_avg", "exp_avg_sq"}


def test_history_of_another_shape_raises_without_changes():
    layers = model()
    optimizer = wrapped(layers, "adamw", "update")
    train(layers, optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    train(layers, optimizer, range(1, 2))
    before = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["error_feedback_update"] = torch.zeros(())
    with pytest.raises(ValueError, match="shape"):
        optimizer.load_state_dict(saved)
    torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)


def test_state_dict_hooks():
    layers = model()
    optimizer = wrapped(layers, "sgd", "update")
    train(layers, optimizer, range(1))
    calls = []
    optimizer.register_state_dict_pre_hook(lambda self: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda self, state_dict: {**state_dict, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda self, state_dict: calls.append(state_dict["extra"]))
    optimizer.register_load_state_dict_post_hook(lambda self: calls.append("after loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before saving", 1, "after loading"]


@pytest.mark.parametrize("level", LEVELS)
def test_deep_copies_are_independent(level):
    layers = model()
    optimizer = wrapped(layers, "adamw", level)
    train(layers, optimizer, range(2))
    other_layers, other = copy.deepcopy((layers, optimizer))
    train(layers, optimizer, range(2, 5))
    train(other_layers, other, range(2, 5))
    assert_equal_weights(layers, other_layers)
    assert other.param_groups is not optimizer.param_groups


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", BUILD)
def test_distributed_checkpoint_functions_of_torch(name, level):
    """They create state by a step with zero gradients and learning rate 0."""
    layers = model()
    optimizer = wrapped(layers, name, level)
    train(layers, optimizer, range(3))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights = copy.deepcopy(layers.state_dict())
    saved = copy.deepcopy(get_optimizer_state_dict(layers, optimizer, options=options))
    assert f"state.0.weight.error_feedback_{level}" in saved
    train(layers, optimizer, range(3, 6))

    resumed_layers = model()
    resumed = wrapped(resumed_layers, name, level)
    resumed_layers.load_state_dict(weights)
    set_optimizer_state_dict(resumed_layers, resumed, saved, options=options)
    train(resumed_layers, resumed, range(3, 6))
    assert_equal_weights(layers, resumed_layers)


@pytest.mark.parametrize("level", LEVELS)
def test_first_step_of_a_warm_up_is_an_update(level):
    """Its learning rate is 0, but its gradients are not: the history is a displacement of 0."""
    layers = model()
    optimizer = wrapped(layers, "sgd", level)
    optimizer.param_groups[0]["lr"] = 0.0
    train(layers, optimizer, range(1))
    for param in layers.parameters():
        assert optimizer.state[param][f"error_feedback_{level}_valid"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", BUILD)
def test_torchtitan_functions(name, level):
    utils = pytest.importorskip("torchtitan.components.optimizer.utils")
    layers = model()
    optimizer = wrapped(layers, name, level)
    utils.init_optim_state(optimizer)
    assert_invalid_but_complete(layers, optimizer)
    assert_equal_weights(layers, model())
    train(layers, optimizer, range(3))
    utils.init_optim_state(optimizer)
    flat = copy.deepcopy(utils.get_flat_optim_state_dict(optimizer))
    assert flat[f"state.0.weight.error_feedback_{level}"].shape == (6, 4)
    weights = copy.deepcopy(layers.state_dict())
    train(layers, optimizer, range(3, 6))

    resumed_layers = model()
    resumed = wrapped(resumed_layers, name, level)
    utils.init_optim_state(resumed)
    assert set(utils.get_flat_optim_state_dict(resumed)) == set(flat)
    resumed_layers.load_state_dict(weights)
    utils.load_flat_optim_state_dict(resumed, flat)
    train(resumed_layers, resumed, range(3, 6))
    assert_equal_weights(layers, resumed_layers)
