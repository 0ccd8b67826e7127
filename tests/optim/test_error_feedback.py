"""Error feedback against its formulas, written out by hand for every optimizer, in float64."""

import copy
import math
import warnings

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from titan_async.optim import ErrorFeedback, Muon, one_pass
from titan_async.planning.storage_tracker import StorageTracker

LEVELS = ["update", "gradient"]
SHAPES = [(6, 4), (3, 5)]
DECAY = 0.1


# Each proposal returns the displacement of a parameter from its weights, its gradient, the learning rate
# and the optimizer's memory, and updates that memory. None of it knows about error feedback.


def propose_sgd(x, g, lr, memory):
    return -lr * (g + DECAY * x)


def propose_momentum(x, g, lr, memory):
    g = g + DECAY * x
    memory["m"] = g if "m" not in memory else 0.9 * memory["m"] + g
    return -lr * memory["m"]


def propose_adamw(x, g, lr, memory):
    t = memory["t"] = memory.get("t", 0) + 1
    memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    memory["v"] = 0.95 * memory.get("v", 0) + 0.05 * g * g
    m, v = memory["m"] / (1 - 0.9**t), memory["v"] / (1 - 0.95**t)
    return -lr * DECAY * x - lr * m / (v.sqrt() + 1e-8)


def propose_muon(x, g, lr, memory):
    memory["m"] = 0.95 * memory.get("m", 0) + 0.05 * g
    update = 0.95 * memory["m"] + 0.05 * g
    u, s, vh = torch.linalg.svd(update, full_matrices=False)
    s = s / update.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    rows, cols = x.shape
    return -lr * DECAY * x - lr * math.sqrt(max(1, rows / cols)) * (u @ torch.diag(s) @ vh)


ADAMW = {"betas": (0.9, 0.95), "weight_decay": DECAY}
OPTIMIZERS = {
    "sgd": (lambda ps: torch.optim.SGD(ps, 0.1, weight_decay=DECAY), propose_sgd),
    "momentum": (lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=DECAY), propose_momentum),
    "adamw": (lambda ps: torch.optim.AdamW(ps, 0.1, **ADAMW), propose_adamw),
    "adamw_foreach": (lambda ps: torch.optim.AdamW(ps, 0.1, foreach=True, **ADAMW), propose_adamw),
    "adamw_fused": (lambda ps: torch.optim.AdamW(ps, 0.1, fused=True, **ADAMW), propose_adamw),
    "muon": (lambda ps: Muon(ps, 0.1, weight_decay=DECAY, compute_dtype="float64"), propose_muon),
}


def reference(propose, level, strength, start, gradient, rates, paused=()):
    """Design formulas: D' = D + s (D - D_prev), or g' = g + s (g - g_prev); ``None`` breaks the chain.

    So does a batch of ``paused``.
    """
    weights = [x.clone() for x in start]
    memories: list[dict] = [{} for _ in weights]
    previous: list[torch.Tensor | None] = [None for _ in weights]
    trajectory = []
    for batch, lr in enumerate(rates):
        if batch in paused:
            previous = [None for _ in weights]
        for i, x in enumerate(weights):
            g = gradient(batch, i, x)
            if g is None:
                previous[i] = None
                continue
            if level == "gradient":
                corrected = g if previous[i] is None else g + strength * (g - previous[i])
                weights[i] = x + propose(x, corrected, lr, memories[i])
                previous[i] = g
            else:
                d = propose(x, g, lr, memories[i])
                weights[i] = x + d if previous[i] is None else x + d + strength * (d - previous[i])
                previous[i] = d
        if batch in paused:
            previous = [None for _ in weights]
        trajectory.append([x.clone() for x in weights])
    return trajectory


def noisy_gradient(batch: int, index: int, x: torch.Tensor) -> torch.Tensor:
    """A different one in each batch, which also depends on the weights."""
    generator = torch.Generator().manual_seed(100 * batch + index)
    return 0.5 * x + torch.randn(x.shape, dtype=x.dtype, generator=generator)


def gaps(batch, index, x):
    """The second parameter has no gradient in batches 0, 3 and 4."""
    return None if index == 1 and batch in (0, 3, 4) else noisy_gradient(batch, index, x)


def start_weights(dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in SHAPES]


def parameters(dtype=torch.float64):
    return [torch.nn.Parameter(x) for x in start_weights(dtype)]


def give_gradients(params, batch, gradient=noisy_gradient):
    for i, param in enumerate(params):
        param.grad = gradient(batch, i, param.detach())


@pytest.mark.parametrize("gradient", [noisy_gradient, gaps])
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_follows_the_formulas(name, level, strength, gradient):
    """Seven updates at a learning rate that changes every time, 0 at first as in a warm-up."""
    build, propose = OPTIMIZERS[name]
    factors = [0.0, 0.5, 1.0, 0.7, 1.3, 0.2, 0.1, 0.4]
    params = parameters()
    optimizer = ErrorFeedback(build(params), strength=strength, level=level)
    scheduler = LambdaLR(optimizer, lambda step: factors[step])
    rates = [0.1 * factor for factor in factors[:-1]]
    expected = reference(propose, level, strength, start_weights(), gradient, rates)
    for batch, weights in enumerate(expected):
        give_gradients(params, batch, gradient)
        optimizer.step()
        scheduler.step()
        for param, weight in zip(params, weights, strict=True):
            torch.testing.assert_close(param.detach(), weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_strength_zero_is_the_wrapped_optimizer_bit_by_bit(name, level, dtype):
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


def feedback_in_muon(level):
    options = {"error_feedback": 1.0, "error_feedback_level": level, "compute_dtype": "float64"}
    return lambda params: Muon(params, 0.1, weight_decay=DECAY, **options)


@pytest.mark.parametrize("paused", [(0, 1, 2), (2, 3), (6,)], ids=str)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["momentum", "adamw_fused", "muon", "inside muon"])
def test_the_history_begins_after_a_pause(name, level, paused):
    """In the pause there is no history in the state either, and another optimizer goes on from it."""
    build, propose = OPTIMIZERS["muon" if name == "inside muon" else name]
    params = parameters()

    def make():
        if name == "inside muon":
            return feedback_in_muon(level)(params)
        return ErrorFeedback(build(params), level=level)

    optimizer = make()
    expected = reference(propose, level, 1.0, start_weights(), noisy_gradient, [0.1] * 7, paused)
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
            saved, optimizer = copy.deepcopy(optimizer.state_dict()), make()
            optimizer.load_state_dict(saved)


def test_a_pause_is_copied_and_ends_with_what_a_checkpoint_holds():
    """A history that was loaded before a pause does not outlive it, even if all its steps are skipped."""
    params = parameters()
    for build in (feedback_in_muon("update"), lambda ps: ErrorFeedback(torch.optim.SGD(ps, 0.1))):
        optimizer = build(params)
        give_gradients(params, 0)
        optimizer.step()
        again = build(params)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        again.feedback_paused = True
        assert copy.deepcopy(again).feedback_paused
        params[0].grad[0, 0] = torch.nan
        again.step()
        assert not any(bool(again.state[param]["error_feedback_update_valid"]) for param in params)


@pytest.mark.parametrize("level", LEVELS)
def test_strength_may_change_between_steps(level):
    """Also from 0: the history is kept whether or not it is used."""
    strengths = [0.0, 0.0, 1.0, 0.25]
    params = parameters()
    optimizer = ErrorFeedback(torch.optim.SGD(params, 0.1), strength=0.0, level=level)
    weight, previous = start_weights()[0], None
    for batch, strength in enumerate(strengths):
        optimizer.strength = strength
        give_gradients(params, batch)
        optimizer.step()
        newest = -0.1 * noisy_gradient(batch, 0, weight)
        weight = weight + newest + (0 if previous is None else strength * (newest - previous))
        previous = newest
    torch.testing.assert_close(params[0].detach(), weight, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="strength"):
        optimizer.strength = -1.0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_left_as_given(name, level):
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
def test_parameters_that_are_updated_one_after_the_other_follow_the_formulas(monkeypatch, name, gradient):
    monkeypatch.setattr("titan_async.optim.error_feedback._CHUNK", 1)
    build, propose = OPTIMIZERS[name]
    params = parameters()
    inner = build(params)
    moved = []  # by each step of the wrapped optimizer
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


@pytest.mark.parametrize("backend", ["traced", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("gradient", [noisy_gradient, gaps])
def test_one_compiled_pass_follows_the_formulas(monkeypatch, gradient, backend):
    """One graph serves all rates, strengths, shapes and numbers of elements."""
    graphs = []

    def as_traced(graph, inputs):
        graphs.append(graph)
        return graph

    if backend == "traced":
        traced = torch.compile(one_pass._update_and_correct_, dynamic=True, fullgraph=True, backend=as_traced)
        monkeypatch.setattr(one_pass, "_compiled", lambda: traced)
    others = (torch.randn(shape, dtype=torch.float64) for shape in ((7,), (2, 3, 4), (0, 4)))
    start = [*start_weights(), *others]
    rates = [0.0, 0.5, 1.0, 0.7, 1.3, 0.2, 0.1]
    for strength in (1.0, 0.5):
        params = [torch.nn.Parameter(x.clone()) for x in start]
        inner = OPTIMIZERS["adamw_fused"][0](params)
        optimizer = ErrorFeedback(inner, strength=strength, compile=True)
        rates_of_inner = []  # all other steps are made in one pass
        inner.register_step_pre_hook(lambda o, *_, to=rates_of_inner: to.append(o.param_groups[0]["lr"]))
        expected = reference(propose_adamw, "update", strength, start, gradient, rates)
        for batch, weights in enumerate(expected):
            give_gradients(params, batch, gradient)
            inner.param_groups[0]["lr"] = rates[batch]
            optimizer.step()
            for param, weight in zip(params, weights, strict=True):
                torch.testing.assert_close(param.detach(), weight, rtol=1e-12, atol=1e-12)
        assert rates_of_inner == [rates[i] for i in ((0, 1, 5) if gradient is gaps else (0,))]
        assert inner.state[params[0]]["step"] == len(rates)
    assert len(graphs) == (backend == "traced")


def plain_pass(monkeypatch):
    """The pass that is compiled, as it is without; returns a list that grows with each parameter."""
    passes = []

    def run(*arguments):
        passes.append(arguments)
        one_pass._update_and_correct_(*arguments)

    monkeypatch.setattr(one_pass, "_compiled", lambda: run)
    return passes


@pytest.mark.parametrize("transposed", ["weight", "gradient"])
def test_one_pass_takes_any_layout(monkeypatch, transposed):
    passes = plain_pass(monkeypatch)
    start = torch.randn(4, 6, dtype=torch.float64)
    param = torch.nn.Parameter(start.T if transposed == "weight" else start.T.contiguous())
    optimizer = ErrorFeedback(OPTIMIZERS["adamw"][0]([param]), compile=True)
    expected = reference(propose_adamw, "update", 1.0, [start.T], noisy_gradient, [0.1] * 4)
    for batch, (weight,) in enumerate(expected):
        param.grad = noisy_gradient(batch, 0, param.detach())
        if transposed == "gradient":
            param.grad = param.grad.T.contiguous().T
        optimizer.step()
        torch.testing.assert_close(param.detach(), weight, rtol=1e-12, atol=1e-12)
    assert len(passes) == 3


@pytest.mark.parametrize(
    ("dtype", "options", "strength"),
    [
        (torch.bfloat16, {}, 1.0),
        (torch.float64, {"amsgrad": True}, 1.0),
        (torch.float64, {"maximize": True}, 1.0),
        (torch.float64, {}, 0.0),
    ],
)
def test_what_one_pass_cannot_do_is_done_without(monkeypatch, dtype, options, strength):
    passes = plain_pass(monkeypatch)
    params, twins = parameters(dtype), parameters(dtype)
    optimizer, twin = (
        ErrorFeedback(torch.optim.AdamW(each, 0.1, **options), strength, compile=compile)
        for each, compile in ((params, True), (twins, False))
    )
    for batch in range(4):
        for each, own in ((optimizer, params), (twin, twins)):
            give_gradients(own, batch)
            each.step()
        assert all(torch.equal(*both) for both in zip(params, twins, strict=True))
    assert not passes


def test_without_a_compiler_nothing_is_half_done(monkeypatch):
    def fails(*_):
        raise RuntimeError("no compiler")

    params = parameters()
    optimizer = ErrorFeedback(OPTIMIZERS["adamw_fused"][0](params), compile=True)
    give_gradients(params, 0)
    optimizer.step()
    before, state = copy.deepcopy((params, optimizer.state_dict()))
    monkeypatch.setattr(one_pass, "_compiled", lambda: fails)
    with pytest.raises(RuntimeError, match="no compiler"):
        optimizer.step()
    torch.testing.assert_close(
        (params, optimizer.state_dict()["state"]), (before, state["state"]), rtol=0, atol=0
    )


def test_only_the_parameters_that_are_updated_together_are_remembered_at_a_time(monkeypatch):
    monkeypatch.setattr("titan_async.optim.error_feedback._CHUNK", 2000)
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
def test_gradients_come_back_when_the_wrapped_optimizer_fails(monkeypatch, level):
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no step")

    monkeypatch.setattr("titan_async.optim.error_feedback._CHUNK", 1)
    monkeypatch.setattr("titan_async.optim.error_feedback._BY_PARAMETER", (Failing,))
    params = parameters()
    optimizer = ErrorFeedback(Failing(params, 0.1), level=level)
    give_gradients(params, 0)
    given = [param.grad for param in params]
    with pytest.raises(RuntimeError, match="no step"):
        optimizer.step()
    assert all(param.grad is grad for param, grad in zip(params, given, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_history_of_low_precision_is_float32(level):
    """So that displacements are exact also where a weight changes its order of magnitude."""
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


def test_group_added_later_starts_uncorrected():
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


def test_wrong_arguments_are_named():
    optimizer = torch.optim.SGD(parameters(), 0.1)
    for strength in (-0.5, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="strength"):
            ErrorFeedback(optimizer, strength=strength)
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


def test_a_step_without_any_gradient_is_harmless():
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
