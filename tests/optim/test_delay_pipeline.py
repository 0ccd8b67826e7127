"""`DelayedGradients` in one process against `ScheduleAsync2BW` on several, and under `fully_shard`."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from tests.support.delay import OPTIMIZERS
from tests.support.processes import Pools, WorkerPool
from tests.support.recurrence import build_blocks, build_data, loss_fn
from titan_async.optim import DelayedGradients, pipedream_delays
from titan_async.pipelining import ScheduleAsync2BW

BATCHES = 6


# The pipeline sums gradients in another order.
TOLERANCE = 1e-12


def simulate(num_stages, n_microbatches, name, delay=1):
    """Train all stages as one model in one process; returns weights and losses."""
    module = nn.Sequential(*build_blocks(num_stages))
    if delay == "pipedream":
        delay = pipedream_delays(list(module))
    delayed, optimizer = DelayedGradients(module, delay), OPTIMIZERS[name](module)
    inputs, targets = build_data(BATCHES, n_microbatches)
    losses = []
    for x, y in zip(inputs, targets, strict=True):
        with delayed.batch():
            each = [loss_fn(module(one), target) for one, target in zip(x, y, strict=True)]
            (sum(each) / n_microbatches).backward()
        losses.append([loss.item() for loss in each])
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict(), losses


def pipeline(rank, group, n_microbatches, name):
    """Train this rank's stage by the schedule; returns its weights and the losses."""
    module = nn.Sequential()
    module.add_module(str(rank), build_blocks(group.size())[rank])
    stage = PipelineStage(module, rank, group.size(), torch.device("cpu"), group=group)
    schedule = ScheduleAsync2BW(stage, n_microbatches, loss_fn=loss_fn)
    optimizer = OPTIMIZERS[name](module)
    inputs, targets = build_data(BATCHES, n_microbatches)
    losses = []
    for x, y in zip(inputs, targets, strict=True):
        each = []
        args = (x.flatten(0, 1),) if stage.is_first else ()
        schedule.step(*args, target=y.flatten(0, 1) if stage.is_last else None, losses=each)
        losses.append([loss.item() for loss in each])
        if schedule.gradient_ready:
            optimizer.step()
            optimizer.zero_grad()
    assert schedule.drain()
    optimizer.step()
    return module.state_dict(), losses


def difference(results, expected):
    """The largest difference of any weight of the stages, or loss of the last stage."""
    weights = {name: value for stage, _ in results for name, value in stage.items()}
    assert set(weights) == set(expected[0])
    worst = [float((value - expected[0][name]).abs().max()) for name, value in weights.items()]
    worst.append(float((torch.tensor(results[-1][1]) - torch.tensor(expected[1])).abs().max()))
    return max(worst)


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    return pools(4)


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_delay_one_equals_the_schedule(pool, name, num_stages):
    results = pool.run(num_stages, pipeline, num_stages + 1, name)
    assert difference(results, simulate(num_stages, num_stages + 1, name)) < TOLERANCE
    wrong = [0, 2] if num_stages < 3 else [0, 2, "pipedream"]
    for delay in wrong:
        assert difference(results, simulate(num_stages, num_stages + 1, name, delay)) > 1e-4


def train_sharded(rank, group, sharded):
    """Train with or without `fully_shard`; returns the full weights after each batch."""
    module = nn.Sequential(*build_blocks(3))
    if sharded:
        mesh = init_device_mesh("cpu", (group.size(),))
        for layer in (*module, module):
            fully_shard(layer, mesh=mesh)
        for layer in module.modules():
            if isinstance(layer, FSDPModule):
                layer.set_force_sum_reduction_for_comms(True)
    delayed = DelayedGradients(module, pipedream_delays(list(module)))
    optimizer = OPTIMIZERS["fused_adamw with feedback"](module)
    inputs, targets = build_data(BATCHES, 1)
    trajectory = []
    for x, y in zip(inputs[:, 0], targets[:, 0], strict=True):
        with delayed.batch():
            loss_fn(module(x), y).backward()
        assert all(isinstance(p, DTensor) == sharded for p in module.parameters())
        optimizer.step()
        optimizer.zero_grad()
        full = [p.full_tensor() if sharded else p for p in module.parameters()]
        trajectory.append(torch.cat([p.detach().flatten() for p in full]))
    versions = delayed.state_dict()["weights"]["0.up.weight"]
    assert [isinstance(version, DTensor) for version in versions] == [sharded] * 2
    return torch.stack(trajectory)


def test_sharded_parameters_equal_unsharded_ones(pool):
    """All ranks have the same batch, so the mean over ranks equals the gradient of one process."""
    expected = train_sharded(0, None, False)
    for trajectory in pool.run(2, train_sharded, True):
        assert float((trajectory - expected).abs().max()) < TOLERANCE
