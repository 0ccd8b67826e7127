"""Gradients of sharded Muon: missing or not finite on some ranks, zero, partial, with other placements."""

import math

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.support.optim import (
    MUONS,
    assert_close,
    bits,
    distribute,
    full,
    give_gradients,
    mesh_of,
    meshes,
    parameters,
    placed,
    randn,
    same_bits,
    updated,
    was_skipped,
    whole,
)
from titan_async.optim import ErrorFeedback, Muon

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
SHAPES = [(8, 4), (6, 10), (3, 5, 4), (1, 4), (9, 9)]
LAYOUTS = {"rows": ((4,), [S0]), "hsdp": ((2, 2), [R, S0]), "blocks": ((2, 2), [S0, S1])}


def train_with_gaps(rank, group, name, layout, on=None):
    """Parameter 1 has no gradient in step 2 on rank 2; 0 and 4 have none in step 3 on ranks 0 and 3."""
    place = placed(LAYOUTS[layout]) if layout else whole
    params = parameters(SHAPES, torch.float64, place)
    optimizer = MUONS[name](params, lr=0.1, compute_dtype="float64")
    gaps = {2: {1: [2]}, 3: {0: [0], 4: [3]}}
    report = []
    for step in range(5):
        missing = [n for n, ranks in gaps.get(step, {}).items() if rank is None or rank in ranks]
        give_gradients(params, step, place, missing=missing)
        before = bits([params[n] for n in gaps.get(step, {})], optimizer)
        optimizer.step()
        after = bits([params[n] for n in gaps.get(step, {})], optimizer)
        for (key, old), (_, new) in zip(before, after, strict=True):
            report.append(not new.any() if "error_feedback" in key else torch.equal(old, new))
    return full(params), report


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MUONS)
def test_gradient_that_is_missing_on_some_ranks_is_missing_on_all(four_ranks, name, layout):
    expected, report = train_with_gaps(None, None, name, None)
    assert all(report)
    results = four_ranks.run(4, train_with_gaps, name, layout)
    for found, report in results:
        assert report and all(report)
        assert_close(found, expected)


def train_with_a_non_finite_gradient(rank, group, name, layout, value, bad_rank):
    place = placed(LAYOUTS[layout])
    params, others = parameters(SHAPES, torch.float64, place), parameters(SHAPES, torch.float64, place)
    optimizer, other = MUONS[name](params, lr=0.1), MUONS[name](others, lr=0.1)
    report = []
    for step in range(5):
        for each, each_params in ((optimizer, params), (other, others)):
            give_gradients(each_params, step, place)
            each.step()
            report.append(not was_skipped(each))
        report.append(same_bits(bits(params, optimizer), bits(others, other)))
        if step in (0, 2):
            give_gradients(params, 50 + step, place, missing=[0] if step else [])
            if rank == bad_rank:
                params[1].grad.to_local()[-1, -1] = value
            before = bits(params, optimizer)
            optimizer.step()
            report += [was_skipped(optimizer), same_bits(before, bits(params, optimizer))]
    return report


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("value", "layout", "bad_rank"), [(math.nan, "rows", 1), (math.inf, "hsdp", 3), (-math.inf, "blocks", 0)]
)
@pytest.mark.parametrize("name", MUONS)
def test_non_finite_gradient_on_one_rank_skips_the_step_on_all(four_ranks, name, value, layout, bad_rank):
    for report in four_ranks.run(4, train_with_a_non_finite_gradient, name, layout, value, bad_rank):
        assert len(report) == 19
        assert all(report)


def warm_up(rank, group, name, sharded):
    """In the first step, the learning rate and the gradients of most shards are zero."""
    place = placed(LAYOUTS["rows"]) if sharded else whole
    params = parameters([(8, 4), (4, 4)], torch.float64, place)
    build = {**MUONS, "around adamw": lambda params, **_: ErrorFeedback(torch.optim.AdamW(params, 0.1))}
    optimizer = build[name](params, lr=0.1, compute_dtype="float64")
    flags = []
    for step, lr in enumerate([0.0, 0.1, 0.1]):
        optimizer.param_groups[0]["lr"] = lr
        give_gradients(params, step, place)
        if step == 0:
            for param in params:
                grad = torch.zeros(param.shape, dtype=torch.float64)
                grad[0, 0] = 1
                param.grad = place(grad)
        optimizer.step()
        flags.append([bool(v) for p in params for k, v in optimizer.state[p].items() if "valid" in k])
    return full(params), flags


@pytest.mark.parametrize("name", [*MUONS, "around adamw"])
def test_warm_up_with_zero_gradients_on_some_ranks(four_ranks, name):
    """It is an update on all ranks, not a step that only creates state."""
    expected, flags = warm_up(None, None, name, False)
    for found, their_flags in four_ranks.run(4, warm_up, name, True):
        assert their_flags == flags
        assert_close(found, expected)


def create_state(rank, group, name):
    """Zero gradients at learning rate zero, on shards."""
    place = placed(LAYOUTS["rows"])
    params = parameters(SHAPES, torch.float64, place)
    optimizer = MUONS[name](params, lr=0.1)
    before = bits(params, optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    report = [same_bits(before, bits(params, optimizer))]
    optimizer.param_groups[0]["lr"] = 0.1
    others = parameters(SHAPES, torch.float64, place)
    plain = MUONS["plain"](others, lr=0.1)
    for each, each_params in ((optimizer, params), (plain, others)):
        give_gradients(each_params, 0, place)
        each.step()
    return [
        *report,
        all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(params, others, strict=True)),
    ]


@pytest.mark.parametrize("name", MUONS)
def test_creating_state_is_not_an_update(four_ranks, name):
    assert all(map(all, four_ranks.run(4, create_state, name)))


def train_with_other_gradients(rank, group, layout, gradient, name):
    place = placed(layout)
    params = parameters([(8, 4), (6, 10), (4, 8, 4)], torch.float64, place)
    optimizer = MUONS[name](params, lr=0.1, compute_dtype="float64")
    for step in range(3):
        for number, param in enumerate(params):
            grad = randn(param.shape, step, number)
            mesh = param.device_mesh
            if gradient == "partial":
                # The sum over all dimensions of the mesh is the gradient.
                share = grad * (rank + 1) / 10
                param.grad = DTensor.from_local(share, mesh, [Partial()] * mesh.ndim)
            else:
                param.grad = distribute(grad, mesh, [gradient] * mesh.ndim)
        optimizer.step()
    return full(params)


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", ["plain", "inside update", "inside gradient", "around update"])
@pytest.mark.parametrize("gradient", ["partial", R, S1], ids=str)
@pytest.mark.parametrize("layout", [((4,), [S0]), ((2, 2), [R, S0]), ((2, 2), [S1, S0])], ids=str)
def test_gradients_with_other_placements_than_their_parameters(four_ranks, layout, gradient, name):
    """Tensor parallelism may produce such gradients."""
    params, _ = updated([(8, 4), (6, 10), (4, 8, 4)], make=MUONS[name], compute_dtype="float64")
    for found in four_ranks.run(4, train_with_other_gradients, layout, gradient, name):
        assert_close(found, full(params))


def train_with_sums_that_overflow(rank, group, layout, name):
    """One of two parameters has partial gradients; in step 2 these are finite, but their sum is not."""
    place, mesh = placed(layout), mesh_of(layout)
    params = parameters([(8, 4), (6, 10)], torch.float32, place)
    optimizer = MUONS[name](params, lr=0.1)
    report = []
    for step in range(4):
        give_gradients(params, step, place)
        share = params[0].grad.full_tensor() / 4 if step != 2 else torch.full((8, 4), 2e38)
        params[0].grad = DTensor.from_local(share, mesh, [Partial()] * mesh.ndim)
        before = bits(params, optimizer)
        optimizer.step()
        report.append((was_skipped(optimizer), same_bits(before, bits(params, optimizer))))
    return report, full(params)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["plain", "inside update", "inside gradient", "around update"])
@pytest.mark.parametrize("layout", [((4,), [S0]), ((4,), [R]), ((2, 2), [R, S0])], ids=str)
def test_partial_gradients_whose_sum_overflows_skip_the_step(four_ranks, layout, name):
    shapes = [(8, 4), (6, 10)]
    params, _ = updated(shapes, make=MUONS[name], dtype=torch.float32, steps=(0, 1, 3))
    for report, weights in four_ranks.run(4, train_with_sums_that_overflow, layout, name):
        assert report == [(False, False), (False, False), (True, True), (False, False)]
        assert_close(weights, full(params), 1e-2)


def finite_on_one_rank_only(rank, group):
    """A sum that overflows only on the rank that holds the row."""
    mesh = meshes["line"]
    param = torch.nn.Parameter(distribute(torch.zeros(8, 4), mesh, [S0]))
    other = torch.nn.Parameter(distribute(torch.zeros(8, 4), mesh, [S0]))
    optimizer = Muon([param, other], 0.1)
    share = torch.ones(8, 4)
    share[7] = 2e38
    param.grad = DTensor.from_local(share, mesh, [Partial()])
    # Large parts with a finite sum: 3e38 - 2e38.
    other.grad = DTensor.from_local(torch.full((8, 4), [1e38, 1e38, 1e38, -2e38][rank]), mesh, [Partial()])
    optimizer.step()
    first = optimizer.step_was_skipped, bool(param.to_local().any()), bool(other.to_local().any())
    param.grad = None
    optimizer.step()
    return *first, optimizer.step_was_skipped, bool(other.to_local().any())


def test_all_ranks_skip_a_sum_that_overflows_on_one(four_ranks):
    assert four_ranks.run(4, finite_on_one_rank_only) == [(True, False, False, False, True)] * 4
