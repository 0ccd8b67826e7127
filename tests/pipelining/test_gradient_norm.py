"""`clip_grad_norm_`: one norm of all stages, of the right batch, whose all-reduce starts before the call.

Under sharding, replication and tensor parallelism `test_sharded_modes.py` compares it with the whole model's.
"""

import math

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from tests.support.processes import Pools, WorkerPool
from tests.support.sharded import EVERY, make_meshes, meshes, prepare, shard, train
from tests.support.sharded_oracle import difference, oracle
from titan_async.local_tensors import local_part
from titan_async.pipelining import ScheduleAsync2BW
from titan_async.pipelining.execution import Executor
from titan_async.pipelining.gradient_norm import NormReducer, share_of_squares

PLAIN, FOUR, SHARDED = ("pp",), ("pp", "one"), ("pp", "dp")


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    pool = pools(4)
    pool.run(4, make_meshes, keeps=True)
    return pool


def plain(stage, mesh):
    pass


def sharded(stage, mesh):
    for part in [*stage.children(), stage]:
        shard(part, mesh["dp"])


WRAPS = {PLAIN: (2, plain, 1), FOUR: (4, plain, 1), SHARDED: (4, sharded, 2)}


class Shift(nn.Module):
    """Adds a multiple of its only parameter."""

    def __init__(self, factor):
        super().__init__()
        self.factor, self.shift = factor, nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.factor * self.shift


def two_stages(rank, module, loss_fn, m=2):
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), group=meshes[PLAIN].get_group())
    return ScheduleAsync2BW(stage, m, loss_fn=loss_fn)


def feed(schedule, x):
    stage = schedule._stage
    schedule.step(*((x,) if stage.is_first else ()), target=x if stage.is_last else None)


def three_and_four(rank, group, max_norm):
    module = Shift(0.75 if rank == 0 else 1.0)
    schedule = two_stages(rank, module, lambda output, target: 4 * output.mean())
    results = []
    for _ in range(3):
        feed(schedule, torch.ones(4, 1))
        if schedule.gradient_ready:
            before = module.shift.grad.item()
            norm = schedule.clip_grad_norm_(max_norm)
            assert norm.dtype == torch.float64 and schedule.gradient_is_finite()
            results.append((norm.item(), before, module.shift.grad.item()))
            module.shift.grad = None
    schedule.drain()
    return results


@pytest.mark.parametrize(("max_norm", "factor"), [(1.0, 0.2), (10.0, 1.0), (math.inf, 1.0)])
def test_stages_are_clipped_together(pool, max_norm, factor):
    """Norms of 3 and 4 make 5, on both stages; without a bound it is only measured."""
    for wanted, results in zip((3.0, 4.0), pool.run(2, three_and_four, max_norm), strict=True):
        for norm, before, after in results:
            assert (norm, before) == (5.0, wanted)
            assert after == pytest.approx(factor * wanted, rel=1e-6)
        assert len(results) == 2


def norms_of_what_is_there(rank, group, names, leftover):
    """Norms, and the squares of this rank's `.grad` when it is clipped, if it is not cleared to None.

    With `leftover` the gradient of a parameter outside of the optimizer accumulates on the first stage.
    """
    _, wrap, _ = WRAPS[names]
    run = prepare(wrap, names)
    trained = list(run.module.parameters())
    if leftover and run.schedule._stage.is_first:
        trained = trained[1:]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    seen = []
    for batch in range(5):
        run.step(batch)
        if batch == 4:
            optimizer.zero_grad(set_to_none=False)
            run.schedule.drain()
        if run.schedule.gradient_ready:
            grads = {name: parameter.grad for name, parameter in run.module.named_parameters()}
            squares = sum(getattr(g, "full_tensor", lambda g=g: g)().square().sum() for g in grads.values())
            before = {name: local_part(gradient).clone() for name, gradient in grads.items()}
            norm = run.schedule.clip_grad_norm_(0.01)
            scaled = all(
                torch.allclose(local_part(grads[name]), 0.01 / norm * before[name], rtol=1e-3)
                for name in grads
            )
            seen.append((norm.item(), squares.item(), scaled))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return seen


@pytest.mark.parametrize("leftover", [False, True])
@pytest.mark.parametrize("names", [PLAIN, SHARDED])
def test_the_norm_is_that_of_all_gradients_in_grad(pool, names, leftover):
    """After `zero_grad(set_to_none=False)`, and with gradients that no optimizer uses."""
    ranks, _, shares = WRAPS[names]
    results = pool.run(ranks, norms_of_what_is_there, names, leftover)
    stages = results[::shares]
    for batch in range(5 - 1):
        whole = math.sqrt(sum(seen[batch][1] for seen in stages))
        for seen in results:
            assert seen[batch][0] == pytest.approx(whole, rel=1e-6)
            assert seen[batch][2]


@pytest.mark.covering(1)
@pytest.mark.parametrize("clip", [EVERY, (2, 3, 4), (0, 2, 4), (4,)], ids=str)
@pytest.mark.parametrize("names", WRAPS)
def test_clipped_training_equals_the_recurrence(pool, names, clip):
    """Whichever batches are clipped; the first clip creates the group."""
    size, wrap, shares = WRAPS[names]
    results = pool.run(size, train, wrap, names, clip=clip)
    assert difference(results, shares, oracle(shares, clip=clip), size // shares) < 1e-12


def norm_of_the_batch_before():
    publish = Executor._publish

    def publish_and_mix(self, batch):
        last = self.clipper._norm
        publish(self, batch)
        self.clipper._norm = last or self.clipper._norm

    Executor._publish = publish_and_mix

    def undo():
        Executor._publish = publish

    return undo


def test_the_norm_of_another_batch_fails_the_check(pool):
    results = pool.run(2, train, plain, PLAIN, clip=EVERY, break_it=norm_of_the_batch_before)
    assert difference(results, 1, oracle(1, clip=EVERY)) > 1e-4


class Poison(torch.autograd.Function):
    """Passes its input on, and `factor` times its gradient back."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class Poisoned(nn.Module):
    """Spoils the gradient of one scalar, which one shard of one stage holds."""

    def __init__(self, part):
        super().__init__()
        self.part, self.extra, self.factor = part, nn.Parameter(torch.ones(1, dtype=torch.float64)), 1.0

    def forward(self, x):
        return self.part(x) + Poison.apply(self.extra, self.factor)


def spoiled(rank, group, names, stage_index, factor):
    """Whether norms are finite, and `gradient_is_finite`, with batch 1's gradient spoiled on one stage."""
    size, wrap, _ = WRAPS[names]
    poisoned = []

    def wrap_and_poison(stage, mesh):
        if mesh.get_local_rank("pp") == stage_index:
            name, part = next(stage.named_children())
            poisoned.append(Poisoned(part))
            setattr(stage, name, poisoned[0])
        wrap(stage, mesh)

    run = prepare(wrap_and_poison, names)
    seen = []
    for batch in range(4):
        for module in poisoned:
            module.factor = factor if batch == 1 else 1.0
        run.step(batch)
        if run.schedule.gradient_ready:
            norm = run.schedule.clip_grad_norm_(1.0).item()
            seen.append((math.isfinite(norm), run.schedule.gradient_is_finite()))
            if seen[-1][1]:
                run.optimizer.step()
            run.optimizer.zero_grad()
    run.schedule.drain()
    return seen


@pytest.mark.covering(2)
@pytest.mark.parametrize("factor", [math.nan, math.inf])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("names", [PLAIN, SHARDED])
def test_all_ranks_see_a_gradient_that_is_not_finite(pool, names, stage, factor):
    """Also the stages and shards whose own part is finite, and of no other batch."""
    results = pool.run(WRAPS[names][0], spoiled, names, stage, factor)
    assert results == [[(True, True), (False, False), (True, True)]] * WRAPS[names][0]


def mistakes(rank, group, names):
    _, wrap, _ = WRAPS[names]
    run = prepare(wrap, names)
    schedule = run.schedule
    with pytest.raises(RuntimeError, match="no gradient to clip"):
        schedule.clip_grad_norm_(1.0)
    run.step(0)
    with pytest.raises(RuntimeError, match="no gradient to clip"):
        schedule.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match=r"call clip_grad_norm_\(\) first"):
        schedule.gradient_is_finite()
    run.step(1)
    schedule.clip_grad_norm_(math.inf)
    with pytest.raises(RuntimeError, match="clip it once"):
        schedule.clip_grad_norm_(1.0)
    run.optimizer.zero_grad()
    run.step(2)
    for parameter in run.module.parameters():
        parameter.grad.mul_(2)
    with pytest.raises(RuntimeError, match="before you change it"):
        schedule.clip_grad_norm_(1.0)
    run.optimizer.zero_grad()
    schedule.drain()
    assert math.isfinite(schedule.clip_grad_norm_(1.0).item())
    run.optimizer.zero_grad()
    assert not schedule.drain()
    with pytest.raises(RuntimeError, match="no gradient to clip"):
        schedule.clip_grad_norm_(1.0)
    return True


@pytest.mark.parametrize("names", [PLAIN, SHARDED])
def test_invalid_calls_are_refused(pool, names):
    """Nothing to clip, clipped twice, accumulated, changed before: each leaves the run as it was."""
    assert all(pool.run(WRAPS[names][0], mistakes, names))


def without_gradient(rank, group, kind):
    """The norm where one stage has no parameters, or frozen or unused ones."""
    module, idle = Shift(1.0), rank == (0 if kind == "frozen" else 1)
    if idle and kind == "frozen":
        module.requires_grad_(False)
    elif idle:
        module = nn.Tanh()
        if kind == "unused":
            module.unused = nn.Parameter(torch.ones(3))
    schedule = two_stages(rank, module, lambda output, target: 3 * output.mean())
    norms = []
    for _ in range(3):
        feed(schedule, torch.zeros(4, 1))
        if schedule.gradient_ready:
            norms.append(schedule.clip_grad_norm_(1.0).item())
            with pytest.raises(RuntimeError, match="clip it once"):
                schedule.clip_grad_norm_(1.0)
            for parameter in module.parameters():
                parameter.grad = None
    schedule.drain()
    return norms


@pytest.mark.parametrize("kind", ["no parameters", "unused", "frozen"])
def test_a_stage_without_gradient_takes_part(pool, kind):
    for norms in pool.run(2, without_gradient, kind):
        assert norms == pytest.approx([3.0, 3.0])


def starts(rank, group, names):
    """How many reductions of norms have begun after each step, and after each clip."""
    run, begun, seen = prepare(WRAPS[names][1], names), [], []
    start = NormReducer.start

    def recorded(self, gradients):
        begun.append(None)
        return start(self, gradients)

    NormReducer.start = recorded
    try:
        for batch in range(5):
            run.step(batch)
            after_step = len(begun)
            run.update(clip=True)
            seen.append((after_step, len(begun)))
        run.schedule.drain()
        seen.append((len(begun), len(begun)))
        run.update(clip=True)
        assert len(begun) == 5
    finally:
        NormReducer.start = start
    return seen


@pytest.mark.parametrize("names", WRAPS)
def test_the_reduction_of_the_norm_starts_before_step_returns(pool, names):
    """From the second clip on, on all stages in the same step: the last one finishes a batch earlier."""
    for seen in pool.run(WRAPS[names][0], starts, names):
        assert seen == [(0, 0), (0, 1), (2, 2), (3, 3), (4, 4), (5, 5)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_squares_of_low_precision_are_not_summed_in_it(dtype):
    tensors = [torch.randn(300, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(3)]
    found = share_of_squares([*tensors, None], 1, torch.device("cpu"))
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(sum(float(t.double().square().sum()) for t in tensors), rel=1e-6)
