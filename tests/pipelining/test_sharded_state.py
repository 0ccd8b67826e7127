"""Memory, collectives, shards and state of a stage under FSDP2."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import Schedule1F1B
from torch.distributed.tensor import DTensor

from tests.support.processes import Pools, WorkerPool
from tests.support.sharded import (
    BATCHES,
    make_meshes,
    prepare,
    shard_each_part,
    shard_in_bfloat16,
    train,
    whole,
)
from tests.support.sharded_oracle import difference, oracle
from titan_async.pipelining import ScheduleAsync2BW

NAMES = ("pp", "dp")


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    pool = pools(4)
    pool.run(4, make_meshes, keeps=True)
    return pool


def copies_of(run):
    """Unsharded copies of the stage's weights that are allocated, padding of uneven shards included."""
    fsdp = run.schedule._executor.versions.weights._fsdp
    one = sum(
        2 * p.padded_sharded_param_size.numel() * p.all_gather_outputs[0].element_size() for p in fsdp._params
    )
    fsdp._save()  # the active copy
    outputs = [output for copy in fsdp._copies.values() for param in copy for output in param.outputs]
    return sum(output.untyped_storage().nbytes() for output in outputs) / one


def memory(rank, group, wrap, **model):
    run = prepare(wrap, NAMES, **model)
    copies = []
    for batch in range(BATCHES):
        run.step(batch)
        copies.append(copies_of(run))
        run.update()
        if batch == 2:
            by_hand(run)
    run.schedule.drain()
    copies.append(copies_of(run))
    run.update()
    return run.stage.is_last, copies


def by_hand(run):
    """A forward outside of the schedule, while microbatches are in flight."""
    with torch.no_grad():
        run.module(run.inputs[0, 0].to(next(run.module.parameters()).dtype))


@pytest.mark.parametrize(
    ("wrap", "dtype"), [(shard_each_part, torch.float64), (shard_in_bfloat16, torch.float32)]
)
def test_two_unsharded_copies_and_one_on_the_last_stage(pool, wrap, dtype):
    """None after a drain. A forward by hand leaves no third one behind."""
    for is_last, copies in pool.run(4, memory, wrap, dtype=dtype):
        assert copies == [1, *[1 if is_last else 2] * (BATCHES - 1), 0]


def count_collectives(rank, group, schedule_class):
    """All-gathers and reduce-scatters of each of a few batches."""
    run = prepare(shard_each_part, NAMES, schedule_class=schedule_class)
    counts, batches = {"all_gather_single": 0, "reduce_scatter_single": 0}, []
    originals = {name: getattr(dist, name) for name in counts}

    def counted(name):
        def collective(*args, **kwargs):
            counts[name] += 1
            return originals[name](*args, **kwargs)

        return collective

    run.step(0)  # in which torch infers shapes by another forward
    try:
        for name in counts:
            setattr(dist, name, counted(name))
        for batch in range(1, BATCHES):
            before = list(counts.values())
            run.step(batch)
            run.optimizer.step()
            run.optimizer.zero_grad()
            batches.append([after - b for after, b in zip(counts.values(), before, strict=True)])
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    if schedule_class is not Schedule1F1B:
        run.schedule.drain()
    return len(list(run.module.children())), batches


def test_as_many_collectives_as_synchronous_training(pool):
    """One all-gather and one reduce-scatter per batch for each group of parameters."""
    synchronous = pool.run(4, count_collectives, Schedule1F1B)
    for overlap in (False, True):
        delayed = pool.run(4, count_collectives, partial(ScheduleAsync2BW, overlap=overlap))
        assert delayed == synchronous
        for groups, batches in delayed:
            assert batches == [[groups, groups]] * (BATCHES - 1)


def look_between(run):
    """With batches in flight, as after a drain, the module has only its shards."""
    for named in (run.module.named_parameters(), run.module.state_dict().items()):
        for name, value in named:
            assert isinstance(value, DTensor), name
            assert value.placements[0].is_shard(), name
    by_hand(run)
    for name, value in run.module.state_dict().items():
        assert isinstance(value, DTensor), name
    by_hand(run)


def test_reading_a_module_with_batches_in_flight_has_no_effect(pool):
    """Shards between steps; neither a state_dict nor a forward by hand changes the trajectory."""
    results = pool.run(4, train, shard_each_part, NAMES, between=look_between)
    assert difference(results, 2, oracle(2)) < 1e-12


def interrupted(rank, group):
    """Weights and losses at the end of a run, and of one that resumes it in new objects."""
    first = prepare(shard_each_part, NAMES)
    for batch in range(3):
        first.step(batch)
        first.update()
    first.schedule.drain()
    first.update()
    saved = {
        "module": {name: value.clone() for name, value in first.module.state_dict().items()},
        "optimizer": copy.deepcopy(first.optimizer.state_dict()),
        "schedule": {name: value.clone() for name, value in first.schedule.state_dict().items()},
    }
    assert all(isinstance(value, DTensor) for value in saved["schedule"].values())
    assert set(saved["schedule"]) == set(saved["module"])
    ends = []
    second = prepare(shard_each_part, NAMES)
    with torch.no_grad():
        for parameter in second.module.parameters():
            parameter.zero_()
    second.module.load_state_dict(saved["module"])
    second.optimizer.load_state_dict(saved["optimizer"])
    second.schedule.load_state_dict(saved["schedule"])
    for run in (first, second):
        losses = []
        for batch in range(3, BATCHES):
            losses.append(run.step(batch))
            run.update()
        run.schedule.drain()
        run.update()
        ends.append((whole(run.module), losses))
    older = not all(
        torch.equal(saved["schedule"][name].to_local(), value.to_local())
        for name, value in saved["module"].items()
    )
    return ends, older


def test_a_run_resumes_bitwise_in_a_new_schedule(pool):
    """From weights, optimizer state, and the next batch's weights, which are one update older."""
    results = pool.run(4, interrupted)
    for ((weights, losses), (resumed, resumed_losses)), _ in results:
        assert losses == resumed_losses
        assert all(torch.equal(weights[name], resumed[name]) for name in weights) and weights
    assert any(older for _, older in results)
    weights, losses, _ = oracle(2)
    assert difference([(*ends[0], []) for ends, _ in results], 2, (weights, losses[3:], [])) < 1e-12
