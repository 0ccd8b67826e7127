"""Muon's update rule and options, against torch.optim.Muon, formulas, and separate parts."""

import copy
import math

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from tests.support.optim import give_gradients, parameters
from titan_async.optim import POLAR_EXPRESS_COEFFICIENTS, ErrorFeedback, Lion, Muon

SHAPES = [(24, 24), (48, 16), (16, 48)]
STANDARD = [(3.4445, -4.7750, 2.0315)] * 5


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(*shape, dtype=dtype))


def polar_like(update: torch.Tensor) -> torch.Tensor:
    """Five standard iterations, applied to the singular values."""
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
@pytest.mark.parametrize("adjust_lr", [None, "original", "spectral", "match_rms_adamw"])
@pytest.mark.parametrize("shape", SHAPES)
def test_follows_the_formulas_in_float64(nesterov, adjust_lr, shape):
    torch.manual_seed(1)
    lr, decay, momentum = 0.05, 0.2, 0.8
    rows, cols = shape
    scale = {
        "match_rms_adamw": 0.2 * math.sqrt(max(rows, cols)),
        "spectral": math.sqrt(rows / cols),
    }.get(adjust_lr, math.sqrt(max(1, rows / cols)))
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
    """Fails if the learning-rate scale uses the first two dimensions, experts and rows."""
    torch.manual_seed(2)
    stack = parameter(5, *shape, dtype=torch.float64)
    matrices = [torch.nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    options = {"lr": 0.1, "adjust_lr": adjust_lr, "compute_dtype": compute_dtype}
    together, apart = Muon([stack], **options), Muon(matrices, **options)
    for _ in range(3):
        # Gradients of different magnitudes, and a zero gradient.
        stack.grad = torch.randn(5, *shape, dtype=torch.float64) * torch.tensor([1e-6, 1, 10, 0, 1]).view(
            5, 1, 1
        )
        for matrix, grad in zip(matrices, stack.grad, strict=True):
            matrix.grad = grad.clone()
        together.step()
        apart.step()
    expected = torch.stack([matrix.detach() for matrix in matrices])
    torch.testing.assert_close(stack.detach(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("form", ["auto", "standard", "gram"])
@pytest.mark.parametrize("coefficients", ["standard", "polar_express"])
@pytest.mark.parametrize("scale", [1e-12, 1e20])
def test_singular_values_at_extreme_gradients(scale, coefficients, form, dtype):
    """The exact iteration maps a spectrum from 0.3 to 1 into [0.65, 1.17]."""
    spectrum = torch.linspace(0.3, 1, 32, dtype=torch.float64)
    exact = spectrum / spectrum.norm()
    triples = STANDARD if coefficients == "standard" else POLAR_EXPRESS_COEFFICIENTS[:5]
    for a, b, c in triples:
        exact = a * exact + b * exact**3 + c * exact**5
    assert exact.min() > 0.65 and exact.max() < 1.17
    # The steepest polynomials amplify the rounding of the Gram form in bfloat16.
    most = 1.3 if (coefficients, form, dtype) == ("polar_express", "gram", "bfloat16") else 1.2
    torch.manual_seed(0)
    for rows, cols in [(32, 48), (48, 32), (32, 32)]:
        u, _, vh = torch.linalg.svd(torch.randn(rows, cols, dtype=torch.float64), full_matrices=False)
        param = torch.nn.Parameter(torch.zeros(rows, cols))
        options = {"ns_coefficients": coefficients, "ns_form": form, "compute_dtype": dtype}
        optimizer = Muon([param], lr=1.0, weight_decay=0.0, adjust_lr="spectral", **options)
        for _ in range(2):
            param.data.zero_()
            param.grad = (u @ torch.diag(spectrum) @ vh * scale).float()
            optimizer.step()
            assert not optimizer.step_was_skipped
            values = torch.linalg.svdvals(param.detach().double()) / math.sqrt(rows / cols)
            assert values.min() > 0.6 and values.max() < most


@pytest.mark.parametrize(
    ("coefficients", "low", "high"), [("polar_express", 0.18, 0.22), ("standard", 0.16, 0.2)]
)
@pytest.mark.parametrize("shape", [(256, 64), (64, 256), (128, 128), (3, 64, 128), (2, 200, 50)])
def test_root_mean_square_of_updates(shape, coefficients, low, high):
    """With Polar Express 0.2 within 10 %, like AdamW's, for Gaussian gradients and their sums.

    The exact polar factor gives 0.2 for any gradient of full rank. The standard coefficients give singular
    values between 0.7 and 1.2, mostly below 1, so the update is smaller by 5 to 18 %.
    """
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.zeros(shape))
    optimizer = Muon([param], 1.0, 0.0, adjust_lr="match_rms_adamw", ns_coefficients=coefficients)
    for _ in range(3):
        before = param.detach().clone()
        param.grad = torch.randn(shape)
        optimizer.step()
        for matrix in (param.detach() - before).view(-1, *shape[-2:]):
            assert low < matrix.square().mean().sqrt() < high


def fused_and_separate(dim, adjust_lr, input_dim=-1):
    """A fused weight after three updates, and its four parts, updated separately and concatenated."""
    sizes, other = (8, 8, 2, 2), 6
    torch.manual_seed(0)
    shape = (20, other) if dim == -2 else (other, 20)
    fused = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64))
    parts = [torch.nn.Parameter(part.clone()) for part in fused.detach().split(sizes, dim)]
    options = {"adjust_lr": adjust_lr, "compute_dtype": "float64", "input_dim": input_dim}
    together = Muon([fused], 0.1, split_sizes=sizes, split_dim=dim, **options)
    apart = Muon(parts, 0.1, **options)
    for _ in range(3):
        fused.grad = torch.randn(shape, dtype=torch.float64)
        for part, grad in zip(parts, fused.grad.split(sizes, dim), strict=True):
            part.grad = grad.clone()
        together.step()
        apart.step()
    return fused.detach(), torch.cat([part.detach() for part in parts], dim)


@pytest.mark.parametrize("adjust_lr", ["original", "spectral", "match_rms_adamw"])
@pytest.mark.parametrize("dim", [-2, -1])
@pytest.mark.parametrize("input_dim", [-2, -1])
def test_fused_weight_is_updated_like_its_parts(dim, adjust_lr, input_dim):
    fused, separate = fused_and_separate(dim, adjust_lr, input_dim)
    torch.testing.assert_close(fused, separate, rtol=0, atol=1e-12)


@pytest.mark.parametrize("adjust_lr", ["original", "spectral", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (3, 6, 4)])
def test_input_dim(shape, adjust_lr):
    torch.manual_seed(0)
    usual = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64))
    transposed = torch.nn.Parameter(usual.detach().mT.contiguous())
    options = {"adjust_lr": adjust_lr, "compute_dtype": "float64"}
    optimizers = Muon([usual], 0.1, **options), Muon([transposed], 0.1, input_dim=-2, **options)
    for _ in range(3):
        usual.grad = torch.randn(shape, dtype=torch.float64)
        transposed.grad = usual.grad.mT.contiguous()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(usual.detach(), transposed.detach().mT, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: CosineAnnealingLR(optimizer, 6),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=8),
        lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    ],
    ids=["cosine", "one cycle with momentum", "inverse"],
)
def test_schedulers(schedule, lr):
    """Against the formula in float64, with the learning rate and momentum of the group."""
    param = parameters([(6, 4)], torch.float64)[0]
    weight, buffer = param.detach().clone(), torch.zeros(6, 4, dtype=torch.float64)
    optimizer = Muon([param], lr, weight_decay=0.2, compute_dtype="float64")
    scheduler = schedule(optimizer)
    rates = set()
    for step in range(6):
        give_gradients([param], step)
        rate, momentum = float(optimizer.param_groups[0]["lr"]), optimizer.param_groups[0]["momentum"]
        rates.add(rate)
        optimizer.step()
        scheduler.step()
        buffer = momentum * buffer + (1 - momentum) * param.grad
        u, s, vh = torch.linalg.svd(momentum * buffer + (1 - momentum) * param.grad, full_matrices=False)
        s = s / s.norm()
        for a, b, c in STANDARD:
            s = a * s + b * s**3 + c * s**5
        weight = weight * (1 - rate * 0.2) - rate * math.sqrt(6 / 4) * (u @ torch.diag(s) @ vh)
        torch.testing.assert_close(param.detach(), weight, rtol=1e-6, atol=1e-6)
    assert len(rates) == 6


@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw", "spectral_unclamped"])
@pytest.mark.parametrize("shape", SHAPES)
def test_adjust_lr_fn(shape, adjust_lr_fn):
    """As a keyword or positional argument, and in a group, which overrides the argument."""
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


def test_adjust_lr_and_adjust_lr_fn_must_not_differ():
    with pytest.raises(ValueError, match="adjust_lr_fn.*'spectral_unclamped'.*adjust_lr .'original'"):
        Muon([parameter(2, 3)], adjust_lr="original", adjust_lr_fn="spectral_unclamped")
    with pytest.raises(ValueError, match="adjust_lr_fn"):
        Muon([{"params": [parameter(2, 3)], "adjust_lr": "original", "adjust_lr_fn": "match_rms_adamw"}])
    with pytest.raises(ValueError, match="unknown adjust_lr 'unclamped'"):
        Muon([parameter(2, 3)], adjust_lr_fn="unclamped")


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
        ({"split_dim": 0}, "split_dim"),
        ({"input_dim": 1}, "input_dim"),
    ],
)
def test_invalid_options_raise(options, words):
    with pytest.raises(ValueError, match=words):
        Muon([parameter(2, 3)], **options)
    with pytest.raises(ValueError, match=words):
        Muon([{"params": [parameter(2, 3)], **options}])


@pytest.mark.parametrize("sizes", [(8, 8, 2), (8, 8, 2, 3)])
def test_split_sizes_must_add_up(sizes):
    with pytest.raises(ValueError, match=f"add up to {sum(sizes)}.*'qkv'.*size 20"):
        Muon([("qkv", torch.nn.Parameter(torch.zeros(20, 6)))], split_sizes=sizes)
    with pytest.raises(ValueError, match=f"add up to {sum(sizes)}"):
        Muon([torch.nn.Parameter(torch.zeros(6, 20))], split_sizes=sizes, split_dim=-1)


def test_bucket_mb_in_a_group_raises():
    with pytest.raises(ValueError, match="bucket_mb.*Muon itself"):
        Muon([{"params": [parameter(2, 3)], "bucket_mb": 8}])


def test_group_values_are_serializable():
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


@pytest.mark.parametrize(
    ("name", "build"),
    {
        "Muon": Muon,
        "Lion": Lion,
        "SGD": lambda params: ErrorFeedback(torch.optim.SGD(params, 0.1)),
    }.items(),
)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_duplicate_parameters_raise(name, build):
    one, two = parameter(2, 3), parameter(4, 4)
    with pytest.raises(ValueError, match=rf"{name} got a parameter of shape \[2, 3\] twice"):
        build([one, two, one])
    with pytest.raises(ValueError, match=rf"{name} got parameter 'tied' of shape \[2, 3\] twice"):
        build([("first", one), ("tied", one)])
    optimizer = build(iter([one]))
    before = copy.deepcopy(optimizer.state_dict())
    for params in ([one], [two, two]):
        with pytest.raises(ValueError, match="twice"):
            optimizer.add_param_group({"params": params})
        assert len(optimizer.param_groups) == 1 and str(optimizer.state_dict()) == str(before)
    optimizer.add_param_group({"params": two})


@pytest.mark.filterwarnings("error")
def test_duplicate_parameters_in_two_groups_raise():
    for build in (Muon, Lion):
        param = parameter(2, 3)
        with pytest.raises(ValueError, match="twice"):
            build([{"params": [param]}, {"params": [parameter(4, 4), param]}])
        with pytest.raises(ValueError, match="twice"):
            build([param, param])


def test_invalid_parameters_raise_without_changes():
    [fine] = parameters([(3, 4)])
    optimizer = Muon([fine], error_feedback=1.0)
    groups, state = len(optimizer.param_groups), len(optimizer.state)
    for bad, words in [
        (torch.zeros(()), r"'norm.weight' of shape \[\] to AdamW"),
        (torch.zeros(3), r"'norm.weight' of shape \[3\] to AdamW"),
        (torch.zeros(2, 3, 4, 5), r"'norm.weight' of shape \[2, 3, 4, 5\] to AdamW"),
        (torch.zeros(3, 3, dtype=torch.complex64), "complex64"),
        (torch.zeros(3, 3).to_sparse(), "dense"),
    ]:
        given = [("weight", parameters([(2, 2)])[0]), ("norm.weight", torch.nn.Parameter(bad))]
        with pytest.raises(ValueError, match=words):
            Muon(given)
        with pytest.raises(ValueError, match="Muon updates"):
            optimizer.add_param_group({"params": [param for _, param in given]})
    with pytest.raises(ValueError, match="momentum"):
        optimizer.add_param_group({"params": parameters([(2, 2)]), "momentum": 2.0})
    assert (len(optimizer.param_groups), len(optimizer.state)) == (groups, state)
    fine.grad = torch.ones(3, 4).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
