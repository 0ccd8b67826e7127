"""Metrics reduced over all ranks: utilization of stages, and the norm of error feedback's history."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.processes import Pools, WorkerPool
from titan_async.pipelining.gradient_norm import share_of_squares
from titan_async.training.telemetry.step_metrics import pipeline_metrics


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    return pools(4)


def gathered(rank, group, unknown_on):
    """Two stages of two ranks each, whose parameters are sharded, or the same on both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
    stage = rank // 2
    generator = torch.Generator().manual_seed(stage)
    whole = [torch.randn(5, 3, generator=generator) for _ in range(2)]
    histories = [
        distribute_tensor(whole[0], mesh, [Shard(0)]),
        distribute_tensor(whole[1], mesh, [Replicate()]),
    ]
    busy = {} if rank == unknown_on else {stage: 0.5 + 0.1 * rank}
    squares = float(share_of_squares(histories, 2, torch.device("cpu")))
    metrics = pipeline_metrics(busy, squares, stages=2, degree=2, group=group)
    dist.barrier()
    return metrics, sum(tensor.square().sum().item() for tensor in whole)


def test_utilization_is_the_mean_over_a_stages_ranks_and_the_norm_is_global(pool):
    results = pool.run(4, gathered, None)
    norm = math.sqrt(results[0][1] + results[2][1])
    for metrics, _ in results:
        assert metrics == pytest.approx(
            {
                "pipeline/utilization/0": 0.55,
                "pipeline/utilization/1": 0.75,
                "pipeline/bubble": 0.35,
                "error_feedback/norm": norm,
            },
            rel=1e-6,
        )


def test_a_rank_that_does_not_record_is_left_out(pool):
    for metrics, _ in pool.run(4, gathered, 2):
        assert metrics["pipeline/utilization/1"] == pytest.approx(0.8)


def alone(rank, group):
    return pipeline_metrics({}, None, stages=2, degree=4, group=group)


def test_metrics_without_a_value_are_left_out(pool):
    assert pool.run(4, alone) == [{}] * 4
