"""ScheduleAsync2BW with FSDP2 in each stage against a single-process loop of the recurrence.

{1, 2, 4 stages} x {1, 2 shards} x activation checkpointing x compilation x clipping.
"""

import itertools

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage

from tests.support.processes import Pools, WorkerPool
from tests.support.recurrence import build_blocks, build_data, loss_fn, run_batch, run_recurrence
from tests.support.selection import slow
from tests.support.sharded import Stage, whole
from titan_async.pipelining import ScheduleAsync2BW
from titan_async.pipelining._fsdp_internals import FsdpParameters
from titan_async.pipelining.sharded_versions import ShardedVersions

BLOCKS = 4
BATCHES = 5
MAX_NORM = 0.05  # clips every batch
SHAPES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)]
RECOMPUTE = {"none": False, "selective": "selective", "full": True}

meshes: dict[tuple[int, ...], DeviceMesh] = {}


def make_meshes(rank, group):
    """All ranks create each group, also those that are not in it."""
    for pp, dp in SHAPES:
        meshes[pp, dp] = DeviceMesh("cpu", torch.arange(pp * dp).view(pp, dp), mesh_dim_names=("pp", "dp"))
    meshes[2, 2, 2] = DeviceMesh(
        "cpu", torch.arange(8).view(2, 2, 2), mesh_dim_names=("pp", "replicate", "shard")
    )


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    pool = pools(8)
    pool.run(8, make_meshes, keeps=True)
    return pool


def build(pp, mesh, shard_mesh, m, recompute=False, backend=None, overlap=False):
    index = mesh.get_local_rank("pp")
    blocks = build_blocks(BLOCKS, recompute=recompute, travels=overlap)
    per_stage = BLOCKS // pp
    module = Stage((str(i), blocks[i]) for i in range(index * per_stage, (index + 1) * per_stage))
    for block in module.children():
        if backend is not None:
            block.compile(backend=backend)
        fully_shard(block, mesh=shard_mesh, reshard_after_forward=False)
    fully_shard(module, mesh=shard_mesh, reshard_after_forward=False)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)
    stage = PipelineStage(module, index, pp, torch.device("cpu"), group=mesh.get_group("pp"))
    lookahead = 0 if overlap else min(pp - 1, m - pp)
    return stage, ScheduleAsync2BW(stage, m, loss_fn=loss_fn, lookahead=lookahead, overlap=overlap)


def pipeline(
    rank, group, pp, dp, m, recompute=False, backend=None, clip=False, drain_after=(), evaluate_after=(),
    break_it=None, overlap=False, synchronous=(),
):  # fmt: skip
    """Weights of this rank's stage after all updates, its losses, norms, and the number of graphs by step."""
    if backend is not None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    mesh = meshes[pp, dp]
    shard = mesh.get_local_rank("dp")
    stage, schedule = build(pp, mesh, mesh["dp"], m, recompute, backend, overlap)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=0.05)
    inputs, targets = build_data(BATCHES, m * dp)
    inputs, targets = inputs[:, shard::dp], targets[:, shard::dp]
    losses, norms, graphs = [], [], []
    undo = break_it() if break_it else None

    def update():
        if schedule.gradient_ready:
            if clip:
                norms.append(schedule.clip_grad_norm_(MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()

    try:
        for b in range(BATCHES):
            if b in synchronous and schedule.drain():
                update()
            schedule.delay_updates = b not in synchronous
            losses.append(run_batch(schedule.step, stage, inputs[b], targets[b]))
            update()
            if b in drain_after or b in evaluate_after or b == BATCHES - 1:
                schedule.drain()
                update()
            if b in evaluate_after:
                with torch.no_grad():
                    run_batch(schedule.eval, stage, inputs[b], targets[b])
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    finally:
        if undo is not None:
            undo()
    return whole(stage.submod), losses, norms, graphs


def expected(dp, m, clip=False, delay=1, synchronous=()):
    def adamw(module):
        return torch.optim.AdamW(module.parameters(), lr=0.05)

    max_norm = MAX_NORM if clip else None
    return run_recurrence(
        BLOCKS, m * dp, BATCHES, adamw, delay=delay, max_norm=max_norm, synchronous=synchronous
    )


def difference(results, dp, oracle):
    weights, losses = oracle
    worst, seen = 0.0, set()
    for found, *_ in results:
        for name, value in found.items():
            seen.add(name)
            worst = max(worst, float((value - weights[name]).abs().max()))
    assert seen == set(weights)
    for shard, (_, found, *_) in enumerate(results[-dp:]):
        for batch, wanted in zip(found, losses, strict=True):
            pairs = zip(batch, wanted[shard::dp], strict=True)
            worst = max(worst, max(abs(a - b) for a, b in pairs))
    return worst


# Each value of each option; compilation, which takes most of the time, at small shapes.
DEFAULT = [
    ((1, 1), "none", None, False),
    ((1, 2), "selective", "aot_eager", True),
    ((2, 1), "full", None, False),
    ((2, 2), "full", "aot_eager", True),
    ((4, 1), "selective", None, False),
    ((4, 2), "full", None, True),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("shape", "recompute", "backend", "clip"),
    [
        case if case in DEFAULT else slow(*case)
        for case in itertools.product(SHAPES, RECOMPUTE, (None, "aot_eager"), (False, True))
    ],
    ids=str,
)
def test_weights_and_losses_equal_the_recurrence(pool, shape, recompute, backend, clip):
    pp, dp = shape
    m = pp + 1
    results = pool.run(
        pp * dp, pipeline, pp, dp, m, recompute=RECOMPUTE[recompute], backend=backend, clip=clip
    )
    assert difference(results, dp, expected(dp, m, clip)) < 1e-12
    assert difference(results, dp, expected(dp, m, clip, delay=0)) > 1e-4
    for _, _, norms, graphs in results:
        assert graphs[-1] == graphs[0], "a weight version caused a recompilation"
        assert norms == results[0][2] and len(norms) == (BATCHES if clip else 0)


@pytest.mark.parametrize("shape", [slow(shape) if 1 in shape else shape for shape in SHAPES])
def test_draining_and_evaluating_do_not_change_the_trajectory(pool, shape):
    pp, dp = shape
    results = pool.run(pp * dp, pipeline, pp, dp, pp, drain_after=(0, 1), evaluate_after=(1, 2))
    assert difference(results, dp, expected(dp, pp)) < 1e-12


@pytest.mark.parametrize(
    ("shape", "recompute"),
    [
        slow((1, 2), "none"),
        ((2, 2), "full"),
        slow((2, 2), "none"),
        slow((4, 1), "full"),
        ((4, 2), "selective"),
    ],
    ids=str,
)
def test_overlapped_pairs_equal_the_recurrence(pool, shape, recompute):
    pp, dp = shape
    m = 2 * pp - 1
    options = {"recompute": RECOMPUTE[recompute], "clip": True, "drain_after": (1,), "evaluate_after": (2,)}
    results = pool.run(pp * dp, pipeline, pp, dp, m, overlap=True, **options)
    assert difference(results, dp, expected(dp, m, clip=True)) < 1e-12


@pytest.mark.parametrize(
    ("shape", "synchronous"),
    [((2, 2), (0,)), ((2, 2), (0, 1, 2)), ((4, 2), (0, 1)), slow((2, 2), (2, 3)), slow((4, 1), range(5))],
    ids=str,
)
def test_a_synchronous_start_equals_the_recurrence(pool, shape, synchronous):
    pp, dp = shape
    options = {"recompute": True, "clip": True, "evaluate_after": (0, 1, 3)}
    results = pool.run(pp * dp, pipeline, pp, dp, pp + 1, synchronous=synchronous, **options)
    assert difference(results, dp, expected(dp, pp + 1, clip=True, synchronous=synchronous)) < 1e-12
    assert difference(results, dp, expected(dp, pp + 1, clip=True)) > 1e-6


def one_shared_copy():
    gather, activate = FsdpParameters.gather, FsdpParameters.activate
    FsdpParameters.gather = lambda self, copy: gather(self, 0)
    FsdpParameters.activate = lambda self, copy: activate(self, None if copy is None else 0)

    def undo():
        FsdpParameters.gather, FsdpParameters.activate = gather, activate

    return undo


def reshard_at_the_boundary():
    """Frees and regathers the weights of microbatches in flight, as torch does after a batch."""
    begin_batch = ShardedVersions.begin_batch

    def begin_and_gather(self):
        if self._stashed is not None:
            self._fsdp.gather(self._stashed)  # the shards are one update further by now
            self._fsdp.finish_gather()
        return begin_batch(self)

    ShardedVersions.begin_batch = begin_and_gather

    def undo():
        ShardedVersions.begin_batch = begin_batch

    return undo


@pytest.mark.covering(1)
@pytest.mark.parametrize("broken", [one_shared_copy, reshard_at_the_boundary])
@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (4, 2)])
def test_mixed_versions_fail_the_check(pool, shape, broken):
    pp, dp = shape
    results = pool.run(pp * dp, pipeline, pp, dp, pp, break_it=broken)
    assert difference(results, dp, expected(dp, pp)) > 1e-6
