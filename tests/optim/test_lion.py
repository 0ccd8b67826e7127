"""Lion against Algorithm 2 of arXiv 2302.06675, and the conventions of torch's optimizers."""

import copy
import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.processes import Pools, WorkerPool
from titan_async.optim import ErrorFeedback, Lion

SHAPES = [(), (5,), (4, 6), (2, 3, 4), (0, 3)]
RATES = [0.0, 0.1, 0.03, 0.2, 0.01, 0.07]


def values(shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def parameters(dtype=torch.float64, shapes=SHAPES):
    return [torch.nn.Parameter(values(shape, i, dtype)) for i, shape in enumerate(shapes)]


def gradient(batch, index, weights):
    """A gradient that depends on the batch and the weights; some entries are exactly zero."""
    noise = values(weights.shape, 100 * batch + index + 7).to(weights.dtype)
    return torch.where(noise.abs() < 0.3, torch.zeros_like(noise), noise + 0.5 * weights)


def scalar_sign(x):
    return (x > 0) - (x < 0)


def reference(start, rates, betas, decay):
    """Algorithm 2, entry by entry in Python floats."""
    weights, momenta = [x.clone() for x in start], [torch.zeros_like(x) for x in start]
    for batch, lr in enumerate(rates):
        for i, (weight, momentum) in enumerate(zip(weights, momenta, strict=True)):
            flat_w, flat_m = weight.view(-1), momentum.view(-1)
            for j, g in enumerate(gradient(batch, i, weight).view(-1).tolist()):
                w, m = flat_w[j].item(), flat_m[j].item()
                u = scalar_sign(betas[0] * m + (1 - betas[0]) * g)
                flat_w[j] = w - lr * (u + decay * w)
                flat_m[j] = betas[1] * m + (1 - betas[1]) * g
    return weights, momenta


def train(params, optimizer, batches, rates=RATES):
    for batch in batches:
        for i, param in enumerate(params):
            param.grad = gradient(batch, i, param.detach())
        for group in optimizer.param_groups:
            group["lr"] = rates[batch % len(rates)]
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.95, 0.98), (0.0, 0.0), (0.9, 0.9)])
def test_follows_the_paper(betas, decay):
    params = parameters()
    optimizer = Lion(params, lr=0.1, betas=betas, weight_decay=decay)
    train(params, optimizer, range(6))
    weights, momenta = reference([p.detach() for p in parameters()], RATES, betas, decay)
    for param, weight, momentum in zip(params, weights, momenta, strict=True):
        torch.testing.assert_close(param.detach(), weight, rtol=1e-13, atol=1e-13)
        found = optimizer.state[param]["momentum_buffer"]
        torch.testing.assert_close(found, momentum, rtol=1e-13, atol=1e-13)


def test_sign_uses_the_momentum_before_its_update():
    """The update with the second beta comes after the sign."""
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = Lion([param], lr=1.0, betas=(0.9, 0.5))
    for grad in (1.0, -4.0):
        param.grad = torch.tensor([grad])
        optimizer.step()
    # 0.9 * 0.5 - 0.1 * 4 > 0, but with the updated momentum -1.75 it would be negative.
    assert param.item() == -2.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_state_is_complete_at_construction_and_at_least_float32(dtype):
    params = parameters(dtype)
    params[1].requires_grad_(False)
    optimizer = Lion(params)
    assert set(optimizer.state) == {p for p in params if p.requires_grad}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for param in params:
        if param.requires_grad:
            momentum = optimizer.state[param]["momentum_buffer"]
            assert momentum.dtype == wide and momentum.shape == param.shape and not momentum.any()
            assert not momentum.requires_grad
    added = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer.add_param_group({"params": [added]})
    assert optimizer.state[added]["momentum_buffer"].dtype == wide


def test_small_gradients_of_bfloat16_parameters_accumulate():
    """A bfloat16 momentum would stop growing early, because 1 + 2^-9 rounds to 1."""
    param = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = Lion([param], betas=(0.9, 0.999))
    for _ in range(2000):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert abs(optimizer.state[param]["momentum_buffer"].item() - (1 - 0.999**2000)) < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("feedback", [False, True])
def test_resuming_is_bitwise_exact(dtype, feedback):
    def build():
        params = parameters(dtype)
        optimizer = Lion(params, weight_decay=0.1)
        return params, ErrorFeedback(optimizer) if feedback else optimizer

    params, optimizer = build()
    train(params, optimizer, range(3))
    saved_weights, saved = copy.deepcopy(([p.detach() for p in params], optimizer.state_dict()))
    untouched = copy.deepcopy(saved)
    train(params, optimizer, range(3, 6))

    others, other = build()
    train(others, other, range(4, 5))
    with torch.no_grad():
        for param, weight in zip(others, saved_weights, strict=True):
            param.copy_(weight)
    other.load_state_dict(saved)
    for index, param in enumerate(others):
        momentum = other.state[param]["momentum_buffer"]
        assert momentum.dtype == torch.float32
        assert torch.equal(momentum, saved["state"][index]["momentum_buffer"])
    if dtype == torch.bfloat16:
        # A cast to the parameter's dtype would lose bits.
        momentum = saved["state"][2]["momentum_buffer"]
        assert not torch.equal(momentum, momentum.bfloat16().float())
    train(others, other, range(3, 6))
    for a, b in zip(params, others, strict=True):
        assert torch.equal(a, b)
    for index in range(len(params)):
        momenta = [each["state"][index]["momentum_buffer"] for each in (saved, untouched)]
        assert torch.equal(*momenta), "training modified the loaded tensors"


def test_hooks_may_replace_the_loaded_state():
    params = parameters(torch.bfloat16, [(3,)])
    optimizer = Lion(params)
    saved = copy.deepcopy(optimizer.state_dict())
    seen = []

    def replace(_, state_dict):
        state_dict["state"] = {0: {"momentum_buffer": torch.full((3,), 1 + 2.0**-20)}}
        return state_dict

    optimizer.register_load_state_dict_pre_hook(replace)
    optimizer.register_load_state_dict_post_hook(
        lambda o: seen.append(o.state[params[0]]["momentum_buffer"].clone())
    )
    for _ in range(2):
        optimizer.load_state_dict(saved)
    assert len(seen) == 2 and all((s == 1 + 2.0**-20).all() and s.dtype == torch.float32 for s in seen)


def test_state_that_does_not_match_raises_without_changes():
    params = parameters(shapes=[(3,), (4,)])
    optimizer = Lion(params)
    train(params, optimizer, range(2))
    before = [optimizer.state[p]["momentum_buffer"].clone() for p in params]
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["momentum_buffer"] = torch.zeros(5)
    with pytest.raises(ValueError, match=r"momentum_buffer of shape \[5\].*shape \[4\].*same order"):
        optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    for param, momentum in zip(params, before, strict=True):
        assert torch.equal(optimizer.state[param]["momentum_buffer"], momentum)


def test_state_without_momenta_starts_from_zeros():
    params = parameters(shapes=[(3,), (4,)])
    optimizer = Lion(params)
    train(params, optimizer, range(2))
    optimizer.load_state_dict(torch.optim.SGD(params, lr=0.1).state_dict() | {"state": {}})
    for param in params:
        assert not optimizer.state[param]["momentum_buffer"].any()


def test_parameter_without_a_gradient_is_skipped():
    params = parameters(shapes=[(3,), (4,)])
    optimizer = Lion(params, lr=0.1, weight_decay=0.5)
    train(params, optimizer, range(2))
    weight, momentum = params[0].detach().clone(), optimizer.state[params[0]]["momentum_buffer"].clone()
    other = params[1].detach().clone()
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    assert torch.equal(params[0], weight) and not torch.equal(params[1], other)
    assert torch.equal(optimizer.state[params[0]]["momentum_buffer"], momentum)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_step_that_creates_state_changes_nothing(dtype):
    """torch.distributed.checkpoint and torchtitan step with zero gradients and lr 0 before loading."""
    params = parameters(dtype)
    optimizer = Lion(params, lr=0.0, weight_decay=0.5)
    before = [p.detach().clone() for p in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for param, value in zip(params, before, strict=True):
        assert torch.equal(param, value)
        assert not optimizer.state[param]["momentum_buffer"].any()


def test_keys_that_torchtitan_injects_are_kept():
    params = parameters()
    group = {"params": params, "param_names": [str(i) for i in range(len(params))], "fused": True}
    optimizer = Lion([{**group, "foreach": False}], lr=0.1)
    train(params, optimizer, range(2))
    kept = optimizer.state_dict()["param_groups"][0]
    assert kept["fused"] is True and kept["foreach"] is False
    assert kept["param_names"] == ["0", "1", "2", "3", "4"]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.param_groups[0]["fused"] is True


def test_sparse_gradient_raises_without_changes():
    params = parameters(shapes=[(4, 3), (4, 3)])
    optimizer = Lion(params, lr=0.1)
    params[0].grad = torch.ones_like(params[0])
    params[1].grad = torch.ones_like(params[1]).to_sparse()
    before = params[0].detach().clone()
    with pytest.raises(RuntimeError, match=r"dense gradients.*sparse=False"):
        optimizer.step()
    assert torch.equal(params[0], before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be a finite number"),
        ({"lr": math.nan}, "lr must be a finite number"),
        ({"lr": torch.ones(2)}, "lr must have one element"),
        ({"weight_decay": -0.1}, "weight_decay must be a finite number"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"betas": (-0.1, 0.9)}, "betas must be two numbers"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"betas": 0.9}, "betas must be two numbers"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        Lion(parameters(), **options)
    optimizer = Lion(parameters())
    added = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [added], **options})
    assert len(optimizer.param_groups) == 1 and added not in optimizer.state


def test_complex_parameter_raises():
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"real floating-point.*'w'.*complex64"):
        Lion([("w", param)])


def test_closure_is_evaluated_once_with_gradients():
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = Lion([param], lr=torch.tensor(0.25))

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert param.tolist() == [0.75, 0.75]


def test_module_may_be_moved_or_converted_after_construction():
    layer = torch.nn.Linear(3, 2, bias=False)
    optimizer = Lion(layer.parameters(), lr=0.25)
    layer.double()
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    assert optimizer.state[layer.weight]["momentum_buffer"].dtype == torch.float64

    with torch.device("meta"):
        layer = torch.nn.Linear(3, 2, bias=False)
    optimizer = Lion(layer.parameters(), lr=0.25)
    (old,) = optimizer.state
    optimizer.param_groups[0]["params"][0] = layer.weight = torch.nn.Parameter(torch.ones(2, 3))
    optimizer.state[layer.weight] = optimizer.state.pop(old)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    assert (layer.weight == 0.75).all()


PLACEMENTS = {"rows": [Shard(0)], "columns": [Shard(1)], "replicated": [Replicate()]}


def train_sharded(rank, group, placement, feedback):
    """Full weights after six updates, and after three, loading, and three more."""
    mesh = init_device_mesh("cpu", (group.size(),))

    def shard(tensor):
        return distribute_tensor(tensor.clone(), mesh, PLACEMENTS[placement])

    def build():
        param = torch.nn.Parameter(shard(values((5, 3), 0)))
        optimizer = Lion([param], weight_decay=0.1)
        return param, ErrorFeedback(optimizer) if feedback else optimizer

    def step(param, optimizer, batches):
        for batch in batches:
            param.grad = shard(gradient(batch, 0, param.full_tensor().detach()))
            optimizer.param_groups[0]["lr"] = RATES[batch]
            optimizer.step()

    param, optimizer = build()
    momentum = optimizer.state[param]["momentum_buffer"]
    assert isinstance(momentum, DTensor) and momentum.placements == param.placements
    step(param, optimizer, range(3))
    other, resumed = build()
    with torch.no_grad():
        other.copy_(param)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(param, optimizer, range(3, 6))
    step(other, resumed, range(3, 6))

    wrong = [Shard(0) if placement != "rows" else Replicate()]
    param.grad = distribute_tensor(torch.ones(5, 3).double(), mesh, wrong)
    with pytest.raises(RuntimeError, match="with the placements of their parameters"):
        optimizer.step()
    return [p.full_tensor().detach().numpy() for p in (param, other)]


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    return pools(2)


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_sharded_parameters_equal_unsharded_ones(pool, placement, feedback):
    plain = parameters(shapes=[(5, 3)])
    optimizer = Lion(plain, weight_decay=0.1)
    train(plain, ErrorFeedback(optimizer) if feedback else optimizer, range(6))
    for straight, resumed in pool.run(2, train_sharded, placement, feedback):
        torch.testing.assert_close(plain[0].detach(), torch.from_numpy(straight), rtol=1e-12, atol=1e-12)
        assert (straight == resumed).all()
