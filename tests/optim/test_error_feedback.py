"""Error feedback around optimizers and in Muon, against its formulas in float64."""

import copy
import warnings

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from tests.support.feedback_formulas import (
    IN_MUON,
    LEVELS,
    OPTIMIZERS,
    gaps,
    give_gradients,
    noisy_gradient,
    parameters,
    proposal,
    reference,
    start_weights,
    with_feedback,
    zero_in_batch_2,
)
from titan_async.optim import ErrorFeedback
from titan_async.planning.storage_tracker import StorageTracker


@pytest.mark.parametrize("gradient", [noisy_gradient, gaps, zero_in_batch_2])
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [*OPTIMIZERS, IN_MUON])
def test_follows_the_formulas(name, level, strength, gradient):
    """Seven updates with changing learning rates; the first one is 0, as in a warm-up."""
    factors = [0.0, 0.5, 0.0 if gradient is zero_in_batch_2 else 1.0, 0.7, 1.3, 0.2, 0.1, 0.4]
    params = parameters()
    optimizer = with_feedback(name, params, level, strength)
    scheduler = LambdaLR(optimizer, lambda step: factors[step])
    rates = [0.1 * factor for factor in factors[:-1]]
    expected = reference(proposal(name), level, strength, start_weights(), gradient, rates)
    for batch, weights in enumerate(expected):
        give_gradients(params, batch, gradient)
        optimizer.step()
        scheduler.step()
        for param, weight in zip(params, weights, strict=True):
            torch.testing.assert_close(param.detach(), weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_strength_zero_is_bitwise_equal_to_the_wrapped_optimizer(name, level, dtype):
    build, _ = OPTIMIZERS[name]
    params, plain_params = parameters(dtype), parameters(dtype)
    optimizer, plain = ErrorFeedback(build(params), strength=0.0, level=level), build(plain_params)
    for batch in range(5):
        give_gradients(params, batch, gaps)
        give_gradients(plain_params, batch, gaps)
        optimizer.step()
        plain.step()
        for param, plain_param in zip(params, plain_params, strict=True):
            assert torch.equal(param, plain_param)


@pytest.mark.parametrize("paused", [(0, 1, 2), (2, 3), (6,)], ids=str)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["momentum", "adamw_fused", "muon", IN_MUON])
def test_pause_clears_the_history(name, level, paused):
    """Also in the saved state."""
    params = parameters()
    optimizer = with_feedback(name, params, level)
    expected = reference(proposal(name), level, 1.0, start_weights(), noisy_gradient, [0.1] * 7, paused)
    for batch, weights in enumerate(expected):
        optimizer.feedback_paused = batch in paused
        give_gradients(params, batch)
        optimizer.step()
        for param, weight in zip(params, weights, strict=True):
            torch.testing.assert_close(param.detach(), weight, rtol=1e-12, atol=1e-12)
            state = optimizer.state[param]
            assert bool(state[f"error_feedback_{level}_valid"]) == (batch not in paused)
            assert bool(state[f"error_feedback_{level}"].any()) == (batch not in paused)
        if batch == 2:
            saved, optimizer = copy.deepcopy(optimizer.state_dict()), with_feedback(name, params, level)
            optimizer.load_state_dict(saved)


@pytest.mark.parametrize("name", ["sgd", IN_MUON])
def test_pause_clears_a_loaded_history(name):
    """Even if all its steps are skipped. Copies are also paused."""
    params = parameters()
    optimizer = with_feedback(name, params)
    give_gradients(params, 0)
    optimizer.step()
    again = with_feedback(name, params)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again.feedback_paused = True
    assert copy.deepcopy(again).feedback_paused
    params[0].grad[0, 0] = torch.nan
    again.step()
    assert not any(bool(again.state[param]["error_feedback_update_valid"]) for param in params)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["sgd", IN_MUON])
def test_strength_may_change_between_steps(name, level):
    """Also from 0: the history is kept even if it is not used."""
    strengths = [0.5, 0.0, 0.0, 1.0, 0.25]
    params = parameters()
    optimizer = with_feedback(name, params, level)
    expected = reference(proposal(name), level, strengths, start_weights(), noisy_gradient, [0.1] * 5)
    for batch, (strength, weights) in enumerate(zip(strengths, expected, strict=True)):
        if name == IN_MUON:
            optimizer.param_groups[0]["error_feedback"] = strength
        else:
            optimizer.strength = strength
        give_gradients(params, batch)
        optimizer.step()
        for param, weight in zip(params, weights, strict=True):
            torch.testing.assert_close(param.detach(), weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_restored(name, level):
    params = parameters()
    optimizer = ErrorFeedback(OPTIMIZERS[name][0](params), level=level)
    for batch in range(3):
        give_gradients(params, batch)
        given = [param.grad for param in params]
        values = [grad.clone() for grad in given]
        optimizer.step()
        for param, grad, value in zip(params, given, values, strict=True):
            assert param.grad is grad
            assert torch.equal(grad, value)


@pytest.mark.parametrize("gradient", [noisy_gradient, gaps])
@pytest.mark.parametrize("name", ["momentum", "adamw_fused"])
def test_updates_in_chunks_follow_the_formulas(monkeypatch, name, gradient):
    monkeypatch.setattr("titan_async.optim.error_feedback._CHUNK_NUMEL", 1)
    build, propose = OPTIMIZERS[name]
    params = parameters()
    inner = build(params)
    moved = []  # in each step of the wrapped optimizer
    inner.register_step_pre_hook(lambda *_: moved.append([p for p in params if p.grad is not None]))
    optimizer = ErrorFeedback(inner, strength=0.5)
    expected = reference(propose, "update", 0.5, start_weights(), gradient, [0.1] * 6)
    for batch, weights in enumerate(expected):
        give_gradients(params, batch, gradient)
        given = [param.grad for param in params]
        moved.clear()
        optimizer.step()
        assert len(moved) == sum(grad is not None for grad in given) and all(len(each) == 1 for each in moved)
        assert all(param.grad is grad for param, grad in zip(params, given, strict=True))
        for param, weight in zip(params, weights, strict=True):
            torch.testing.assert_close(param.detach(), weight, rtol=1e-12, atol=1e-12)


def test_memory_of_updates_in_chunks(monkeypatch):
    monkeypatch.setattr("titan_async.optim.error_feedback._CHUNK_NUMEL", 2000)
    params = [torch.nn.Parameter(torch.zeros(1000)) for _ in range(8)]
    optimizer = ErrorFeedback(torch.optim.AdamW(params, fused=True))
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    with StorageTracker() as tracker:
        tracker.exclude(*params)
        optimizer.step()
    # A copy of all eight would be 32000 bytes.
    assert 4000 < tracker.peak - tracker.live <= 2 * 4000


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_restored_if_the_wrapped_optimizer_fails(monkeypatch, level):
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no step")

    monkeypatch.setattr("titan_async.optim.error_feedback._CHUNK_NUMEL", 1)
    monkeypatch.setattr("titan_async.optim.error_feedback._SEPARABLE_OPTIMIZERS", (Failing,))
    params = parameters()
    optimizer = ErrorFeedback(Failing(params, 0.1), level=level)
    give_gradients(params, 0)
    given = [param.grad for param in params]
    with pytest.raises(RuntimeError, match="no step"):
        optimizer.step()
    assert all(param.grad is grad for param, grad in zip(params, given, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_history_of_low_precision_is_float32(level):
    """Displacements are then exact even if a weight's order of magnitude changes."""
    params = parameters(torch.bfloat16)
    optimizer = ErrorFeedback(torch.optim.SGD(params, 0.1), level=level)
    for batch in range(2):
        before = [param.detach().double() for param in params]
        give_gradients(params, batch)
        optimizer.strength = 0.0
        optimizer.step()
    for param, old in zip(params, before, strict=True):
        history = optimizer.state[param][f"error_feedback_{level}"]
        newest = param.detach().double() - old if level == "update" else param.grad.double()
        assert history.dtype == torch.float32
        assert torch.equal(history.double(), newest)


def test_groups_and_defaults_are_those_of_the_wrapped_optimizer():
    first, second = parameters()
    inner = torch.optim.AdamW([{"params": [first], "lr": 0.5}])
    optimizer = ErrorFeedback(inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.defaults is inner.defaults
    optimizer.add_param_group({"params": [second], "lr": 0.25})
    assert optimizer.param_groups is inner.param_groups
    assert inner.param_groups[1]["params"] == [second]
    give_gradients([first, second], 0)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups is inner.param_groups
    optimizer.zero_grad()
    assert first.grad is None
    assert second.grad is None


def test_first_update_of_an_added_group_is_uncorrected():
    first, second = parameters()
    optimizer = ErrorFeedback(torch.optim.SGD([first], 0.1))
    give_gradients([first], 0)
    optimizer.step()
    optimizer.add_param_group({"params": [second]})
    assert not optimizer.state[second]["error_feedback_update_valid"]
    before = second.detach().clone()
    give_gradients([first, second], 1)
    optimizer.step()
    torch.testing.assert_close(second.detach(), before - 0.1 * second.grad, rtol=1e-12, atol=1e-12)


def test_schedulers_work_without_warnings():
    params = parameters()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for build in (
            lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
            lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=5),
        ):
            optimizer = ErrorFeedback(torch.optim.AdamW(params, 0.1))
            scheduler = build(optimizer)
            rates = []
            for batch in range(3):
                give_gradients(params, batch)
                optimizer.step()
                scheduler.step()
                rates.append(optimizer.optimizer.param_groups[0]["lr"])
            assert len(set(rates)) == 3


@pytest.mark.parametrize("level", LEVELS)
def test_hooks_run_once_and_see_the_corrected_weights(level):
    params = parameters()
    optimizer = ErrorFeedback(torch.optim.SGD(params, 0.1), level=level)
    calls, seen = [], []
    optimizer.register_step_pre_hook(lambda self, args, kwargs: calls.append("pre"))
    handle = optimizer.register_step_post_hook(lambda self, args, kwargs: calls.append("post"))
    optimizer.register_step_post_hook(lambda self, args, kwargs: seen.append(params[0].detach().clone()))
    for batch in range(2):
        give_gradients(params, batch)
        optimizer.step()
        assert torch.equal(seen[-1], params[0])
    assert calls == ["pre", "post"] * 2
    handle.remove()
    optimizer.step()
    assert calls == ["pre", "post"] * 2 + ["pre"]


@pytest.mark.parametrize("level", LEVELS)
def test_closure_is_called_once_and_its_gradients_are_used(level):
    param, twin = parameters()[0], parameters()[0]
    optimizer = ErrorFeedback(torch.optim.SGD([param], 0.1), level=level)
    other = ErrorFeedback(torch.optim.SGD([twin], 0.1), level=level)
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = param.pow(3).sum()
        loss.backward()
        return loss

    for step in range(3):
        expected = param.detach().pow(3).sum()
        assert torch.equal(optimizer.step(closure), expected)
        twin.grad = 3 * twin.detach().pow(2)
        other.step()
        assert len(calls) == step + 1
        torch.testing.assert_close(param.detach(), twin.detach(), rtol=1e-12, atol=1e-12)


def test_invalid_arguments_raise():
    optimizer = torch.optim.SGD(parameters(), 0.1)
    for strength in (-0.5, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="strength"):
            ErrorFeedback(optimizer, strength=strength)
        with pytest.raises(ValueError, match="strength"):
            ErrorFeedback(optimizer).strength = strength
    with pytest.raises(ValueError, match="'update', 'gradient'"):
        ErrorFeedback(optimizer, level="moment")
    with pytest.raises(ValueError, match="AdamW at level 'update', not with SGD"):
        ErrorFeedback(optimizer, compile=True)
    with pytest.raises(ValueError, match="at level 'gradient'"):
        ErrorFeedback(torch.optim.AdamW(parameters()), level="gradient", compile=True)
    with pytest.raises(TypeError, match="list"):
        ErrorFeedback(parameters())


def test_sparse_gradients_need_level_update():
    param = torch.nn.Parameter(torch.zeros(3, 2))
    optimizer = ErrorFeedback(torch.optim.SGD([param], 0.1), level="gradient")
    param.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match="level 'update'"):
        optimizer.step()


def test_step_without_gradients():
    for level in LEVELS:
        params = parameters()
        optimizer = ErrorFeedback(torch.optim.SGD(params, 0.1), level=level)
        optimizer.step()
        give_gradients(params, 0)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        assert not optimizer.state[params[0]][f"error_feedback_{level}_valid"]
        assert not optimizer.state[params[0]][f"error_feedback_{level}"].any()
