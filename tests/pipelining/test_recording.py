"""The recorded spans: each action once, in order, with the right weights."""

import pytest
import torch

from tests.pipelining.test_schedule import build
from tests.support.processes import Pools, WorkerPool
from tests.support.recurrence import build_blocks, build_data, run_batch
from titan_async.pipelining.recording import COMPUTE_KINDS, FORWARD_KINDS, GRADIENT_KINDS, Kind


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    return pools(3)


class SpanRecorder:
    """Keeps spans, each with the sum of the module's weights when it begins."""

    def __init__(self, module):
        self.module, self.open, self.spans = module, [], []

    def begin(self, kind, stage, batch=None, microbatch=None, version=None):
        weights = sum(p.detach().double().sum() for p in self.module.parameters()).item()
        self.open.append((kind, stage, batch, microbatch, version, weights))

    def end(self):
        self.spans.append(self.open.pop())


def watched(rank, group, m, drained_after, shards, overlap):
    """Six batches, each of whose updates adds 1 to the weights, with some drains."""
    module = build_blocks(group.size())[rank]
    if shards:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(module, mesh=DeviceMesh("cpu", [rank]), reshard_after_forward=False)
    stage, schedule = build(rank, group, m, module=module, overlap=overlap)
    schedule.recorder = recorder = SpanRecorder(module)
    inputs, targets = build_data(6, m)
    delays, versions = [], []

    def update():
        if schedule.gradient_ready:
            delays.append(schedule.delay)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(1.0)
                    parameter.grad = None
            versions.append(sum(p.detach().sum() for p in module.parameters()).item())

    versions.append(sum(p.detach().sum() for p in module.parameters()).item())
    for b in range(6):
        run_batch(schedule.step, stage, inputs[b], targets[b])
        update()
        if b in drained_after and schedule.drain():
            update()
    if schedule.drain():
        update()
    assert recorder.open == []
    return recorder.spans, delays, versions


@pytest.mark.parametrize("shards", [False, True], ids=["plain", "fsdp"])
@pytest.mark.parametrize("drained_after", [(), (1, 4)], ids=["", "drained"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "pairs"])
def test_spans_match_the_actions_of_the_stage(pool, drained_after, shards, overlap):
    d, m = 3, 6 if overlap else 4
    for rank, (spans, delays, versions) in enumerate(pool.run(d, watched, m, drained_after, shards, overlap)):
        compute = [(kind, batch, micro) for kind, _, batch, micro, _, _ in spans if kind in COMPUTE_KINDS]
        forwards = [(batch, micro) for kind, batch, micro in compute if kind in FORWARD_KINDS]
        in_flight = 2 * (d - 1 - rank) + 1
        backwards = [
            divmod(batch * m + micro - in_flight, m) if kind is Kind.OVERLAP else (batch, micro)
            for kind, batch, micro in compute
            if kind in GRADIENT_KINDS
        ]
        pairs = [batch for kind, batch, _ in compute if kind is Kind.OVERLAP]
        # Only forwards fill an empty pipeline.
        alone = [in_flight if b == 0 or b - 1 in drained_after else 0 for b in range(6)]
        if not shards:  # FSDP may gather a batch's weights in its first forward, which then is in no pair
            assert pairs == ([b for b in range(6) for _ in range(m - alone[b])] if overlap else [])
        assert forwards == backwards == [(b, micro) for b in range(6) for micro in range(m)]
        for kind, stage, batch, _, version, weights in spans:
            assert stage == rank
            # The recurrence, in the weights that the module really has.
            assert version == max(batch - 1, 0)
            if kind in COMPUTE_KINDS and not shards:
                assert weights == pytest.approx(versions[version], abs=1e-9)
        assert delays == [0, 1, 1, 1, 1, 1]
        reduced = [batch for kind, _, batch, _, _, _ in spans if kind is Kind.REDUCE]
        gathered = [batch for kind, _, batch, _, _, _ in spans if kind is Kind.GATHER]
        assert reduced == gathered == list(range(6))
        waits = [(batch, micro) for kind, _, batch, micro, _, _ in spans if kind is Kind.RECEIVE]
        # A stage in the middle waits for an activation and for a gradient of each microbatch.
        expected = [(b, micro) for b in range(6) for micro in range(m)] * (2 if rank == 1 else 1)
        assert sorted(waits) == sorted(expected)


def resumed(rank, group):
    """The versions of a schedule that has loaded older weights than the module's."""
    stage, schedule = build(rank, group, 2)
    inputs, targets = build_data(3, 2)
    schedule.recorder = recorder = SpanRecorder(stage.submod)
    older = {name: value.detach() - 1.0 for name, value in stage.submod.named_parameters()}
    schedule.load_state_dict(older)
    for b in range(3):
        run_batch(schedule.step, stage, inputs[b], targets[b])
    schedule.drain()
    return {(batch, version) for _, _, batch, _, version, _ in recorder.spans}


def test_weights_from_before_the_schedule_are_an_update_behind(pool):
    for versions in pool.run(2, resumed):
        assert versions == {(0, -1), (1, 0), (2, 1)}


def evaluated(rank, group):
    stage, schedule = build(rank, group, 2)
    schedule.recorder = recorder = SpanRecorder(stage.submod)
    inputs, targets = build_data(1, 2)
    with torch.no_grad():
        run_batch(schedule.eval, stage, inputs[0], targets[0])
    return recorder.spans


def test_evaluations_are_not_recorded(pool):
    assert pool.run(2, evaluated) == [[], []]
