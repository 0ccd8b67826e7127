"""Modules with one weight in two places."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from tests.support.processes import Pools, WorkerPool
from tests.support.recurrence import WIDTH, build_data, loss_fn, run_batch
from tests.support.sharded import make_meshes, meshes, shard, whole
from titan_async.pipelining import ScheduleAsync2BW

BATCHES, M = 5, 3


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    pool = pools(4)
    pool.run(4, make_meshes, keeps=True)
    return pool


class Tied(nn.Module):
    """One matrix in two places, used in both directions."""

    def __init__(self):
        super().__init__()
        self.there = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.back = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.back.weight = self.there.weight

    def forward(self, x):
        return x + self.back(torch.tanh(self.there(x)))


def build_stages():
    torch.manual_seed(0)
    return [Tied(), Tied()]


def optimizer_of(module):
    return torch.optim.AdamW(module.parameters(), lr=0.02)


def plain(module, mesh):
    return module


def in_one_group(module, mesh):
    return shard(module, mesh["dp"])


def in_two_groups(module, mesh):
    shard(module.there, mesh["dp"])
    shard(module.back, mesh["dp"])
    return shard(module, mesh["dp"])


def run_stage(names, module, data):
    mesh = meshes[names]
    index, shares = mesh.get_local_rank("pp"), mesh.size() // 2
    for part in module.modules():
        if hasattr(part, "set_force_sum_reduction_for_comms"):
            part.set_force_sum_reduction_for_comms(True)
    stage = PipelineStage(module, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule, optimizer = ScheduleAsync2BW(stage, M, loss_fn=loss_fn), optimizer_of(module)
    share = mesh.get_local_rank("dp") if shares > 1 else 0
    inputs, targets = (tensor[:, share::shares] for tensor in data)

    def apply():
        if schedule.gradient_ready:
            optimizer.step()
            optimizer.zero_grad()

    for batch in range(BATCHES):
        run_batch(schedule.step, stage, inputs[batch], targets[batch])
        apply()
    schedule.drain()
    apply()
    return whole(module)


def tied(rank, group, names, wrap):
    mesh = meshes[names]
    index = mesh.get_local_rank("pp")
    module = wrap(build_stages()[index], mesh)
    weights = run_stage(names, module, build_data(BATCHES, M * (mesh.size() // 2)))
    assert module.there.weight is module.back.weight
    return {f"{index}.{name}": value for name, value in weights.items()}


def tied_oracle(shares):
    newest = nn.Sequential(*build_stages())
    optimizer, history = optimizer_of(newest), [copy.deepcopy(newest)]
    inputs, targets = build_data(BATCHES, M * shares)
    for batch in range(BATCHES):
        reader = copy.deepcopy(history[max(batch - 1, 0)])
        losses = [loss_fn(reader(x), y) for x, y in zip(inputs[batch], targets[batch], strict=True)]
        (sum(losses) / len(losses)).backward()
        for parameter, stale in zip(newest.parameters(), reader.parameters(), strict=True):
            parameter.grad = stale.grad
        optimizer.step()
        history.append(copy.deepcopy(newest))
    return dict(newest.named_parameters())


@pytest.mark.parametrize(("names", "wrap"), [(("pp",), plain), (("pp", "dp"), in_one_group)])
def test_a_weight_in_two_places_equals_the_recurrence(pool, names, wrap):
    """One parameter of two modules of a stage gets the gradient of both, in each version."""
    results = pool.run(2 * len(names), tied, names, wrap)
    expected = tied_oracle(len(names))
    assert {name for weights in results for name in weights} == set(expected)
    for weights in results:
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=0, atol=1e-12)


def refused(rank, group):
    try:
        tied(rank, group, ("pp", "dp"), in_two_groups)
    except ValueError as error:
        return str(error)


def test_a_weight_in_two_fsdp_groups_is_refused(pool):
    """By FSDP itself."""
    for message in pool.run(4, refused):
        assert "shared with a parameter already managed by another FSDP group" in message
