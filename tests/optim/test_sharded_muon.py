"""Muon on sharded matrices, against the same matrices whole in one process: gloo, four processes."""

from itertools import pairwise

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.processes import Pools, WorkerPool
from titan_async.optim import Muon

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)

LAYOUTS = {
    "rows": ((4,), [S0]),
    "two ranks": ((2, 2), [S0]),
    "columns": ((4,), [S1]),
    "replicated": ((4,), [R]),
    "hsdp": ((2, 2), [R, S0]),
    "rows and columns": ((2, 2), [S0, S1]),
    "columns and rows": ((2, 2), [S1, S0]),
    "rows twice": ((2, 2), [S0, S0]),
    "fsdp and replicated": ((2, 2), [S0, R]),
    "all replicated": ((2, 2), [R, R]),
}
STACKS = {
    "experts": ((4,), [S0]),
    "inside": ((4,), [S1]),
    "last": ((4,), [S2]),
    "experts and rows": ((2, 2), [S1, S0]),
    "experts and columns": ((2, 2), [S2, S0]),
    "experts twice": ((2, 2), [S0, S0]),
    "replicated experts": ((2, 2), [R, S0]),
    "replicated": ((4,), [R]),
}
SHAPES = [(1, 4), (3, 16), (18, 8), (16, 16), (5, 7), (12, 3), (0, 5), (24, 8)]
STACK_SHAPES = [(8, 4, 4), (3, 6, 10), (5, 9, 2), (1, 4, 8)]


meshes: dict[tuple[int, ...], DeviceMesh] = {}


def make_meshes(rank, group):
    """Once for all tests: each mesh has groups of its own."""
    meshes[(4,)] = init_device_mesh("cpu", (4,))
    meshes[2, 2] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    pool = pools(4)
    pool.run(4, make_meshes, keeps=True)
    return pool


def gradient(shape, step, number):
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def train(shapes, place, options, steps=3, dtype=torch.float64):
    """The weights after a few updates; ``place`` makes a tensor plain or sharded."""
    params = []
    for number, shape in enumerate(shapes):
        params.append(torch.nn.Parameter(place(gradient(shape, 99, number).to(dtype))))
    optimizer = Muon(params, 0.1, **options)
    for step in range(steps):
        for number, param in enumerate(params):
            param.grad = place(gradient(param.shape, step, number).to(dtype))
        optimizer.step()
    return params, optimizer


def sharding(mesh_shape, placements):
    mesh = meshes[mesh_shape]
    if len(placements) < len(mesh_shape):  # two meshes of two ranks, which know nothing of each other
        mesh = mesh["inner"]
    # All ranks have the whole tensor.
    return lambda tensor: distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def train_sharded(rank, group, layout, shapes, options, **kwargs):
    params, optimizer = train(shapes, sharding(*layout), options, **kwargs)
    for param in params:
        buffer = optimizer.state[param]["momentum_buffer"]
        for tensor in (param, buffer):
            assert isinstance(tensor, DTensor)
            assert list(tensor.placements) == layout[1]
        assert buffer.to_local().shape == param.to_local().shape
    whole = [param.full_tensor().detach().numpy() for param in params]
    # Replicas must not drift apart.
    local = [param.to_local().detach().numpy() for param in params]
    return whole, local


def assert_like_one_process(results, shapes, options, tolerance, **kwargs):
    expected, _ = train(shapes, lambda tensor: tensor, options, **kwargs)
    for whole, _ in results:
        for one, other in zip(expected, whole, strict=True):
            error = (one.detach() - torch.from_numpy(other)).abs()
            assert error.numel() == 0 or error.max() <= tolerance


# Which matrices travel where does not depend on what is done with them.
OPTIONS = [
    {"compute_dtype": "float64"},
    {"compute_dtype": "float64", "adjust_lr": "match_rms_adamw", "nesterov": False, "ns_form": "gram"},
    {"compute_dtype": "float64", "error_feedback": 1.0, "cautious_weight_decay": True, "bucket_mb": 1e-4},
    {"compute_dtype": "float64", "error_feedback": 0.5, "error_feedback_level": "gradient"},
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "gram", "feedback", "gradient"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrices_of_every_layout_equal_one_process(pool, layout, options):
    results = pool.run(4, train_sharded, LAYOUTS[layout], SHAPES, options)
    assert_like_one_process(results, SHAPES, options, 1e-12)


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "gram", "feedback", "gradient"])
@pytest.mark.parametrize("layout", STACKS)
def test_experts_of_every_layout_equal_one_process(pool, layout, options):
    results = pool.run(4, train_sharded, STACKS[layout], STACK_SHAPES, options)
    assert_like_one_process(results, STACK_SHAPES, options, 1e-12)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 2e-2), ("float16", 3e-3)])
@pytest.mark.parametrize("layout", ["rows", "columns", "hsdp", "rows and columns", "replicated"])
def test_half_precision_on_the_wire(pool, layout, dtype, tolerance):
    options = {"compute_dtype": dtype}
    results = pool.run(4, train_sharded, LAYOUTS[layout], SHAPES, options, dtype=torch.float32)
    assert_like_one_process(results, SHAPES, options, tolerance, dtype=torch.float32)
    if layout in ("replicated", "hsdp"):
        for (_, one), (_, other) in pairwise(results[:: 2 if layout == "hsdp" else 1]):
            assert all((a == b).all() for a, b in zip(one, other, strict=True))
