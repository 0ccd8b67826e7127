"""`ScheduleAsync2BW.delay_updates`: synchronous batches before, between and after delayed ones."""

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

from tests.pipelining.test_recurrence import difference, expected, pipeline
from tests.pipelining.test_schedule import build
from tests.support.processes import Pools, WorkerPool
from tests.support.recurrence import build_blocks, build_data, loss_fn, run_batch
from tests.support.selection import slow
from titan_async.optim import ErrorFeedback
from titan_async.pipelining import ScheduleAsync2BW

TEN = 10


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    return pools(4)


@pytest.mark.parametrize("switch", range(TEN + 1))
@pytest.mark.parametrize("d", [2, 4])
def test_a_switch_at_any_batch_equals_the_recurrence(pool: WorkerPool, d: int, switch: int) -> None:
    synchronous = range(switch)
    results = pool.run(d, pipeline, "adamw", d + 1, batches=TEN, synchronous=synchronous)
    assert difference(results, expected(d, d + 1, "adamw", TEN, synchronous=synchronous)) < 1e-12
    # It must differ from the recurrences of a switch one batch earlier or later. One delayed batch at the end
    # is as good as synchronous.
    for other in {switch - 1, switch + 1} & set(range(TEN)) - {TEN - 1}:
        assert difference(results, expected(d, d + 1, "adamw", TEN, synchronous=range(other))) > 1e-6


def test_ten_synchronous_batches_equal_a_loop_without_delay(pool: WorkerPool) -> None:
    results = pool.run(4, pipeline, "muon", 6, batches=TEN, synchronous=range(TEN), recompute=True)
    assert difference(results, expected(4, 6, "muon", TEN, delay=0)) < 1e-12


@pytest.mark.parametrize(
    ("overlap", "m", "lookahead", "late_on"),
    [(False, 8, 4, ()), (False, 8, 2, range(4)), (True, 9, 2, ()), slow(True, 8, 0, range(4))],
    ids=str,
)
def test_lookahead_pairs_and_late_receives_change_nothing(
    pool: WorkerPool, overlap: bool, m: int, lookahead: int, late_on: tuple[int, ...]
) -> None:
    results = pool.run(
        4, pipeline, "adamw", m, overlap=overlap, lookahead=lookahead, late_on=late_on, synchronous=(0, 1, 2)
    )
    assert difference(results, expected(4, m, "adamw", synchronous=(0, 1, 2))) < 1e-12


@pytest.mark.parametrize("synchronous", [(3,), (2, 3), slow((1, 4)), (5,)], ids=str)
@pytest.mark.parametrize("d", [slow(1), 2, slow(4)])
def test_a_drain_lets_synchronous_batches_come_later(
    pool: WorkerPool, d: int, synchronous: tuple[int, ...]
) -> None:
    results = pool.run(d, pipeline, "adamw", d, synchronous=synchronous, drain_after=(1,), recompute=True)
    assert difference(results, expected(d, d, "adamw", synchronous=synchronous)) < 1e-12


def test_drains_and_evaluations_change_nothing(pool: WorkerPool) -> None:
    results = pool.run(
        4, pipeline, "sgd", 5, synchronous=range(3), drain_after=(1, 2), evaluate_after=(0, 2, 3)
    )
    assert difference(results, expected(4, 5, "sgd", synchronous=range(3))) < 1e-12


def own_loop(rank, group, switch):
    """This stage's weights after the loop of docs/loop.md, whose first `switch` batches are synchronous."""
    module = torch.nn.Sequential()
    module.add_module(str(rank), build_blocks(2)[rank])
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), group=group)
    schedule = ScheduleAsync2BW(stage, 3, loss_fn=loss_fn)
    optimizer = ErrorFeedback(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    for batch, (x, y) in enumerate(zip(*build_data(TEN, 3), strict=True)):
        schedule.delay_updates = batch >= switch
        optimizer.feedback_paused = batch < switch
        run_batch(schedule.step, stage, x, y)
        if schedule.gradient_ready:
            schedule.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
    if schedule.drain():
        schedule.clip_grad_norm_(0.1)
        optimizer.step()
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def by_hand(switch: int) -> dict[str, torch.Tensor]:
    """The same weights on one process, by the formulas of the recurrence, momentum and correction."""
    model = torch.nn.Sequential(*build_blocks(2))
    parameters = dict(model.named_parameters())
    history = [{name: p.detach().clone() for name, p in parameters.items()}]
    momentum = {name: torch.zeros_like(p) for name, p in parameters.items()}
    last: dict[str, torch.Tensor] | None = None
    for batch, (x, y) in enumerate(zip(*build_data(TEN, 3), strict=True)):
        model.load_state_dict(history[batch if batch < switch else max(batch - 1, switch)])
        model.zero_grad()
        (sum(loss_fn(model(one), target) for one, target in zip(x, y, strict=True)) / 3).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        momentum = {name: 0.9 * m + parameters[name].grad for name, m in momentum.items()}
        moved = {name: -0.1 * m for name, m in momentum.items()}
        correction = {name: m - last[name] if last else torch.zeros_like(m) for name, m in moved.items()}
        history.append({name: w + moved[name] + correction[name] for name, w in history[-1].items()})
        last = moved if batch >= switch else None
    return history[-1]


@pytest.mark.parametrize("switch", [0, 1, 4, 9])
def test_feedback_begins_with_the_delay(pool: WorkerPool, switch: int) -> None:
    expected = by_hand(switch)
    found = {name: p for stage in pool.run(2, own_loop, switch) for name, p in stage.items()}
    assert found.keys() == expected.keys()
    assert max(float((p - expected[name]).abs().max()) for name, p in found.items()) < 1e-12
    other = by_hand(switch + 1 if switch < 8 else 7)
    assert max(float((p - other[name]).abs().max()) for name, p in found.items()) > 1e-6


def attempts(rank, group):
    """The effect of turning the delay off with a batch in flight, and after a drain."""
    stage, schedule = build(rank, group, 2)
    module = stage.submod
    inputs, targets = build_data(3, 2)
    found = [schedule.delay_updates]
    run_batch(schedule.step, stage, inputs[0], targets[0])
    schedule.delay_updates = True  # changes nothing
    try:
        schedule.delay_updates = False
    except RuntimeError as error:
        found.append(str(error))
    found.append(schedule.delay_updates)
    schedule.drain()
    schedule.delay_updates = False
    with torch.no_grad():
        module.scale.add_(1.0)
    held = schedule.state_dict()["scale"]
    found.append(torch.equal(held, module.scale))  # of a batch that would be delayed
    for parameter in module.parameters():
        parameter.grad = None
    run_batch(schedule.step, stage, inputs[1], targets[1])
    found.append(torch.equal(schedule.state_dict()["scale"], module.scale))
    return found, schedule.gradient_ready, [p.grad.clone() for p in module.parameters()]


def test_the_delay_cannot_be_turned_off_over_a_batch_in_flight(pool: WorkerPool) -> None:
    message = "batches are in flight; call drain() and apply its gradient before delay_updates = False"
    whole = torch.nn.Sequential(*build_blocks(2))
    with torch.no_grad():
        for block in whole:
            block.scale.add_(1.0)
    inputs, targets = build_data(3, 2)
    sum(loss_fn(whole(x), y) for x, y in zip(inputs[1], targets[1], strict=True)).div(2).backward()
    for block, (found, ready, gradients) in zip(whole, pool.run(2, attempts), strict=True):
        assert found == [True, message, True, False, True]
        assert ready
        for parameter, gradient in zip(block.parameters(), gradients, strict=True):
            assert torch.allclose(gradient, parameter.grad, rtol=0, atol=1e-12)
