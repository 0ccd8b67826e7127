"""Optimizers on DTensor parameters, which torchtitan also uses on one rank: gloo, one and two processes."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.processes import Pools, WorkerPool
from titan_async.optim import ErrorFeedback, Muon, compiled_adamw

BUILD = {
    "adamw": lambda params: torch.optim.AdamW(params, 0.1),
    "muon": lambda params: Muon(params, 0.1),
}


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(6, 4), (3, 4, 6)])
@pytest.mark.parametrize("level", ["none", "update", "gradient"])
@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
@pytest.mark.parametrize("name", BUILD)
def test_mesh_of_one_rank_equals_a_plain_parameter(mesh, name, placement, level, shape):
    torch.manual_seed(0)
    start, grads = torch.randn(shape), [torch.randn(shape) for _ in range(4)]
    plain = torch.nn.Parameter(start.clone())
    sharded = torch.nn.Parameter(distribute_tensor(start.clone(), mesh, [placement]))
    optimizers = [BUILD[name]([param]) for param in (plain, sharded)]
    if level != "none":
        optimizers = [ErrorFeedback(optimizer, level=level) for optimizer in optimizers]
    for grad in grads:
        plain.grad = grad.clone()
        sharded.grad = distribute_tensor(grad.clone(), mesh, [placement])
        for optimizer in optimizers:
            optimizer.step()
        assert isinstance(sharded.grad, DTensor)
        assert torch.equal(sharded.grad.to_local(), grad)
    assert torch.equal(plain, sharded.to_local())
    # The state is sharded like the parameter.
    for key, value in optimizers[1].state[sharded].items():
        if key != "step" and not key.endswith("_valid"):
            assert isinstance(value, DTensor)
            assert value.placements == (placement,)

    saved = optimizers[1].state_dict()
    optimizers[1].load_state_dict(saved)
    plain.grad, sharded.grad = grads[0].clone(), distribute_tensor(grads[0].clone(), mesh, [placement])
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(plain, sharded.to_local())


def test_compiled_updates_of_local_parts(mesh, monkeypatch):
    monkeypatch.setattr(compiled_adamw, "_compiled", lambda: compiled_adamw._update_and_correct_)
    torch.manual_seed(0)
    start, grads = torch.randn(3, 4, 6), [torch.randn(3, 4, 6) for _ in range(4)]
    plain = torch.nn.Parameter(start.clone())
    sharded = torch.nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
    optimizers = [ErrorFeedback(BUILD["adamw"]([param]), compile=True) for param in (plain, sharded)]
    for grad in grads:
        plain.grad, sharded.grad = grad, distribute_tensor(grad, mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(plain, sharded.to_local())
    expected, found = optimizers[0].state[plain], optimizers[1].state[sharded]
    for key in ("exp_avg", "error_feedback_update"):
        assert torch.equal(expected[key], found[key].to_local())


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def build_model(mesh, level):
    """A layer with five rows, in uneven shards on two ranks, or without a mesh in one process."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 5, dtype=torch.float64)
    if mesh is not None:
        for name, param in list(layer.named_parameters()):
            setattr(layer, name, torch.nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])))
    optimizer = torch.optim.AdamW(layer.named_parameters(), 0.1, fused=True)
    return layer, ErrorFeedback(optimizer, level=level)


def train(layer, optimizer, mesh, batches):
    for batch in batches:
        for i, param in enumerate(layer.parameters()):
            generator = torch.Generator().manual_seed(100 * batch + i)
            grad = torch.randn(param.shape, dtype=torch.float64, generator=generator)
            param.grad = grad if mesh is None else distribute_tensor(grad, mesh, [Shard(0)])
        optimizer.step()
        optimizer.zero_grad()


def train_sharded(rank, group, level, folder):
    """The full weights after six updates, without and with a checkpoint after the third."""
    mesh = init_device_mesh("cpu", (group.size(),))
    layer, optimizer = build_model(mesh, level)
    train(layer, optimizer, mesh, range(3))
    dcp.save(get_optimizer_state_dict(layer, optimizer, options=FLAT), checkpoint_id=folder)

    resumed_layer, resumed = build_model(mesh, level)
    with torch.no_grad():
        for new, old in zip(resumed_layer.parameters(), layer.parameters(), strict=True):
            new.copy_(old)
    saved = get_optimizer_state_dict(resumed_layer, resumed, options=FLAT)
    dcp.load(saved, checkpoint_id=folder)
    set_optimizer_state_dict(resumed_layer, resumed, saved, options=FLAT)

    train(layer, optimizer, mesh, range(3, 6))
    train(resumed_layer, resumed, mesh, range(3, 6))
    return [
        [param.full_tensor().detach().numpy() for param in each.parameters()]
        for each in (layer, resumed_layer)
    ]


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    return pools(2)


@pytest.mark.parametrize("level", ["update", "gradient"])
def test_error_feedback_of_sharded_parameters_equals_that_of_unsharded_ones(pool, level, tmp_path):
    layer, optimizer = build_model(None, level)
    train(layer, optimizer, None, range(6))
    for straight, resumed in pool.run(2, train_sharded, level, str(tmp_path)):
        for expected, one, two in zip(layer.parameters(), straight, resumed, strict=True):
            torch.testing.assert_close(expected.detach(), torch.from_numpy(one), rtol=1e-12, atol=1e-12)
            assert (one == two).all()
