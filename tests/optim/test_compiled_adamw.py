"""AdamW with error feedback in one compiled pass, against the formulas in float64."""

import copy

import pytest
import torch

from tests.support.feedback_formulas import (
    OPTIMIZERS,
    gaps,
    give_gradients,
    noisy_gradient,
    parameters,
    propose_adamw,
    reference,
    start_weights,
)
from titan_async.optim import ErrorFeedback, compiled_adamw


@pytest.mark.parametrize("backend", ["traced", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("gradient", [noisy_gradient, gaps])
def test_compiled_updates_follow_the_formulas(monkeypatch, gradient, backend):
    """One graph serves all learning rates, strengths and shapes."""
    graphs = []

    def as_traced(graph, inputs):
        graphs.append(graph)
        return graph

    if backend == "traced":
        traced = torch.compile(
            compiled_adamw._update_and_correct_, dynamic=True, fullgraph=True, backend=as_traced
        )
        monkeypatch.setattr(compiled_adamw, "_compiled", lambda: traced)
    others = (torch.randn(shape, dtype=torch.float64) for shape in ((7,), (2, 3, 4), (0, 4)))
    start = [*start_weights(), *others]
    rates = [0.0, 0.5, 1.0, 0.7, 1.3, 0.2, 0.1]
    for strength in (1.0, 0.5):
        params = [torch.nn.Parameter(x.clone()) for x in start]
        inner = OPTIMIZERS["adamw_fused"][0](params)
        optimizer = ErrorFeedback(inner, strength=strength, compile=True)
        eager_rates = []  # of steps that are not compiled
        inner.register_step_pre_hook(lambda o, *_, to=eager_rates: to.append(o.param_groups[0]["lr"]))
        expected = reference(propose_adamw, "update", strength, start, gradient, rates)
        for batch, weights in enumerate(expected):
            give_gradients(params, batch, gradient)
            inner.param_groups[0]["lr"] = rates[batch]
            optimizer.step()
            for param, weight in zip(params, weights, strict=True):
                torch.testing.assert_close(param.detach(), weight, rtol=1e-12, atol=1e-12)
        assert eager_rates == [rates[i] for i in ((0, 1, 5) if gradient is gaps else (0,))]
        assert inner.state[params[0]]["step"] == len(rates)
    assert len(graphs) == (backend == "traced")


def record_passes(monkeypatch):
    """Replace the compiled update by its Python code; returns a list of the arguments of its calls."""
    passes = []

    def run(*arguments):
        passes.append(arguments)
        compiled_adamw._update_and_correct_(*arguments)

    monkeypatch.setattr(compiled_adamw, "_compiled", lambda: run)
    return passes


@pytest.mark.parametrize("transposed", ["weight", "gradient"])
def test_compiled_updates_of_any_memory_layout(monkeypatch, transposed):
    passes = record_passes(monkeypatch)
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
def test_updates_that_cannot_be_compiled(monkeypatch, dtype, options, strength):
    passes = record_passes(monkeypatch)
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


def test_missing_compiler_raises_without_changes(monkeypatch):
    def fails(*_):
        raise RuntimeError("no compiler")

    params = parameters()
    optimizer = ErrorFeedback(OPTIMIZERS["adamw_fused"][0](params), compile=True)
    give_gradients(params, 0)
    optimizer.step()
    before, state = copy.deepcopy((params, optimizer.state_dict()))
    monkeypatch.setattr(compiled_adamw, "_compiled", lambda: fails)
    with pytest.raises(RuntimeError, match="no compiler"):
        optimizer.step()
    torch.testing.assert_close(
        (params, optimizer.state_dict()["state"]), (before, state["state"]), rtol=0, atol=0
    )
