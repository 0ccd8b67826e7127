"""Buffers follow their batch: against a single-process loop of the recurrence of weights and buffers."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from tests.support.buffers import PARTS, build_parts, make_optimizer, run_recurrence, state_of
from tests.support.processes import Pools, WorkerPool
from tests.support.recurrence import build_data, loss_fn, run_batch
from tests.support.selection import slow
from tests.support.sharded import Stage, shard
from titan_async.pipelining import ScheduleAsync2BW
from titan_async.pipelining.buffer_versions import BufferVersions

BATCHES = 6
SHAPES = [(1, 1), (2, 1), (4, 1), (2, 2)]
STATISTICS = ("rows", "seen", "total", "counts", "norm.running", "norm.num")  # of one share of the data

meshes: dict[tuple[int, int], DeviceMesh] = {}


def make_meshes(rank, group):
    for shape in SHAPES:
        ranks = torch.arange(shape[0] * shape[1]).view(shape)
        meshes[shape] = DeviceMesh("cpu", ranks, mesh_dim_names=("pp", "dp"))


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    pool = pools(4)
    pool.run(4, make_meshes, keeps=True)
    return pool


class Run:
    """One rank's stage with its schedule, optimizer and data."""

    def __init__(self, shape, recompute=False, backend=None):
        pp, dp = shape
        mesh = meshes[shape]
        index, per_stage = mesh.get_local_rank("pp"), PARTS // pp
        self.module = Stage(build_parts(recompute)[index * per_stage : (index + 1) * per_stage])
        for part in self.module.children():
            if backend is not None:
                part.compile(backend=backend)
            if dp > 1:
                shard(part, mesh["dp"])
        if dp > 1:
            shard(self.module, mesh["dp"])
            for part in self.module.modules():
                if isinstance(part, FSDPModule):
                    part.set_force_sum_reduction_for_comms(True)
        self.stage = PipelineStage(self.module, index, pp, torch.device("cpu"), group=mesh.get_group("pp"))
        self.schedule = ScheduleAsync2BW(self.stage, pp + 1, loss_fn=loss_fn)
        self.optimizer = make_optimizer(self.module, mesh.get_group("dp") if dp > 1 else None)
        data = build_data(BATCHES, (pp + 1) * dp)
        self.inputs, self.targets = (tensor[:, mesh.get_local_rank("dp") :: dp] for tensor in data)

    def step(self, batch):
        losses = run_batch(self.schedule.step, self.stage, self.inputs[batch], self.targets[batch])
        self.update()
        return losses

    def drain(self):
        self.schedule.drain()
        self.update()

    def update(self):
        if self.schedule.gradient_ready:
            self.optimizer.step()
            self.optimizer.zero_grad()


def pipeline(rank, group, shape, recompute=False, backend=None, drain_after=(), hide_versions=False):
    """State, losses and the number of compiled graphs after each batch."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = Run(shape, recompute, backend)
    activate = BufferVersions.activate
    if hide_versions:
        BufferVersions.activate = lambda self, version: None
    losses, graphs = [], []
    try:
        for batch in range(BATCHES):
            losses.append(run.step(batch))
            if batch in drain_after or batch == BATCHES - 1:
                run.drain()
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    finally:
        BufferVersions.activate = activate
    return state_of(run.module), losses, graphs


def difference(results, shape, recompute=False, **oracle):
    pp, dp = shape
    state, losses = run_recurrence((pp + 1) * dp, BATCHES, recompute=recompute, **oracle)
    worst, seen = 0.0, set()
    for found, *_ in results:
        seen.update(found)
        for name, value in found.items():
            if dp == 1 or not any(word in name for word in STATISTICS):
                worst = max(worst, float((value.double() - state[name].double()).abs().max()))
    assert seen == set(state)
    for share, (_, found, _) in enumerate(results[-dp:]):
        for batch, wanted in zip(found, losses, strict=True):
            pairs = zip(batch, wanted[share::dp], strict=True)
            worst = max([worst, *(abs(a - b) for a, b in pairs)])
    return worst


@pytest.mark.covering(1)
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("shape", SHAPES)
def test_buffers_follow_the_recurrence(pool, shape, recompute):
    """A router's bias, its counts (counted again by a recomputation), integers, flags, running statistics."""
    results = pool.run(shape[0] * shape[1], pipeline, shape, recompute=recompute)
    assert difference(results, shape, recompute) < 1e-12
    assert difference(results, shape, recompute, delay=0) > 1e-4


@pytest.mark.parametrize("shape", [slow((1, 1)), (2, 1), slow((4, 1)), (2, 2)])
def test_draining_does_not_change_the_trajectory(pool, shape):
    results = pool.run(shape[0] * shape[1], pipeline, shape, recompute=True, drain_after=(0, 1, 3))
    assert difference(results, shape, recompute=True) < 1e-12


@pytest.mark.parametrize("shape", [(2, 1), slow((2, 2))])
def test_compiled_without_recompiling(pool, shape):
    results = pool.run(shape[0] * shape[1], pipeline, shape, backend="aot_eager")
    assert difference(results, shape) < 1e-12
    for _, _, graphs in results:
        assert graphs[0] > 0 and graphs[-1] == graphs[0], "a version of the buffers caused a recompilation"


@pytest.mark.parametrize("shape", [(2, 1), slow((4, 1)), (2, 2)])
def test_one_shared_set_of_buffers_fails_the_check(pool, shape):
    results = pool.run(shape[0] * shape[1], pipeline, shape, recompute=True, hide_versions=True)
    assert difference(results, shape, recompute=True) > 1e-4
    found, wanted = results[0][0], run_recurrence((shape[0] + 1) * shape[1], BATCHES, recompute=True)[0]
    weights = [name for name in found if "vectors" in name or "gate" in name]
    assert max(float((found[name] - wanted[name]).abs().max()) for name in weights) > 1e-6


def interrupted(rank, group, shape):
    """State and losses at the end of a run, and of one that resumes it in new objects."""
    first, second = Run(shape), Run(shape)
    for batch in range(3):
        first.step(batch)
    first.drain()
    saved = copy.deepcopy((first.optimizer.state_dict(), first.schedule.state_dict()))
    in_state = {name for name, _ in first.module.named_buffers() if name in first.module.state_dict()}
    assert in_state <= set(saved[1]) and not any("counts" in name for name in saved[1])
    second.module.load_state_dict({name: value.clone() for name, value in first.module.state_dict().items()})
    second.optimizer.load_state_dict(saved[0])
    second.schedule.load_state_dict(saved[1])
    ends = []
    for run in (first, second):
        losses = [run.step(batch) for batch in range(3, BATCHES)]
        run.drain()
        ends.append((state_of(run.module), losses))
    return ends


@pytest.mark.parametrize("shape", [slow((1, 1)), (4, 1), (2, 2)])
def test_a_run_resumes_bitwise_in_a_new_schedule(pool, shape):
    for (state, losses), (resumed, resumed_losses) in pool.run(shape[0] * shape[1], interrupted, shape):
        assert losses == resumed_losses
        assert all(torch.equal(state[name], resumed[name]) for name in state)
