"""Copies of a parameter on the first and the last stage against one shared parameter in a single process."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage

from tests.support.processes import Pools, WorkerPool
from tests.support.recurrence import WIDTH, build_blocks
from tests.support.selection import slow
from titan_async.pipelining import ScheduleAsync2BW
from titan_async.pipelining.tied_parameters import TiedParameters

VOCAB, BATCHES = 12, 6
MAX_NORM = 0.05  # clips every batch

meshes: dict[tuple[int, int], DeviceMesh] = {}


def make_meshes(rank, group):
    for stages in (2, 4):
        mesh = torch.arange(stages * 2).view(stages, 2)
        meshes[stages, 2] = DeviceMesh("cpu", mesh, mesh_dim_names=("pp", "dp"))


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    pool = pools(8)
    pool.run(8, make_meshes, keeps=True)
    return pool


class Model(nn.Module):
    """A decoder, or the part of it on one stage, under the names of the whole."""

    def __init__(self, blocks, first=True, last=True, tie=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        embedding, head = (
            nn.Embedding(VOCAB, WIDTH, dtype=torch.float64),
            nn.Linear(WIDTH, VOCAB, bias=False, dtype=torch.float64),
        )
        if first:
            self.embedding = embedding
        self.blocks = nn.ModuleDict(blocks)
        if last:
            self.head = head
        if tie:
            head.weight = embedding.weight

    def forward(self, x):
        if hasattr(self, "embedding"):
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x) if hasattr(self, "head") else x


def loss_fn(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def data(m):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(VOCAB, (2, BATCHES, m * 2, 5), generator=generator)


def named_blocks(stages):
    return {str(index): block for index, block in enumerate(build_blocks(stages))}


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def whole(tensor):
    return getattr(tensor, "full_tensor", lambda: tensor)().detach().clone()


def train(
    rank, group, m, make_optimizer=adamw, *, lookahead=0, shards=1, drain_after=(), keep_gradients=False,
    evaluate=False,
):  # fmt: skip
    """This stage's weights, and the norms and the copy of the tied weight of each update."""
    stages, index, share = group.size() // shards, rank // shards, rank % shards
    blocks = {str(index): named_blocks(stages)[str(index)]}
    module = Model(blocks, first=index == 0, last=index == stages - 1, seed=index)
    if shards > 1:
        mesh = meshes[stages, shards]
        group = mesh.get_group("pp")
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
        assert isinstance(module, FSDPModule)
        module.set_force_sum_reduction_for_comms(True)
    ends = [getattr(module, name) for name in ("embedding", "head") if hasattr(module, name)]
    tied = [end.weight for end in ends]
    stage = PipelineStage(module, index, stages, torch.device("cpu"), group=group)
    schedule = ScheduleAsync2BW(stage, m, loss_fn=loss_fn, lookahead=lookahead, tied_parameters=tied)
    if shards == 1:  # as a module from the meta device is given its values
        for end in ends:
            end.weight = nn.Parameter(end.weight.detach().clone())
        tied = [end.weight for end in ends]
    optimizer = make_optimizer(module)
    inputs, targets = data(m)
    norms, copies = [], []

    def update():
        if schedule.gradient_ready:
            norms.append(schedule.clip_grad_norm_(MAX_NORM).item())
            optimizer.step()
            if not keep_gradients:
                optimizer.zero_grad()
            copies.extend(whole(weight) for weight in tied)

    for batch in range(BATCHES):
        args = (inputs[batch][share::shards],) if stage.is_first else ()
        if evaluate and not batch:
            with torch.no_grad():
                output = schedule.eval(*args)
            if stage.is_last:
                copies.append(output)
        schedule.step(*args, target=targets[batch][share::shards] if stage.is_last else None)
        update()
        if batch in drain_after or batch == BATCHES - 1:
            schedule.drain()
            update()
    return {name: whole(each) for name, each in module.named_parameters()}, norms, copies


def reference(stages, m, make_optimizer=adamw, keep_gradients=False):
    """The expected result of `train`: the recurrence on a model with one shared weight."""
    newest = Model(named_blocks(stages), tie=True)
    optimizer = make_optimizer(newest)
    inputs, targets = data(m)
    history, norms = [copy.deepcopy(newest)], []
    for batch in range(BATCHES):
        reader = history[max(batch - 1, 0)]
        reader.zero_grad()
        loss_fn(reader(inputs[batch]), targets[batch]).backward()
        for parameter, stale in zip(newest.parameters(), reader.parameters(), strict=True):
            before = parameter.grad if keep_gradients and batch else 0
            parameter.grad = stale.grad.clone() + before
        norms.append(torch.nn.utils.clip_grad_norm_(newest.parameters(), MAX_NORM).item())
        optimizer.step()
        history.append(copy.deepcopy(newest))
    return newest.state_dict(), norms


def assert_follows(results, expected, shards=1):
    weights, norms = expected
    for found, clipped, _ in results:
        for name, value in found.items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-12)
        assert clipped == pytest.approx(norms, rel=1e-9)
    assert set().union(*(found for found, *_ in results)) == set(weights)
    first, last = results[0][2], results[-1][2]
    assert len(first) == len(last) == BATCHES
    assert all(torch.equal(*both) for both in zip(first, last, strict=True))


@pytest.mark.parametrize(
    ("stages", "m", "lookahead"), [(2, 2, 0), (2, 4, 2), (3, 3, 0), slow(4, 4, 0), slow(4, 8, 3)]
)
def test_copies_follow_the_recurrence_of_one_shared_parameter(pool, stages, m, lookahead):
    results = pool.run(stages, train, m, lookahead=lookahead)
    assert_follows(results, reference(stages, m))


@pytest.mark.parametrize("stages", [2, slow(4)])
def test_sharded_copies_follow_it_too(pool, stages):
    results = pool.run(2 * stages, train, 4, shards=2)
    assert_follows(results, reference(stages, 4))


@pytest.mark.parametrize("keep_gradients", [False, True])
def test_draining_and_kept_gradients_change_nothing(pool, keep_gradients):
    options = {"keep_gradients": keep_gradients}
    results = pool.run(3, train, 4, sgd, lookahead=1, drain_after=(0, 2, 3), **options)
    assert_follows(results, reference(3, 4, sgd, **options))


def test_an_evaluation_before_the_first_batch_reads_one_weight(pool):
    *_, copies = pool.run(2, train, 2, evaluate=True)[-1]
    with torch.no_grad():
        expected = Model(named_blocks(2), tie=True)(data(2)[0][0])
    torch.testing.assert_close(copies[0], expected)


def message_of(rank, group, tied_of, schedules=1):
    """The schedule's error on this rank for the parameters that `tied_of` names on it."""
    stages = group.size()
    blocks = {str(rank): named_blocks(stages)[str(rank)]}
    module = Model(blocks, first=rank == 0, last=rank == stages - 1)
    stage = PipelineStage(module, rank, stages, torch.device("cpu"), group=group)
    names = tied_of.get(rank, ())
    tied = [module.get_parameter(name) if isinstance(name, str) else name for name in names]
    try:
        schedule = ScheduleAsync2BW(stage, stages, loss_fn=loss_fn, tied_parameters=tied)
        inputs, targets = data(stages)
        args = (inputs[0],) if stage.is_first else ()
        schedule.step(*args, target=targets[0] if stage.is_last else None)
    except ValueError as error:
        return str(error)


EMBEDDING = "a parameter of shape (12, 8) and torch.float64"


@pytest.mark.parametrize(
    ("tied_of", "ties"),
    [
        ({0: ["embedding.weight"]}, f"the first stage ties {EMBEDDING}, the last stage nothing"),
        (
            {0: ["embedding.weight"], 2: ["blocks.2.scale"]},
            f"the first stage ties {EMBEDDING}, the last stage a parameter of shape (8,) and torch.float64",
        ),
    ],
)
def test_different_tied_parameters_are_refused_on_every_rank(pool, tied_of, ties):
    for message in pool.run(3, message_of, tied_of):
        assert message == (
            f"{ties}: pass the same number of tied_parameters on both, in the same order, of the same shapes "
            "and placements"
        )


def test_parameters_that_a_stage_cannot_tie_are_refused():
    """Before any communication, so that no group is needed."""

    def refuse(index, stages, of_module, match):
        module = Model(named_blocks(1))
        stage = SimpleNamespace(
            stage_index=index, num_stages=stages, is_first=index == 0, is_last=index == stages - 1,
            submod=module,
        )  # fmt: skip
        with pytest.raises(ValueError, match=match):
            TiedParameters(stage, of_module(module))

    refuse(0, 1, lambda module: [module.head.weight], "the pipeline has one")
    refuse(1, 3, lambda module: [module.head.weight], "this is stage 1 of 3")
    refuse(0, 2, lambda module: [nn.Parameter(torch.ones(1))], "different trainable parameters")
    refuse(0, 2, lambda module: [module.head.weight] * 2, "different trainable parameters")
    refuse(0, 2, lambda module: [module.head.weight.requires_grad_(False)], "different trainable parameters")
