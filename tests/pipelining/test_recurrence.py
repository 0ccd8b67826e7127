"""ScheduleAsync2BW against a single-process loop of the recurrence, over real processes."""

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

from tests.support.delay import Several
from tests.support.processes import Pools, WorkerPool
from tests.support.recurrence import build_blocks, build_data, loss_fn, run_batch, run_recurrence
from tests.support.selection import slow
from titan_async.optim import Muon
from titan_async.pipelining import ScheduleAsync2BW
from titan_async.pipelining.weight_versions import WeightVersions

BATCHES = 6


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def fused_adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=0.05, fused=True)


def muon_and_adamw(module, compute_dtype):
    """Muon for the matrices, AdamW for the vectors."""
    matrices = [p for p in module.parameters() if p.ndim == 2]
    vectors = [p for p in module.parameters() if p.ndim < 2]
    muon = Muon(matrices, lr=0.05, compute_dtype=compute_dtype)
    return Several(muon, torch.optim.AdamW(vectors, lr=0.05))


def muon(module):
    return muon_and_adamw(module, torch.float64)


def bfloat16_muon(module):
    return muon_and_adamw(module, torch.bfloat16)


OPTIMIZERS = {
    "sgd": sgd,
    "adamw": adamw,
    "fused_adamw": fused_adamw,
    "muon": muon,
    "bfloat16_muon": bfloat16_muon,
}
# The pipeline sums gradients in another order; bfloat16 iterations may round such a difference up.
TOLERANCE = dict.fromkeys(OPTIMIZERS, 1e-12) | {"bfloat16_muon": 1e-6}


def pipeline(
    rank,
    group,
    optimizer,
    n_microbatches,
    batches=BATCHES,
    backend=None,
    recompute=False,
    lookahead=None,
    drain_after=(),
    evaluate_after=(),
    share_one_buffer=False,
    late_on=(),
    overlap=False,
    synchronous=(),
):
    """Train on this rank's stage; returns its weights, the losses, and the compiled graphs it made."""
    num_stages = group.size()
    if lookahead is None:
        lookahead = 0 if overlap else min(num_stages - 1, n_microbatches - num_stages)
    blocks = build_blocks(num_stages, recompute=recompute, travels=overlap)
    module = torch.nn.Sequential()
    module.add_module(str(rank), blocks[rank])
    torch._dynamo.reset()
    if backend:
        blocks[rank].compile(backend=backend)
    stage = PipelineStage(module, rank, num_stages, torch.device("cpu"), group=group)
    early = False if rank in late_on else None
    schedule = ScheduleAsync2BW(
        stage,
        n_microbatches,
        loss_fn=loss_fn,
        lookahead=lookahead,
        early_receives=early,
        overlap=overlap,
    )
    update = OPTIMIZERS[optimizer](module)
    inputs, targets = build_data(batches, n_microbatches)
    stash = WeightVersions.stash
    if share_one_buffer:
        WeightVersions.stash = lambda self, version: None
    losses, graphs = [], []

    def apply_gradient():
        if schedule.gradient_ready:
            update.step()
            update.zero_grad()
        else:
            assert all(p.grad is None for p in module.parameters())

    try:
        for b in range(batches):
            if b in synchronous and schedule.drain():
                apply_gradient()
            schedule.delay_updates = b not in synchronous
            losses.append(run_batch(schedule.step, stage, inputs[b], targets[b]))
            if b in synchronous:
                assert schedule.gradient_ready and schedule.delay == 0
            apply_gradient()
            if b in drain_after or b in evaluate_after or b == batches - 1:
                assert schedule.drain() == (b not in synchronous)
                apply_gradient()
                assert not schedule.drain()
            if b in evaluate_after:
                with torch.no_grad():
                    run_batch(schedule.eval, stage, inputs[b], targets[b])
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    finally:
        WeightVersions.stash = stash
    return {k: v.clone() for k, v in module.state_dict().items()}, losses, graphs


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    return pools(4)


def difference(results, expected):
    weights, losses = expected
    worst = 0.0
    seen = set()
    for found, _, _ in results:
        for name, value in found.items():
            seen.add(name)
            worst = max(worst, float((value - weights[name]).abs().max()))
    assert seen == set(weights)
    for found, wanted in zip(results[-1][1], losses, strict=True):
        assert len(found) == len(wanted)
        worst = max(worst, max(abs(a - b) for a, b in zip(found, wanted, strict=True)))
    return worst


def expected(num_stages, m, optimizer, batches=BATCHES, delay=1, synchronous=()):
    return run_recurrence(num_stages, m, batches, OPTIMIZERS[optimizer], delay=delay, synchronous=synchronous)


SHAPES = [(d, m) for d in (1, 2, 4) for m in sorted({d, d + 1, 8})]


# The schedule does not depend on the optimizer: each is tested, but not at every shape.
@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_and_losses_equal_the_recurrence(pool, optimizer, shape):
    d, m = shape
    results = pool.run(d, pipeline, optimizer, m)
    assert difference(results, expected(d, m, optimizer)) < TOLERANCE[optimizer]
    assert difference(results, expected(d, m, optimizer, delay=0)) > 1e-4


@pytest.mark.parametrize("optimizer", [slow(name) if name != "fused_adamw" else name for name in OPTIMIZERS])
@pytest.mark.parametrize("d", [slow(1), 2, slow(4)])
def test_compiled_equals_the_recurrence_without_recompiling(pool, d, optimizer):
    m = d + 1
    results = pool.run(d, pipeline, optimizer, m, batches=8, backend="aot_eager")
    assert difference(results, expected(d, m, optimizer, batches=8)) < TOLERANCE[optimizer]
    for _, _, graphs in results:
        assert graphs[-1] == graphs[0], "a weight version caused a recompilation"


def test_compiled_by_inductor_equals_the_recurrence(pool):
    results = pool.run(2, pipeline, "fused_adamw", 3, backend="inductor", timeout=300)
    assert difference(results, expected(2, 3, "fused_adamw")) < 1e-12


@pytest.mark.parametrize("d", [2, 4])
def test_recomputation_sees_the_weights_of_its_forward(pool, d):
    results = pool.run(d, pipeline, "fused_adamw", d, recompute=True)
    assert difference(results, expected(d, d, "fused_adamw")) < 1e-12


@pytest.mark.covering(1)
@pytest.mark.parametrize("d", [1, 2, 4])
@pytest.mark.parametrize("stops", [(0,), (1,), (2, 3), (0, 1, 2, 3, 4)])
def test_draining_does_not_change_the_trajectory(pool, d, stops):
    results = pool.run(d, pipeline, "adamw", d, drain_after=stops)
    assert difference(results, expected(d, d, "adamw")) < 1e-12


@pytest.mark.parametrize("d", [slow(1), slow(2), 4])
def test_evaluating_does_not_change_the_trajectory(pool, d):
    results = pool.run(d, pipeline, "sgd", d + 1, evaluate_after=(1, 2))
    assert difference(results, expected(d, d + 1, "sgd")) < 1e-12


@pytest.mark.parametrize("late_on", [range(4), slow((1, 3)), slow((0, 2))])
def test_late_receives_change_nothing(pool, late_on):
    results = pool.run(4, pipeline, "adamw", 5, late_on=late_on, drain_after=(1,), evaluate_after=(2,))
    assert difference(results, expected(4, 5, "adamw")) < 1e-12


@pytest.mark.covering(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("d", [2, 4])
def test_one_shared_weight_buffer_fails_the_check(pool, d, optimizer):
    results = pool.run(d, pipeline, optimizer, d, share_one_buffer=True)
    assert difference(results, expected(d, d, optimizer)) > 1e-6


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 3), (2, 4), (4, 7), (4, 8)])
@pytest.mark.parametrize("recompute", [False, True, "selective"])
def test_overlapped_pairs_equal_the_recurrence(pool, shape, recompute):
    d, m = shape
    results = pool.run(d, pipeline, "adamw", m, recompute=recompute, overlap=True, drain_after=(1,))
    assert difference(results, expected(d, m, "adamw")) < 1e-12


@pytest.mark.parametrize("late_on", [(), slow(range(4)), (1, 3)])
def test_overlapped_pairs_with_lookahead_and_evaluation_equal_the_recurrence(pool, late_on):
    results = pool.run(
        4, pipeline, "adamw", 9, overlap=True, lookahead=2, late_on=late_on, evaluate_after=(1, 2)
    )
    assert difference(results, expected(4, 9, "adamw")) < 1e-12
