"""Orthogonalization against the singular value decomposition, and at extreme scales."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from titan_async.optim import orthogonalization
from titan_async.optim.coefficients import (
    POLAR_EXPRESS_COEFFICIENTS,
    STANDARD_COEFFICIENTS,
    resolve_coefficients,
)
from titan_async.optim.orthogonalization import orthogonalize

SHAPES = [(24, 24), (40, 16), (16, 40)]
CUBIC = (1.5, -0.5, 0.0)

# Algorithm 1 of arXiv 2505.16932, with its safety margin applied as in the paper: to the matrix once, and to
# every polynomial but the last.
PAPER_TRIPLES = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
]


def by_singular_values(matrix: torch.Tensor, triples, margin: float = 1.0) -> torch.Tensor:
    """The same polynomials, applied to the singular values."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s / matrix.norm() / margin
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vh


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("coefficients", ["standard", CUBIC, (CUBIC, STANDARD_COEFFICIENTS, CUBIC)])
def test_applies_the_polynomials_to_the_singular_values(shape, coefficients):
    torch.manual_seed(1)
    matrix = torch.randn(shape, dtype=torch.float64)
    steps = 3
    triples = {"standard": [STANDARD_COEFFICIENTS] * 3, CUBIC: [CUBIC] * 3}.get(coefficients, coefficients)
    result = orthogonalize(matrix, resolve_coefficients(coefficients, steps), compute_dtype=torch.float64)
    torch.testing.assert_close(result, by_singular_values(matrix, triples), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("steps", [1, 5, 8, 10])
def test_polar_express_equals_the_papers_algorithm(steps):
    torch.manual_seed(2)
    matrix = torch.randn(20, 30, dtype=torch.float64)
    expected = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in PAPER_TRIPLES[:-1]] + PAPER_TRIPLES[
        -1:
    ] * 9
    result = orthogonalize(matrix, resolve_coefficients("polar_express", steps), compute_dtype=torch.float64)
    reference = by_singular_values(matrix, expected[:steps], margin=1.01)
    torch.testing.assert_close(result, reference, rtol=1e-10, atol=1e-10)


def test_polar_express_converges_to_the_polar_factor():
    """Unlike the standard iteration, whose singular values do not converge to 1."""
    torch.manual_seed(3)
    matrix = torch.randn(32, 64, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    result = orthogonalize(matrix, resolve_coefficients("polar_express", 10), compute_dtype=torch.float64)
    torch.testing.assert_close(result, u @ vh, rtol=0, atol=1e-6)


@pytest.mark.parametrize("coefficients", ["standard", "polar_express"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1e-38, 1e-12, 1.0, 1e20, 3e37])
@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_are_near_one_at_every_scale(coefficients, dtype, scale, shape):
    torch.manual_seed(4)
    # Well conditioned, so that five iterations reach every singular value.
    u, _, vh = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    matrix = u @ torch.diag(torch.linspace(0.2, 1.0, min(shape))) @ vh
    triples = resolve_coefficients(coefficients, 5)
    singular = torch.linalg.svdvals(orthogonalize(matrix * scale, triples, compute_dtype=dtype).float())
    assert singular.min() > 0.6
    assert singular.max() < 1.3


@pytest.mark.parametrize("scale", [2.0**-110, 2.0**-40, 2.0**67, 2.0**120])
def test_result_is_bitwise_independent_of_the_scale(scale):
    torch.manual_seed(5)
    matrix = torch.randn(12, 20)
    triples = resolve_coefficients("standard", 5)
    assert torch.equal(orthogonalize(matrix * scale, triples), orthogonalize(matrix, triples))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_zero_matrix_gives_zeros_and_the_input_is_not_modified(dtype):
    triples = resolve_coefficients("standard", 5)
    assert torch.equal(orthogonalize(torch.zeros(4, 6, dtype=dtype), triples).float(), torch.zeros(4, 6))
    matrix = torch.randn(6, 4).to(dtype)
    kept = matrix.clone()
    orthogonalize(matrix, triples, compute_dtype=dtype if dtype != torch.float16 else torch.bfloat16)
    assert torch.equal(matrix, kept)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_non_finite_entry_gives_nan(bad):
    matrix = torch.randn(4, 6)
    matrix[1, 2] = bad
    assert orthogonalize(matrix, resolve_coefficients("standard", 5)).isnan().any()


@pytest.mark.parametrize("shape", SHAPES)
def test_stack_equals_its_matrices(shape):
    torch.manual_seed(6)
    # Very different scales: each matrix must be normalized by its own norm.
    stack = (
        torch.randn(3, *shape, dtype=torch.float64) * torch.tensor([1e-9, 1.0, 1e9]).view(3, 1, 1).double()
    )
    triples = resolve_coefficients("standard", 5)
    together = orthogonalize(stack, triples, compute_dtype=torch.float64)
    apart = torch.stack([orthogonalize(matrix, triples, compute_dtype=torch.float64) for matrix in stack])
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-12)


def test_polar_express_repeats_its_last_triple():
    triples = resolve_coefficients("polar_express", 11)
    assert triples[:8] == POLAR_EXPRESS_COEFFICIENTS
    assert triples[8:] == ((1.875, -1.25, 0.375),) * 3


@pytest.mark.parametrize(
    ("coefficients", "steps", "words"),
    [
        ("fast", 5, "'standard', 'polar_express'"),
        ([(1, 2, 3)] * 4, 5, "ns_steps=4"),
        ((1.0, 2.0), 5, "triples"),
        ([(1.0, 2.0)] * 5, 5, "triples"),
        ("standard", 0, "ns_steps"),
        ("standard", 2.5, "ns_steps"),
    ],
)
def test_invalid_coefficients_raise(coefficients, steps, words):
    with pytest.raises(ValueError, match=words):
        resolve_coefficients(coefficients, steps)


class Products(TorchDispatchMode):
    """Records the dtypes of matrix products."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.rpartition("::")[2] in ("mm", "addmm", "bmm", "baddbmm"):
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (3, 16, 40)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_iterations_use_float32_if_half_precision_is_slow(monkeypatch, dtype, shape):
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    triples = resolve_coefficients("standard", 5)
    exact = [by_singular_values(each.double(), triples) for each in matrices.view(-1, *shape[-2:])]
    exact = torch.stack(exact).view(shape)
    for capability, form, expected in (
        ("AVX2", "auto", torch.float32),
        ("AVX2", "standard", dtype),
        ("AVX2", "gram", dtype),
        ("AVX512", "auto", dtype),
        ("DEFAULT", "auto", dtype),  # ARM
    ):
        monkeypatch.setattr(orthogonalization, "get_cpu_capability", lambda capability=capability: capability)
        with Products() as products:
            result = orthogonalize(matrices, triples, compute_dtype=dtype, form=form)
        assert products.dtypes == {expected}
        assert result.dtype == dtype and result.is_contiguous()
        if expected == torch.float32:  # rounded once, at the end
            torch.testing.assert_close(result.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
