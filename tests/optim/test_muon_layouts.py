"""Muon on models that torch has sharded: FSDP2, HSDP, replicas, tensor and expert parallelism.

Forward and backward on four gloo processes, each with its share of a batch, are compared with one process
and the whole batch. Weights are compared shard by shard, using `torch.chunk`, because `full_tensor` of uneven
strided shards is unreliable.
"""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.optim import meshes
from titan_async.optim import ErrorFeedback, Muon

BATCH, WIDTH = 8, 8
OPTIONS = {"compute_dtype": "float64", "error_feedback": 1.0, "weight_decay": 0.2}


class Layer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Experts(nn.Module):
    """Every expert computes every token; the outputs are summed."""

    def __init__(self, experts, rows, cols):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, rows, cols))

    def forward(self, x):
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return torch.einsum("erc,bc->ebr", weight, x).tanh()


def dense(hidden):
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(hidden) for _ in range(2)]).double()


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator)


def train(model, share, shares, wrapped, steps=3):
    """Three updates on a share of each batch; the loss is a mean over the share."""
    params = list(model.parameters())
    if wrapped:
        options = {key: value for key, value in OPTIONS.items() if key != "error_feedback"}
        optimizer = ErrorFeedback(Muon(params, 0.1, **options))
    else:
        optimizer = Muon(params, 0.1, **OPTIONS)
    for step in range(steps):
        x = data(step).chunk(shares)[share]
        (model(x) - x.sin()).square().sum(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return params


def chunk(tensor, parts, part, dim):
    pieces = tensor.chunk(parts, dim)
    return pieces[part] if part < len(pieces) else tensor.narrow(dim, 0, 0)


def splits(name, number):
    """The splits of a parameter, in order: (dimension of the mesh, dimension of the tensor)."""
    tensor_parallel = (1, 0 if number % 2 == 0 else 1)
    return {
        "fsdp": [(0, 0)],
        "fsdp columns": [(0, 1)],
        "hsdp": [(1, 0)],
        "replicate": [],
        "tp": [tensor_parallel],
        "fsdp and tp": [tensor_parallel, (0, 0)],
        "fsdp columns and tp": [tensor_parallel, (0, 1)],
    }[name]


MESHES = {"fsdp": (4,), "fsdp columns": (4,), "replicate": (4,)}


def parallelize(model, name):
    """Parallelize the model; returns the mesh shape, this rank's coordinate, and its share of the data."""
    shape = MESHES.get(name, (2, 2))
    mesh = meshes["line" if len(shape) == 1 else "grid"]
    coordinate = mesh.get_coordinate()
    if "tp" in name:
        for layer in model:
            parallelize_module(layer, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if name == "replicate":
        from torch.distributed._composable.replicate_with_fsdp import replicate

        replicate(model, mesh=mesh)
    elif name != "tp":
        options = {"shard_placement_fn": lambda param: Shard(1)} if "columns" in name else {}
        over = mesh["outer"] if "tp" in name else mesh
        for module in (*model, model):
            fully_shard(module, mesh=over, **options)
    if "tp" in name:
        data_parallel = (0, 1) if name == "tp" else (coordinate[0], 2)
    else:
        data_parallel = (torch.distributed.get_rank(), 4)
    return shape, coordinate, data_parallel


def train_parallel(rank, group, name, hidden, wrapped):
    model = dense(hidden)
    shape, coordinate, (share, shares) = parallelize(model, name)
    params = train(model, share, shares, wrapped)
    kinds = {type(placement).__name__ for param in params for placement in param.placements}
    return coordinate, shape, [param.to_local().detach().numpy() for param in params], kinds


@pytest.mark.covering(1)
@pytest.mark.parametrize("wrapped", [False, True], ids=["inside", "around"])
@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("fsdp", 8),
        ("fsdp", 7),
        ("fsdp", 2),
        ("fsdp columns", 8),
        ("hsdp", 8),
        ("hsdp", 5),
        ("replicate", 5),
        ("tp", 8),
        ("fsdp and tp", 8),
        ("fsdp and tp", 6),
        ("fsdp and tp", 10),
        ("fsdp columns and tp", 8),
    ],
)
def test_dense_model(four_ranks, name, hidden, wrapped):
    expected = train(dense(hidden), 0, 1, wrapped)
    for coordinate, shape, found, kinds in four_ranks.run(4, train_parallel, name, hidden, wrapped):
        if name == "fsdp and tp":
            assert "_StridedShard" in kinds
        for number, (weight, local) in enumerate(zip(expected, found, strict=True)):
            part = weight.detach()
            for mesh_dim, dim in splits(name, number):
                part = chunk(part, shape[mesh_dim], coordinate[mesh_dim], dim)
            assert tuple(part.shape) == local.shape
            torch.testing.assert_close(part, torch.from_numpy(local), rtol=0, atol=1e-11)


def experts(count, rows, cols):
    torch.manual_seed(0)
    return Experts(count, rows, cols).double()


def train_experts(rank, group, sizes, dim):
    """Expert parallelism over the inner mesh dimension, and FSDP2 along `dim` over the outer one."""
    mesh = meshes["grid"]
    data_rank, expert_rank = mesh.get_coordinate()
    model = experts(*sizes)
    weight = distribute_tensor(model.weight.detach(), mesh["inner"], [Shard(0)])
    model.weight = nn.Parameter(weight)
    fully_shard(model, mesh=mesh["outer"], shard_placement_fn=lambda param: Shard(dim))
    optimizer = Muon(model.parameters(), 0.1, adjust_lr="match_rms_adamw", **OPTIONS)
    for step in range(3):
        x = data(step)[:, : sizes[2]].chunk(2)[data_rank]
        model(x).square().sum((0, 2)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    param = model.weight
    kinds = [type(placement).__name__ for placement in param.placements]
    return data_rank, expert_rank, param.to_local().detach().numpy(), kinds


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("sizes", "dim"),
    [((8, 4, 4), 0), ((8, 4, 4), 1), ((8, 4, 4), 2), ((6, 4, 5), 0), ((5, 4, 6), 1), ((2, 6, 4), 1)],
)
def test_experts_equal_a_loop_over_experts(four_ranks, sizes, dim):
    whole = experts(*sizes)
    matrices = [nn.Parameter(matrix.clone()) for matrix in whole.weight.detach()]
    optimizer = Muon(matrices, 0.1, adjust_lr="match_rms_adamw", **OPTIONS)
    for step in range(3):
        x = data(step)[:, : sizes[2]]
        for matrix in matrices:
            (x @ matrix.T).tanh().square().sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = torch.stack([matrix.detach() for matrix in matrices])
    for data_rank, expert_rank, local, kinds in four_ranks.run(4, train_experts, sizes, dim):
        assert ("_StridedShard" in kinds) == (dim == 0)
        part = chunk(chunk(expected, 2, expert_rank, 0), 2, data_rank, dim)
        assert tuple(part.shape) == local.shape
        torch.testing.assert_close(part, torch.from_numpy(local), rtol=0, atol=1e-11)


def train_distributed_data_parallel(rank, group):
    """Plain parameters with all-reduced gradients: every rank updates all of them."""
    model = nn.parallel.DistributedDataParallel(dense(7))
    return [param.detach().numpy() for param in train(model, rank, 4, False)]


def test_distributed_data_parallel(four_ranks):
    expected = train(dense(7), 0, 1, False)
    for found in four_ranks.run(4, train_distributed_data_parallel):
        for weight, local in zip(expected, found, strict=True):
            torch.testing.assert_close(weight.detach(), torch.from_numpy(local), rtol=0, atol=1e-11)


def train_partly_sharded(rank, group):
    """A model with one layer under FSDP2, and one replicated over the same ranks."""
    mesh = meshes["line"]
    model = dense(7)
    fully_shard(model[0], mesh=mesh)
    for name, param in list(model[1].named_parameters()):
        owner = getattr(model[1], name.split(".")[0])
        owner.weight = nn.Parameter(distribute_tensor(param.detach(), mesh, [Replicate()]))
    optimizer = Muon(model.parameters(), 0.1, **OPTIONS)
    for step in range(3):
        for number, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(10 * step + number)
            grad = torch.randn(param.shape, dtype=torch.float64, generator=generator)
            param.grad = distribute_tensor(grad, mesh, param.placements)
        optimizer.step()
    return [param.full_tensor().detach().numpy() for param in model.parameters()]


def test_layers_with_different_placements(four_ranks):
    model = dense(7)
    optimizer = Muon(model.parameters(), 0.1, **OPTIONS)
    for step in range(3):
        for number, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(10 * step + number)
            param.grad = torch.randn(param.shape, dtype=torch.float64, generator=generator)
        optimizer.step()
    for found in four_ranks.run(4, train_partly_sharded):
        for weight, local in zip(model.parameters(), found, strict=True):
            torch.testing.assert_close(weight.detach(), torch.from_numpy(local), rtol=0, atol=1e-11)
