"""The standard and the Gram form of the iteration, symmetric products, and stacks."""

import sys
import types

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from titan_async.optim import orthogonalization, symmetric_matmul
from titan_async.optim.coefficients import resolve_coefficients
from titan_async.optim.orthogonalization import (
    orthogonalization_cost,
    orthogonalize,
    orthogonalize_all,
    restart_intervals,
)
from titan_async.optim.symmetric_matmul import symmetric_addmm, symmetric_mm


def with_spectrum(rows: int, cols: int, spectrum: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    u, _, vh = torch.linalg.svd(torch.randn(rows, cols, dtype=torch.float64), full_matrices=False)
    return u @ torch.diag(spectrum.double()) @ vh


def spectra(size: int) -> dict[str, torch.Tensor]:
    index = torch.arange(1, size + 1, dtype=torch.float64)
    rank_one = torch.full((size,), 1e-8, dtype=torch.float64)
    rank_one[0] = 1
    return {
        "flat": torch.ones(size),
        "1/k": 1 / index,
        "1/k2": 1 / index**2,
        "exponential": torch.logspace(0, -6, size),
        "rank one": rank_one,
        "low rank": (index <= 8).double(),
    }


def by_singular_values(matrix: torch.Tensor, triples) -> torch.Tensor:
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / matrix.double().norm()
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vh


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return ((result.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("form", ["auto", "standard", "gram"])
@pytest.mark.parametrize("name", ["standard", "polar_express"])
@pytest.mark.parametrize("steps", [1, 2, 5, 9])
@pytest.mark.parametrize("shape", [(16, 16), (12, 50), (50, 12), (1, 7), (7, 1)])
def test_forms_apply_the_polynomials_to_the_singular_values(shape, steps, name, form):
    torch.manual_seed(1)
    matrix = torch.randn(shape, dtype=torch.float64)
    triples = resolve_coefficients(name, steps)
    result = orthogonalize(matrix, triples, compute_dtype=torch.float64, form=form)
    torch.testing.assert_close(result, by_singular_values(matrix, triples), rtol=1e-9, atol=1e-9)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(512, 513), (700, 600), (520, 1100), (2, 520, 530)])
@pytest.mark.parametrize("form", ["auto", "gram"])
def test_large_matrices_with_blocked_symmetric_products(shape, form):
    torch.manual_seed(2)
    matrix = torch.randn(shape, dtype=torch.float64)
    triples = resolve_coefficients("standard", 5)
    result = orthogonalize(matrix, triples, compute_dtype=torch.float64, form=form)
    for one, given in zip(result.view(-1, *shape[-2:]), matrix.view(-1, *shape[-2:]), strict=True):
        torch.testing.assert_close(one, by_singular_values(given, triples), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("spectrum", spectra(48))
@pytest.mark.parametrize("name", ["standard", "polar_express"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gram_form_has_rounding_errors_like_the_standard_form(dtype, name, spectrum):
    matrix = with_spectrum(48, 160, spectra(48)[spectrum]).to(dtype)
    triples = resolve_coefficients(name, 5)
    expected = by_singular_values(matrix, triples)
    gram, standard = (
        error(orthogonalize(matrix, triples, compute_dtype=dtype, form=form), expected)
        for form in ("gram", "standard")
    )
    assert gram <= max(10 * standard, 20 * torch.finfo(dtype).eps)


def test_rounding_errors_grow_without_restarts(monkeypatch):
    """The reason for restarts, and a check that the test above can fail."""
    matrix = with_spectrum(256, 512, spectra(256)["1/k2"]).bfloat16()
    triples = resolve_coefficients("polar_express", 5)
    expected = by_singular_values(matrix, triples)
    assert error(orthogonalize(matrix, triples, form="gram"), expected) < 0.5
    monkeypatch.setattr(orthogonalization, "restart_intervals", lambda coefficients: (coefficients,))
    assert not error(orthogonalize(matrix, triples, form="gram"), expected) < 10


def test_restart_intervals_keep_the_iterations_in_order():
    for name, steps, lengths in [
        ("standard", 5, [3, 2]),
        ("polar_express", 5, [2, 2, 1]),
        ("standard", 1, [1]),
    ]:
        triples = resolve_coefficients(name, steps)
        found = restart_intervals(triples)
        assert [len(interval) for interval in found] == lengths
        assert tuple(triple for interval in found for triple in interval) == triples


def flops(matrix: torch.Tensor, form: str) -> int:
    with FlopCounterMode(display=False) as counter:
        orthogonalize(matrix, resolve_coefficients("standard", 5), form=form, compute_dtype=torch.float32)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("shape", "cheaper"), [((64, 64), "standard"), ((64, 256), "gram"), ((512, 64), "gram")]
)
def test_auto_uses_the_form_with_fewer_operations(shape, cheaper):
    matrix = torch.randn(shape)
    counts = {form: flops(matrix, form) for form in ("standard", "gram", "auto")}
    assert counts["auto"] == counts[cheaper] == min(counts.values())
    triples = resolve_coefficients("standard", 5)
    for form, count in counts.items():
        assert orthogonalization_cost(*shape, triples, form) == count


def test_gram_form_needs_fewer_operations_for_wide_matrices():
    """At four columns per row it takes 60 m^3 operations with one restart, the standard form 90 m^3."""
    matrix = torch.randn(32, 128)
    assert flops(matrix, "gram") == 60 * 32**3
    assert flops(matrix, "standard") == 90 * 32**3


def test_blocking_saves_operations():
    matrix = torch.randn(1024, 1024)
    assert flops(matrix, "auto") < 0.8 * flops(matrix, "standard")


@pytest.mark.parametrize("size", [3, 383, 384, 700, 1025])
def test_symmetric_products(size):
    torch.manual_seed(3)
    x = torch.randn(size, 40, dtype=torch.float64)
    gram = x @ x.mT
    torch.testing.assert_close(symmetric_mm(x, x.mT), gram, rtol=1e-12, atol=1e-12)
    result = symmetric_addmm(gram, gram, gram, beta=-0.5, alpha=0.25)
    torch.testing.assert_close(result, -0.5 * gram + 0.25 * gram @ gram, rtol=1e-11, atol=1e-11)
    if size >= 384:
        lower = symmetric_mm(x, x.mT)
        # Exactly, outside the diagonal blocks.
        assert torch.equal(lower[size // 2 :, : size // 2], lower[: size // 2, size // 2 :].mT)


def test_kernels_are_used_only_where_supported(monkeypatch):
    """With a fake of the optional package, which has the same signature."""
    assert not symmetric_matmul._uses_kernels(torch.zeros(512, 512, dtype=torch.bfloat16))
    calls = []

    def gemm_symmetric(A, B, C=None, *, alpha=1.0, beta=1.0):
        calls.append((alpha, beta))
        product = alpha * (A @ B)
        return product if C is None else product + beta * C

    module = types.ModuleType("quack.gemm_interface")
    module.gemm_symmetric = gemm_symmetric
    monkeypatch.setitem(sys.modules, "quack", types.ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", module)
    monkeypatch.setattr(symmetric_matmul, "_uses_kernels", lambda a: True)
    symmetric_matmul._gemm_symmetric.cache_clear()
    try:
        matrix = torch.randn(20, 90, dtype=torch.float64)
        triples = resolve_coefficients("standard", 5)
        result = orthogonalize(matrix, triples, compute_dtype=torch.float64)
    finally:
        symmetric_matmul._gemm_symmetric.cache_clear()
    torch.testing.assert_close(result, by_singular_values(matrix, triples), rtol=1e-9, atol=1e-9)
    assert len(calls) == 2 + 14


@pytest.mark.parametrize("size", [8, 400])
def test_batched_matrices_equal_single_matrices(size):
    torch.manual_seed(4)
    matrices = [torch.randn(size, size + 3, dtype=torch.float64) * 10.0**k for k in (-6, 0, 6)]
    matrices.append(torch.randn(2, size, size + 3, dtype=torch.float64))
    triples = resolve_coefficients("standard", 5)
    together = orthogonalize_all(matrices, triples, compute_dtype=torch.float64)
    for one, matrix in zip(together, matrices, strict=True):
        assert one.shape == matrix.shape
        for result, given in zip(one.view(-1, size, size + 3), matrix.view(-1, size, size + 3), strict=True):
            torch.testing.assert_close(result, by_singular_values(given, triples), rtol=1e-8, atol=1e-8)
