"""ScheduleAsync2BW with every way to apply FSDP2 to a stage, against a single-process loop."""

from functools import partial

import pytest
import torch
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.processes import Pools, WorkerPool
from tests.support.recurrence import Travel
from tests.support.selection import slow
from tests.support.sharded import EVERY, make_meshes, shard, shard_each_part, shard_in_bfloat16, train
from tests.support.sharded_oracle import bfloat16_gradient, difference, oracle
from titan_async.pipelining import ScheduleAsync2BW, gradient_norm
from titan_async.pipelining._fsdp_internals import FsdpParameters

DP, HSDP, TP = ("pp", "dp"), ("pp", "replicate", "shard"), ("pp", "dp", "tp")


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    pool = pools(8)
    pool.run(8, make_meshes, keeps=True)
    return pool


def hybrid(stage, mesh):
    for part in [*stage.children(), stage]:
        shard(part, mesh["replicate", "shard"])


def replicated(stage, mesh):
    for part in [*stage.children(), stage]:
        replicate(part, mesh=mesh["dp"])


def only_the_root(stage, mesh):
    fully_shard(stage, mesh=mesh["dp"])


def grouped_head(stage, mesh):
    """As torchtitan does: norm and head, which follow each other, are gathered together."""
    for name, part in stage.named_children():
        if name.isdigit():
            shard(part, mesh["dp"])
    if hasattr(stage, "head"):
        shard([stage.norm, stage.head], mesh["dp"])
    fully_shard(stage, mesh=mesh["dp"])


def tensor_parallel(stage, mesh):
    """Matrices split over tp, the bias of the second replicated there; other parameters unknown to tp."""
    for name, part in stage.named_children():
        if name.isdigit():
            parallelize_module(part, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard_each_part(stage, mesh)


MODES = {
    "each part": (shard_each_part, DP, {}),
    "frozen": (shard_each_part, DP, {"frozen": True}),
    "hsdp": (hybrid, HSDP, {}),
    "replicate": (replicated, DP, {}),
    "only the root": (only_the_root, DP, {}),
    "grouped": (grouped_head, DP, {}),
    "tensor parallel": (tensor_parallel, TP, {"hidden": 8}),
}


def run(pool, wrap, names, **options):
    """The results of all ranks, and the number of shares of the data."""
    results = pool.run(4 if names == DP else 8, train, wrap, names, **options)
    return results, 4 if names == HSDP else 2


# By default the modes whose norm depends on the ranks that hold a parameter.
CLIPPED = ("frozen", "hsdp", "replicate", "tensor parallel")


@pytest.mark.parametrize(
    ("mode", "clip"),
    [
        (pytest.param if bool(clip) == (mode in CLIPPED) else slow)(mode, clip, id=f"{mode}-{name}")
        for mode in MODES
        for clip, name in (((), ""), (EVERY, "clipped"))
    ],
)
def test_equals_the_recurrence(pool, mode, clip):
    """Weights, losses and norms, also where a parameter has uneven or empty shards (an odd hidden size)."""
    wrap, names, model = MODES[mode]
    results, shares = run(pool, wrap, names, clip=clip, **model)
    assert difference(results, shares, oracle(shares, clip=clip, **model)) < 1e-12
    assert difference(results, shares, oracle(shares, clip=clip, delay=0, **model)) > 1e-4


MIXED = {"dtype": torch.float32}


def test_mixed_precision_equals_the_recurrence(pool):
    """Forward and backward in bfloat16; weights, sums over microbatches and reductions in float32."""
    results, shares = run(pool, shard_in_bfloat16, DP, **MIXED)
    assert difference(results, shares, oracle(shares, gradient=bfloat16_gradient, **MIXED)) < 1e-6
    assert difference(results, shares, oracle(shares, **MIXED)) > 1e-4
    assert all(value.dtype == torch.float32 for weights, *_ in results for value in weights.values())


def overlapping(stage, mesh):
    """Halves of pairs switch within layers, between the FSDP hooks before and after them."""
    for part in stage.children():
        if hasattr(part, "up"):
            part.up.register_forward_hook(lambda module, args, output: Travel.apply(output))
    shard_in_bfloat16(stage, mesh)


OVERLAP = {"schedule_class": partial(ScheduleAsync2BW, overlap=True), **MIXED}


def test_overlapped_pairs_in_mixed_precision_equal_the_recurrence(pool):
    results, shares = run(pool, overlapping, DP, **OVERLAP)
    assert difference(results, shares, oracle(shares, gradient=bfloat16_gradient, **MIXED)) < 1e-6


def sums_in_bfloat16(stage, mesh):
    shard_each_part(stage, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def sums_are_lost():
    """Activating the other version drops the sums of earlier microbatches."""
    install = FsdpParameters._install

    def install_without_sums(self, copy):
        install(self, copy)
        for param in self._params:
            param.unsharded_accumulated_grad = None

    FsdpParameters._install = install_without_sums

    def undo():
        FsdpParameters._install = install

    return undo


@pytest.mark.parametrize(
    ("wrap", "broken"),
    [(sums_in_bfloat16, None), (shard_in_bfloat16, sums_are_lost)],
    ids=["rounded", "lost"],
)
def test_other_sums_of_gradients_fail_the_check(pool, wrap, broken):
    results, shares = run(pool, wrap, DP, break_it=broken, **MIXED)
    assert difference(results, shares, oracle(shares, gradient=bfloat16_gradient, **MIXED)) > 1e-4


def count_all_ranks_as_holders():
    """As if every rank of a stage held all of every gradient."""
    num_shards = gradient_norm._num_shards
    gradient_norm._num_shards = lambda grad: 1

    def undo():
        gradient_norm._num_shards = num_shards

    return undo


@pytest.mark.parametrize("mode", ["hsdp", slow("tensor parallel")])
def test_a_wrong_count_of_replicas_fails_the_check(pool, mode):
    wrap, names, model = MODES[mode]
    results, shares = run(pool, wrap, names, clip=EVERY, break_it=count_all_ranks_as_holders, **model)
    assert difference(results, shares, oracle(shares, clip=EVERY, **model)) > 1e-4
