"""Muon with missing, zero and non-finite gradients, and error feedback in it and around it."""

import itertools
import math

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from tests.support.optim import (
    LEVELS,
    WITH_FEEDBACK,
    around,
    bits,
    give_gradients,
    inside,
    parameters,
    same_bits,
    was_skipped,
)
from titan_async.optim import Muon

SHAPES = [(6, 4), (3, 5), (2, 4, 3)]


@pytest.mark.parametrize("where", WITH_FEEDBACK)
@pytest.mark.parametrize("level", LEVELS)
def test_parameter_without_a_gradient_is_skipped_and_its_history_cleared(level, where):
    """The next update equals that of an optimizer with this momentum and no history."""
    params = parameters(SHAPES)
    optimizer = WITH_FEEDBACK[where](params, level, lr=0.1, weight_decay=0.3)
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
    weight = params[1].detach().clone()
    momentum = optimizer.state[params[1]]["momentum_buffer"].clone()
    give_gradients(params, 3, missing=[1])
    optimizer.step()
    assert torch.equal(params[1], weight)
    state = optimizer.state[params[1]]
    assert torch.equal(state["momentum_buffer"], momentum)
    assert not state[f"error_feedback_{level}"].any()
    assert not state[f"error_feedback_{level}_valid"]
    assert optimizer.state[params[0]][f"error_feedback_{level}_valid"]

    fresh = torch.nn.Parameter(weight)
    plain = Muon([fresh], lr=0.1, weight_decay=0.3)
    plain.state[fresh]["momentum_buffer"].copy_(momentum)
    give_gradients(params, 4)
    fresh.grad = params[1].grad.clone()
    optimizer.step()
    plain.step()
    assert torch.equal(params[1], fresh)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options", [{}, {"ns_form": "gram"}, {"compute_dtype": "float16"}, {"nesterov": False}]
)
def test_zero_gradients_are_exactly_weight_decay(options, dtype):
    params = parameters(SHAPES, dtype)
    expected = [param.detach() * (1 - 0.1 * 0.5) for param in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    Muon(params, 0.1, 0.5, **options).step()
    assert all(map(torch.equal, params, expected))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "make",
    [
        lambda params: Muon(params, 0.1),
        *[
            lambda params, where=where, level=level: WITH_FEEDBACK[where](params, level, lr=0.1)
            for where, level in itertools.product(WITH_FEEDBACK, LEVELS)
        ],
    ],
    ids=["plain", *map(" ".join, itertools.product(WITH_FEEDBACK, LEVELS))],
)
def test_non_finite_gradient_changes_nothing(make, value):
    """The next step equals that of a run without it."""
    params, others = parameters(SHAPES), parameters(SHAPES)
    optimizer, other = make(params), make(others)
    for step in range(5):
        if step in (0, 3):
            before = bits(params, optimizer)
            give_gradients(params, 99, bad={1: value})
            optimizer.step()
            assert was_skipped(optimizer)
            assert same_bits(before, bits(params, optimizer))
        for each, each_params in ((optimizer, params), (other, others)):
            give_gradients(each_params, step)
            each.step()
            assert not was_skipped(each)
        assert same_bits(bits(params, optimizer), bits(others, other))


@pytest.mark.parametrize("where", WITH_FEEDBACK)
def test_correction_that_overflows_skips_the_step(where):
    """In float16, 40000 + (40000 - -40000) is infinite, although both gradients are finite."""
    param = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float16))
    optimizer = WITH_FEEDBACK[where]([param], "gradient", lr=0.1)
    for sign, skipped in ((-1, False), (1, True), (-1, False)):
        before = bits([param], optimizer)
        param.grad = torch.full((2, 2), sign * 4e4, dtype=torch.float16)
        param.grad[0, 0] = 1
        optimizer.step()
        assert was_skipped(optimizer) == skipped
        assert optimizer.state[param]["momentum_buffer"].isfinite().all()
        assert param.isfinite().all()
        if skipped:
            assert same_bits(before, bits([param], optimizer))


@pytest.mark.parametrize("bucket_mb", [1e-4, math.inf])
def test_every_subset_of_gradients(bucket_mb):
    """Five parameters in one optimizer, against each in a separate one."""
    shapes = [(6, 4), (4, 4), (3, 5), (2, 4, 3), (7, 2)]
    together, apart = parameters(shapes, torch.float64), parameters(shapes, torch.float64)
    optimizer = inside(together, "update", lr=0.1, compute_dtype="float64", bucket_mb=bucket_mb)
    singles = [inside([param], "update", lr=0.1, compute_dtype="float64") for param in apart]
    for step in range(2**5):
        missing = [number for number in range(5) if not step >> number & 1]
        give_gradients(together, step, missing=missing)
        give_gradients(apart, step, missing=missing)
        for each in (optimizer, *singles):
            each.step()
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_bfloat16_gradients_of_float32_parameters():
    """torch allows these with `Tensor.grad_dtype`."""
    [param] = parameters([(6, 4)])
    if not hasattr(param, "grad_dtype"):
        pytest.skip("gradients have the dtype of their parameters")
    param.grad_dtype = torch.bfloat16
    optimizer = inside([param], "gradient")
    for _ in range(3):
        param.grad = torch.randn(6, 4, dtype=torch.bfloat16)
        optimizer.step()
    assert param.dtype == optimizer.state[param]["momentum_buffer"].dtype == torch.float32
    assert param.isfinite().all()


def test_weights_that_are_not_contiguous():
    torch.manual_seed(0)
    start = torch.randn(8, 12, dtype=torch.float64)
    views = {
        "plain": start.clone(),
        "transposed": start.mT.contiguous().mT,
        "strided": start.repeat(2, 2)[::2, :12],
    }
    views["strided"].copy_(start)
    found = []
    for view in views.values():
        param = torch.nn.Parameter(view)
        optimizer = inside([param], "update", lr=0.1, compute_dtype="float64")
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            param.grad = torch.randn(12, 8, dtype=torch.float64, generator=generator).mT
            optimizer.step()
        found.append(param.detach())
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=0, atol=1e-12)


def test_gradient_scaler():
    """The scaler skips the step and lowers the scale."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 6, bias=False)
    optimizer = inside(model.parameters(), "update", lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        before = model.weight.detach().clone()
        inputs = torch.full((2, 4), math.inf if step == 1 else 1.0)
        scaler.scale(model(inputs).square().mean()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(model.weight, before) == (step == 1)
    assert scaler.get_scale() < 2.0**10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("strength", [1.0, 0.3])
def test_feedback_in_muon_is_bitwise_equal_to_feedback_around_muon(strength, level, dtype):
    """With missing gradients, skipped steps, weight decay, and learning rates of zero."""
    runs = []
    for make in (inside, around):
        params = parameters(SHAPES, dtype)
        optimizer = make(params, level, strength, lr=0.1, weight_decay=0.3)
        scheduler = LambdaLR(optimizer, lambda step: 0.0 if step == 15 else math.sin(step / 20 * math.pi))
        for step in range(21):
            missing = [0] if step in (4, 5) else [1, 2] if step == 9 else [0, 1, 2] if step == 12 else []
            bad = {2: math.nan} if step in (2, 7, 13) else {0: math.inf, 1: -math.inf} if step == 10 else {}
            give_gradients(params, step, missing=missing, bad=bad)
            if step in (15, 16):
                for param in params:
                    param.grad.zero_()
            optimizer.step()
            scheduler.step()
        runs.append(bits(params, optimizer))
    assert same_bits(*runs)
    assert not any(map(torch.equal, params, parameters(SHAPES, dtype)))


@pytest.mark.parametrize("level", LEVELS)
def test_correction_with_a_bfloat16_history(level):
    """It is within 1 % of that with a float32 history, in each of 50 steps from the same state.

    A missing or doubled correction has an error of 100 %.
    """
    params = parameters([(32, 24)])
    optimizer = inside(params, level, lr=0.02, compute_dtype="float64")
    worst = 0.0
    for step in range(50):
        give_gradients(params, step)
        [param] = params
        trials = {}
        for name, dtype in (("exact", "float32"), ("rounded", "bfloat16"), ("none", "float32")):
            trial = torch.nn.Parameter(param.detach().double())
            other = inside([trial], level, lr=0.02, compute_dtype="float64", error_feedback_dtype=dtype)
            for key, value in optimizer.state[param].items():
                other.state[trial][key].copy_(value)
            if name == "none":
                other.state[trial][f"error_feedback_{level}_valid"].fill_(False)
            trial.grad = param.grad.double()
            other.step()
            trials[name] = trial.detach()
        correction = (trials["exact"] - trials["none"]).norm()
        if step > 0:
            assert correction > 0.1 * (trials["none"] - param).norm()
            worst = max(worst, float((trials["rounded"] - trials["exact"]).norm() / correction))
        optimizer.step()
    assert 0 < worst < 0.01
