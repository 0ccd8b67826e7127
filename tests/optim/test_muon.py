"""Muon against torch.optim.Muon, against formulas, and at its edges."""

import copy
import math

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from titan_async.optim import ErrorFeedback, Lion, Muon

SHAPES = [(24, 24), (48, 16), (16, 48)]


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(*shape, dtype=dtype))


def polar_like(update: torch.Tensor) -> torch.Tensor:
    """Five standard iterations, on the singular values."""
    u, s, vh = torch.linalg.svd(update, full_matrices=False)
    s = s / update.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("grad_scale", [1e-3, 1.0, 1e3])
def test_equals_torch_on_float32_matrices(shape, nesterov, adjust_lr, grad_scale):
    torch.manual_seed(0)
    ours = parameter(*shape)
    theirs = torch.nn.Parameter(ours.detach().clone())
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov}
    optimizer = Muon([ours], adjust_lr=adjust_lr, ns_form="standard", **options)
    reference = torch.optim.Muon([theirs], adjust_lr_fn=adjust_lr, **options)
    for _ in range(6):
        ours.grad = torch.randn(shape) * grad_scale
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
        assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()
    buffers = optimizer.state[ours]["momentum_buffer"], reference.state[theirs]["momentum_buffer"]
    assert torch.equal(*buffers)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", SHAPES)
def test_follows_the_formulas_in_float64(nesterov, adjust_lr, shape):
    torch.manual_seed(1)
    lr, decay, momentum = 0.05, 0.2, 0.8
    rows, cols = shape
    scale = (
        0.2 * math.sqrt(max(rows, cols)) if adjust_lr == "match_rms_adamw" else math.sqrt(max(1, rows / cols))
    )
    param = parameter(*shape, dtype=torch.float64)
    optimizer = Muon(
        [param], lr, decay, momentum, nesterov=nesterov, adjust_lr=adjust_lr, compute_dtype=torch.float64
    )
    weight, buffer = param.detach().clone(), torch.zeros(shape, dtype=torch.float64)
    for _ in range(4):
        grad = torch.randn(shape, dtype=torch.float64)
        param.grad = grad.clone()
        optimizer.step()
        buffer = momentum * buffer + (1 - momentum) * grad
        update = momentum * buffer + (1 - momentum) * grad if nesterov else buffer
        weight = weight - lr * decay * weight - lr * scale * polar_like(update)
        torch.testing.assert_close(param.detach(), weight, rtol=1e-10, atol=1e-10)
        assert torch.equal(param.grad, grad)


@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize(
    ("compute_dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 0.05)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_are_updated_like_matrices(adjust_lr, compute_dtype, tolerance, shape):
    """The learning-rate scale taken from the first two dimensions, experts and rows, would fail here."""
    torch.manual_seed(2)
    stack = parameter(5, *shape, dtype=torch.float64)
    matrices = [torch.nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    options = {"lr": 0.1, "adjust_lr": adjust_lr, "compute_dtype": compute_dtype}
    together, apart = Muon([stack], **options), Muon(matrices, **options)
    for _ in range(3):
        # Experts see gradients of different sizes, and one of them none at all.
        stack.grad = torch.randn(5, *shape, dtype=torch.float64) * torch.tensor([1e-6, 1, 10, 0, 1]).view(
            5, 1, 1
        )
        for matrix, grad in zip(matrices, stack.grad, strict=True):
            matrix.grad = grad.clone()
        together.step()
        apart.step()
    expected = torch.stack([matrix.detach() for matrix in matrices])
    torch.testing.assert_close(stack.detach(), expected, rtol=0, atol=tolerance)


def test_update_has_the_root_mean_square_of_adamw():
    torch.manual_seed(3)
    for shape in [(256, 64), (64, 256), (128, 128), (2, 64, 128)]:
        param = torch.nn.Parameter(torch.zeros(shape))
        param.grad = torch.randn(shape)
        Muon([param], lr=1.0, adjust_lr="match_rms_adamw").step()
        assert 0.15 < param.detach().square().mean().sqrt() < 0.25


def test_without_a_gradient_nothing_happens():
    torch.manual_seed(4)
    moved, still = parameter(4, 6), parameter(4, 6)
    optimizer = Muon([moved, still], lr=0.1, weight_decay=0.5)
    moved.grad, still.grad = torch.randn(4, 6), torch.randn(4, 6)
    optimizer.step()
    weight, momentum = still.detach().clone(), optimizer.state[still]["momentum_buffer"].clone()
    still.grad = None
    optimizer.step()
    assert torch.equal(still, weight)
    assert torch.equal(optimizer.state[still]["momentum_buffer"], momentum)


def test_state_is_complete_after_a_step_in_which_a_gradient_is_missing():
    """A checkpoint with state for some parameters only cannot be loaded."""
    moved, still, frozen = parameter(4, 6), parameter(4, 6), parameter(4, 6).requires_grad_(False)
    optimizer = Muon([moved, still, frozen])
    moved.grad = torch.ones(4, 6)
    optimizer.step()
    assert torch.equal(optimizer.state[still]["momentum_buffer"], torch.zeros(4, 6))
    assert set(optimizer.state_dict()["state"]) == {0, 1}


@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 6)])
def test_zero_gradient_is_exactly_the_decay(shape):
    param = parameter(*shape)
    expected = param.detach() * (1 - 0.1 * 0.5)
    param.grad = torch.zeros(shape)
    Muon([param], lr=0.1, weight_decay=0.5).step()
    assert torch.equal(param, expected)


@pytest.mark.parametrize("scale", [1e-12, 1e20])
@pytest.mark.parametrize("coefficients", ["standard", "polar_express"])
def test_extreme_gradients_give_orthogonal_updates(scale, coefficients):
    """The published implementations give singular values of .001 at 1e-12, and zeros at 1e20."""
    torch.manual_seed(5)
    u, _, vh = torch.linalg.svd(torch.randn(32, 48), full_matrices=False)
    param = torch.nn.Parameter(torch.zeros(32, 48))
    optimizer = Muon([param], lr=1.0, weight_decay=0.0, ns_coefficients=coefficients)
    for _ in range(2):
        param.data.zero_()
        param.grad = (u @ torch.diag(torch.linspace(0.3, 1, 32)) @ vh) * scale
        optimizer.step()
        singular = torch.linalg.svdvals(param.detach())
        assert singular.min() > 0.6
        assert singular.max() < 1.3


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4, 5)])
def test_refuses_what_is_no_matrix(shape):
    bad = torch.nn.Parameter(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"'norm\.weight'") as caught:
        Muon([("norm.weight", bad)])
    assert str(list(shape)) in str(caught.value)
    assert "AdamW" in str(caught.value)

    optimizer = Muon([parameter(2, 3)])
    with pytest.raises(ValueError, match="AdamW"):
        optimizer.add_param_group({"params": [bad]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [parameter(2, 3)], "lr": 0.5})
    assert optimizer.param_groups[1]["lr"] == 0.5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"momentum": 1.0}, "momentum"),
        ({"eps": 0.0}, "eps"),
        ({"adjust_lr": "adam"}, "'original', 'match_rms_adamw'"),
        ({"ns_coefficients": "fast"}, "'standard', 'polar_express'"),
        ({"ns_steps": 0}, "ns_steps"),
        ({"compute_dtype": torch.int8}, "'bfloat16', 'float16', 'float32', 'float64'"),
        ({"momentum_dtype": "int8"}, "momentum_dtype.*'float64', 'auto'"),
        ({"momentum_dtype": torch.float16}, "momentum_dtype 'float16'"),
        ({"error_feedback_dtype": "half"}, "error_feedback_dtype"),
        ({"ns_form": "fast"}, "'auto', 'standard', 'gram'"),
        ({"error_feedback": -1.0}, "strength"),
        ({"error_feedback_level": "weights"}, "'update', 'gradient'"),
        ({"split_sizes": (1, 0)}, "split_sizes"),
        ({"split_sizes": 5}, "split_sizes"),
        ({"lr": "fast"}, "lr must be a number"),
        ({"momentum": "0.9"}, "momentum must be a number"),
        ({"split_sizes": (1, 2)}, "split_sizes.*add up to 3"),
        ({"split_dim": 0}, "split_dim"),
        ({"input_dim": 1}, "input_dim"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        Muon([parameter(2, 3)], **options)
    with pytest.raises(ValueError, match=words):
        Muon([{"params": [parameter(2, 3)], **options}])


@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw", "spectral_unclamped"])
@pytest.mark.parametrize("shape", SHAPES)
def test_takes_the_spelling_of_torch(shape, adjust_lr_fn):
    """As an argument, by position too, and in a group, where it goes before the argument."""
    torch.manual_seed(10)
    start, grad = torch.randn(shape), torch.randn(shape)
    theirs, *ours = (torch.nn.Parameter(start.clone()) for _ in range(4))
    positions = (0.02, 0.1, 0.9, True, (3.4445, -4.7750, 2.0315), 1e-7, 5)
    optimizers = [
        torch.optim.Muon([theirs], *positions, adjust_lr_fn),
        Muon([ours[0]], *positions, adjust_lr_fn, ns_form="standard"),
        Muon([ours[1]], *positions, adjust_lr_fn=adjust_lr_fn, ns_form="standard"),
        Muon(
            [{"params": [ours[2]], "adjust_lr_fn": adjust_lr_fn}],
            *positions,
            ns_form="standard",
            adjust_lr="match_rms_adamw",
        ),
    ]
    for param, optimizer in zip((theirs, *ours), optimizers, strict=True):
        param.grad = grad.clone()
        optimizer.step()
    for param in ours:
        assert (param - theirs).abs().max() <= 1e-6 * theirs.abs().max()


def test_two_spellings_that_differ_are_refused():
    with pytest.raises(ValueError, match="adjust_lr_fn.*'spectral_unclamped'.*adjust_lr .'original'"):
        Muon([parameter(2, 3)], adjust_lr="original", adjust_lr_fn="spectral_unclamped")
    with pytest.raises(ValueError, match="adjust_lr_fn"):
        Muon([{"params": [parameter(2, 3)], "adjust_lr": "original", "adjust_lr_fn": "match_rms_adamw"}])
    with pytest.raises(ValueError, match="unknown adjust_lr 'unclamped'"):
        Muon([parameter(2, 3)], adjust_lr_fn="unclamped")


@pytest.mark.parametrize(
    ("name", "build"),
    {
        "Muon": Muon,
        "Lion": Lion,
        "SGD": lambda params: ErrorFeedback(torch.optim.SGD(params, 0.1)),
    }.items(),
)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_is_given_twice_is_refused(name, build):
    one, two = parameter(2, 3), parameter(4, 4)
    with pytest.raises(ValueError, match=rf"{name} was given a parameter of shape \[2, 3\] twice"):
        build([one, two, one])
    with pytest.raises(ValueError, match=rf"{name} was given parameter 'tied' of shape \[2, 3\] twice"):
        build([("first", one), ("tied", one)])
    optimizer = build(iter([one]))
    before = copy.deepcopy(optimizer.state_dict())
    for params in ([one], [two, two]):
        with pytest.raises(ValueError, match="twice"):
            optimizer.add_param_group({"params": params})
        assert len(optimizer.param_groups) == 1 and str(optimizer.state_dict()) == str(before)
    optimizer.add_param_group({"params": two})


@pytest.mark.filterwarnings("error")
def test_of_two_groups_with_one_parameter_the_second_is_refused():
    for build in (Muon, Lion):
        param = parameter(2, 3)
        with pytest.raises(ValueError, match="twice"):
            build([{"params": [param]}, {"params": [parameter(4, 4), param]}])
        with pytest.raises(ValueError, match="twice"):
            build([param, param])


def test_refuses_complex_parameters_and_sparse_gradients():
    with pytest.raises(ValueError, match="complex64"):
        Muon([parameter(2, 3, dtype=torch.complex64)])
    param = parameter(2, 3)
    optimizer = Muon([param])
    param.grad = torch.ones(2, 3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()


def test_closure_is_called_with_gradients_on():
    param = parameter(3, 3)
    optimizer = Muon([param])

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    before = param.square().sum().item()
    assert optimizer.step(closure).item() == before
    assert param.square().sum() < before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_reload_continues_with_the_same_bits(dtype):
    torch.manual_seed(6)
    param = parameter(6, 4, dtype=dtype)
    optimizer = Muon([("w", param)], lr=0.1, ns_coefficients="polar_express")
    grads = [torch.randn(6, 4).to(dtype) for _ in range(4)]
    for grad in grads[:2]:
        param.grad = grad.clone()
        optimizer.step()
    copied = torch.nn.Parameter(param.detach().clone())
    resumed = Muon([("w", copied)])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.state[copied]["momentum_buffer"].dtype == torch.promote_types(dtype, torch.float32)
    for grad in grads[2:]:
        param.grad, copied.grad = grad.clone(), grad.clone()
        optimizer.step()
        resumed.step()
    assert torch.equal(param, copied)


def test_group_values_are_simple():
    """torchtitan flattens every key of a group into a checkpoint."""
    group = {"params": [parameter(2, 3)], "param_names": ["w"], "fused": True, "foreach": False}
    optimizer = Muon(
        [group], ns_coefficients=[[1.5, -0.5, 0.0], [2.0, -1.5, 0.5]], ns_steps=2, compute_dtype=torch.float32
    )
    values = {
        key: value for key, value in optimizer.param_groups[0].items() if key not in ("params", "param_names")
    }
    assert values["ns_coefficients"] == ((1.5, -0.5, 0.0), (2.0, -1.5, 0.5))
    assert values["compute_dtype"] == "float32"
    assert values["fused"] is True
    assert all(isinstance(value, (float, int, str, tuple)) for value in values.values())


def test_learning_rate_schedule():
    torch.manual_seed(7)
    param = torch.nn.Parameter(torch.zeros(4, 4))
    optimizer = Muon([param], lr=1.0, weight_decay=0.0)
    scheduler = LambdaLR(optimizer, lambda step: [1.0, 0.5, 0.0][step])
    grad = torch.randn(4, 4)
    norms = []
    for _ in range(3):
        before = param.detach().clone()
        param.grad = grad.clone()
        optimizer.step()
        norms.append((param - before).norm().item())
        if len(norms) < 3:
            scheduler.step()
    assert norms[1] == pytest.approx(norms[0] / 2, rel=0.05)
    assert norms[2] == 0


def test_learning_rate_may_be_a_tensor():
    torch.manual_seed(8)
    one, two = torch.nn.Parameter(torch.zeros(4, 4)), torch.nn.Parameter(torch.zeros(4, 4))
    one.grad = torch.randn(4, 4)
    two.grad = one.grad.clone()
    Muon([one], lr=0.5).step()
    Muon([two], lr=torch.tensor(0.5)).step()
    assert torch.equal(one, two)


def test_what_all_groups_share_is_refused_in_one():
    with pytest.raises(ValueError, match="bucket_mb.*Muon itself"):
        Muon([{"params": [parameter(2, 3)], "bucket_mb": 8}])


def test_loading_keeps_how_this_run_computes():
    saved = Muon([parameter(2, 3)], compute_dtype="float32", ns_form="standard", momentum=0.8).state_dict()
    optimizer = Muon([parameter(2, 3)])
    optimizer.load_state_dict(saved)
    group = optimizer.param_groups[0]
    assert (group["compute_dtype"], group["ns_form"], group["momentum"]) == ("bfloat16", "auto", 0.8)


@pytest.mark.parametrize("scale", [1e-60, 1e60])
@pytest.mark.parametrize("compute_dtype", ["bfloat16", "float16", "float32"])
def test_float64_gradients_beyond_the_range_of_the_compute_dtype(compute_dtype, scale):
    torch.manual_seed(9)
    param = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.float64))
    u, _, vh = torch.linalg.svd(torch.randn(8, 8, dtype=torch.float64))
    param.grad = u @ torch.diag(torch.linspace(0.5, 1, 8, dtype=torch.float64)) @ vh * scale
    Muon([param], lr=1.0, compute_dtype=compute_dtype).step()
    assert torch.linalg.svdvals(param.detach()).min() > 0.6
