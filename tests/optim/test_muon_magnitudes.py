"""Muon with gradients from zero to the largest number: finite, and independent of the gradient's scale.

In one process and on several ranks, for all dtypes of parameters and iterations, forms and placements.
"""

import functools
import itertools
import math

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from tests.support.optim import distribute, meshes, placed
from titan_async.optim import ErrorFeedback, Lion, Muon, QKClip, QueryKey, orthogonalize, resolve_coefficients

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
MAGNITUDES = [0.0, 1e-60, 1e-30, 1e-7, 1e-5, 1.0, 1e20, 1e30, 1e60]
FEW = [0.0, 1e-7, 1e30]
TOLERANCE = {torch.float16: 0.01, torch.bfloat16: 0.06, torch.float32: 1e-4, torch.float64: 1e-4}
LR = 0.5


@functools.cache
def gradient(shape, seed=0):
    """A matrix with singular values from 0.4 to 1, so that rounding does not change its direction."""
    generator = torch.Generator().manual_seed(seed)
    u, s, vh = torch.linalg.svd(
        torch.randn(shape, dtype=torch.float64, generator=generator), full_matrices=False
    )
    return u @ torch.diag_embed(torch.linspace(0.4, 1, s.shape[-1], dtype=torch.float64).expand(s.shape)) @ vh


def direction(grad):
    """Five standard iterations on the singular values, in float64; zero for zero."""
    u, s, vh = torch.linalg.svd(grad.double(), full_matrices=False)
    s = s / s.norm(dim=-1, keepdim=True).clamp(min=1e-300)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag_embed(s) @ vh


def representable(dtype, magnitude):
    """Whether a dtype preserves the direction of a gradient of this magnitude."""
    return 100 * torch.finfo(dtype).tiny < magnitude < torch.finfo(dtype).max / 10


def distance(weight, grad):
    """The largest error of an entry after an update of zero weights."""
    rows, cols = grad.shape[-2:]
    expected = -LR * math.sqrt(max(1, rows / cols)) * direction(grad)
    return (weight.double() - expected).abs().max().item()


OPTIONS = {
    "standard": {"ns_form": "standard"},
    "gram": {"ns_form": "gram"},
    "auto": {},
    "small eps": {"eps": 1e-30},
    "no nesterov": {"nesterov": False, "cautious_weight_decay": True},
    "bfloat16 buffers": {
        "momentum_dtype": "bfloat16",
        "error_feedback": 1.0,
        "error_feedback_dtype": "bfloat16",
    },
}


@pytest.mark.parametrize("compute_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_direction_does_not_depend_on_the_magnitude(dtype, compute_dtype):
    """Matrices, a stack with an expert whose gradient is zero, and a fused weight of two."""
    tolerance = max(TOLERANCE[dtype], TOLERANCE[compute_dtype])
    for name, magnitude in [("auto", each) for each in MAGNITUDES] + [*itertools.product(OPTIONS, FEW)]:
        where = f"{name} at {magnitude}"
        grads = [gradient(shape) for shape in ((8, 16), (16, 8), (8, 8), (3, 6, 8))]
        grads[3] = grads[3] * torch.tensor([1, 0, 1]).view(3, 1, 1)
        grads.append(torch.cat([gradient((4, 8)), 1e-3 * gradient((4, 8), 1)]))
        grads = [(magnitude * grad).to(dtype) for grad in grads]
        params = [torch.nn.Parameter(torch.zeros(grad.shape, dtype=dtype)) for grad in grads]
        groups = [{"params": params[:4]}, {"params": params[4:], "split_sizes": [4, 4]}]
        optimizer = Muon(groups, LR, 0.1, compute_dtype=compute_dtype, **OPTIONS[name])
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
        finite = all(bool(grad.isfinite().all()) for grad in grads)
        assert optimizer.step_was_skipped == (not finite), where
        looser = tolerance if name != "bfloat16 buffers" else max(tolerance, TOLERANCE[torch.bfloat16])
        for param in params:
            assert param.isfinite().all(), where
            assert all(value.isfinite().all() for value in optimizer.state[param].values()), where
            if magnitude == 0.0:
                assert not param.any(), where
        if representable(dtype, magnitude):
            for param, grad in zip(params[:4], grads[:4], strict=True):
                assert distance(param.detach(), grad) < looser, where
        if representable(dtype, magnitude * 1e-3):
            for part, part_grad in zip(params[4].detach().split(4), grads[4].split(4), strict=True):
                assert distance(part, part_grad) < looser, where


def alternate(optimizer, params, gradients):
    for grads in gradients:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
        for param in params:
            assert param.isfinite().all()
            assert all(value.isfinite().all() for value in optimizer.state[param].values())


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("momentum_dtype", [None, "bfloat16", "float32"])
def test_sequences_of_the_largest_numbers_stay_finite(dtype, momentum_dtype):
    """With any signs, and with error feedback; a correction that overflows skips the step."""
    most = torch.finfo(dtype).max
    signs = [1, 1, -1, -1, 1, 0.01, -0.01, -1]
    for compute_dtype, feedback in itertools.product(
        DTYPES,
        [
            {},
            {"error_feedback": 1.0},
            {"error_feedback": 1.0, "error_feedback_level": "gradient", "error_feedback_dtype": "bfloat16"},
        ],
    ):
        params = [torch.nn.Parameter(torch.zeros(4, 6, dtype=dtype)) for _ in range(2)]
        options = {"momentum": 0.9, "compute_dtype": compute_dtype, "momentum_dtype": momentum_dtype}
        optimizer = Muon(params, 0.1, **options, **feedback)
        pattern = torch.sign(gradient((4, 6))).to(dtype)
        # The second parameter's gradients are small.
        alternate(optimizer, params, [(sign * most * pattern, 1e-4 * sign * pattern) for sign in signs])
        assert params[1].any()


def test_huge_float32_gradients_next_to_half_precision():
    params = [torch.nn.Parameter(torch.zeros(4, 4, dtype=dtype)) for dtype in (torch.float32, torch.float16)]
    optimizer = Muon(params, 0.1, error_feedback=1.0, error_feedback_level="gradient")
    grads = [3e38 * torch.eye(4), torch.eye(4, dtype=torch.float16)]
    alternate(optimizer, params, [grads, grads])
    assert all(param.diagonal().abs().min() > 0.1 for param in params)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_orthogonalize(dtype):
    """Also of matrices in half precision, like received parts."""
    triples = resolve_coefficients("standard", 5)
    for compute_dtype, magnitude, eps in itertools.product(DTYPES, MAGNITUDES, [1e-7, 1e-30]):
        matrix = (magnitude * gradient((2, 8, 12))).to(dtype)
        if matrix.isfinite().all():
            result = orthogonalize(matrix, triples, eps=eps, compute_dtype=compute_dtype)
            assert result.isfinite().all()
            if representable(dtype, magnitude):
                error = (result.double() - direction(matrix)).abs().max()
                assert error < max(TOLERANCE[dtype], TOLERANCE[compute_dtype])


def test_norms_of_half_precision_do_not_overflow():
    """The sum of squares of 80 000 entries overflows in float16. The singular value becomes p(1)."""
    matrix = torch.full((200, 400), 0.99)
    for each in (matrix, matrix.expand(2, -1, -1)):
        result = orthogonalize(each, resolve_coefficients("standard", 1), compute_dtype=torch.float16)
        value = torch.linalg.matrix_norm(result.float(), ord="fro")
        torch.testing.assert_close(value, torch.full_like(value, 0.701), rtol=0, atol=0.01)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lion_and_feedback_around_it(dtype):
    most = torch.finfo(dtype).max
    for wrap in (lambda lion: lion, ErrorFeedback):
        params = [torch.nn.Parameter(torch.zeros(4, dtype=dtype))]
        optimizer = wrap(Lion(params, 0.1))
        sizes = [1e-30, 1.0, most, -most, most, most, -most, -1e-7]
        alternate(optimizer, params, [[torch.full((4,), size, dtype=dtype)] for size in sizes])
        assert optimizer.state[params[0]]["momentum_buffer"].isfinite().all()


def test_weights_stay_finite_with_logits_far_above_the_threshold():
    query, key = torch.ones(4, 3), torch.ones(4, 3)
    QKClip([QueryKey(query, key, heads=2)], lambda: [torch.tensor([3e38, 1.0])], tau=1e-10).clip()
    assert query.isfinite().all() and key.isfinite().all()


# Over ranks

LAYOUTS = {
    "rows": ((4,), [S0], (10, 16)),
    "columns": ((4,), [S1], (16, 10)),
    "replicated": ((4,), [R], (8, 12)),
    "hsdp": ((2, 2), [R, S0], (8, 12)),
    "blocks": ((2, 2), [S0, S1], (8, 12)),
    "experts": ((4,), [S0], (4, 6, 8)),
    "inside": ((4,), [S1], (3, 8, 6)),
    "experts and columns": ((2, 2), [S0, S2], (4, 6, 8)),
}


def update_sharded(rank, group, dtype):
    """Update parameters of all magnitudes, placements and compute dtypes; returns the failures."""
    wrong = []
    for compute_dtype in DTYPES:
        cases = [
            (layout, magnitude)
            for layout, magnitude in itertools.product(LAYOUTS, [*FEW, 1e-30])
            if (torch.tensor(magnitude).to(dtype)).isfinite()
        ]
        params = []
        for layout, magnitude in cases:
            *where, shape = LAYOUTS[layout]
            place = placed(where)
            param = torch.nn.Parameter(place(torch.zeros(shape, dtype=dtype)))
            param.grad = place((magnitude * gradient(shape)).to(dtype))
            params.append(param)
        optimizer = Muon(params, LR, compute_dtype=compute_dtype, bucket_mb=1e-2)
        optimizer.step()
        tolerance = max(TOLERANCE[dtype], TOLERANCE[compute_dtype])
        for (layout, magnitude), param in zip(cases, params, strict=True):
            weight, grad = param.detach().full_tensor(), (magnitude * gradient(param.shape)).to(dtype)
            good = bool(weight.isfinite().all()) and (magnitude != 0.0 or not weight.any())
            if good and representable(dtype, magnitude):
                good = distance(weight, grad) < tolerance
            if not good:
                wrong.append(f"{compute_dtype}, {layout} at {magnitude}")
        if optimizer.step_was_skipped:
            wrong.append(f"{compute_dtype}: skipped")
    return wrong


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sharded_parameters_at_every_magnitude(four_ranks, dtype):
    assert four_ranks.run(4, update_sharded, dtype) == [[]] * 4


def update_uneven_parts(rank, group):
    """A matrix whose rows on the four ranks are scaled by 0, 1e-30, 1e-5 and 1e30."""
    found = []
    for compute_dtype, dtype, largest in itertools.product(DTYPES, DTYPES[2:], [1e30, 1e-5]):
        sizes = torch.tensor([0, 1e-30, 1e-5, 1e30], dtype=torch.float64).clamp(max=largest)
        if dtype == torch.float64:
            sizes = sizes**5
        grad = (gradient((8, 12)) * sizes.repeat_interleave(2).unsqueeze(1)).to(dtype)
        param = torch.nn.Parameter(distribute(torch.zeros(8, 12, dtype=dtype), meshes["line"], [S0]))
        param.grad = distribute(grad, meshes["line"], [S0])
        Muon([param], 1.0, 0.0, compute_dtype=compute_dtype).step()
        whole = param.detach().full_tensor()
        # Only the largest part.
        rows = grad.abs().amax(1) >= sizes.max() / 100
        norm = torch.linalg.matrix_norm(whole[rows].double(), ord=2).item()
        found.append((bool(whole.isfinite().all()), 0.6 < norm < 1.3, str((compute_dtype, dtype, largest))))
    return found


def test_parts_of_very_different_magnitudes(four_ranks):
    for found in four_ranks.run(4, update_uneven_parts):
        assert all(finite and moved for finite, moved, _ in found), found
