"""Communication of sharded Muon: elements sent, and overlap with computation."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from tests.support.optim import (
    give_gradients,
    parameters,
    placed,
)
from titan_async.optim import Muon, distributed_orthogonalization

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)


class Watch:
    """Records the all-to-alls of a step, the waits for them, and the orthogonalizations."""

    def __enter__(self):
        self.events, self.elements, self.dtypes = [], [], set()
        self.all_to_all = dist.all_to_all_single
        names = [name for name in vars(distributed_orthogonalization) if name.startswith("orthogonalize")]
        self.functions = {name: getattr(distributed_orthogonalization, name) for name in names}

        def watched(received, sent, *args, **kwargs):
            number = len(self.elements)
            self.events.append(("issued", number))
            self.elements.append(sent.numel())
            self.dtypes.add(sent.dtype)
            work = self.all_to_all(received, sent, *args, **kwargs)

            def wait():
                self.events.append(("waited", number))
                return work.wait()

            return SimpleNamespace(wait=wait)

        def computing(function):
            def run(*args, **kwargs):
                self.events.append(("computed", None))
                return function(*args, **kwargs)

            return run

        dist.all_to_all_single = watched
        for name, function in self.functions.items():
            setattr(distributed_orthogonalization, name, computing(function))
        return self

    def __exit__(self, *error):
        dist.all_to_all_single = self.all_to_all
        for name, function in self.functions.items():
            setattr(distributed_orthogonalization, name, function)


def watch(rank, group, layout, shapes, dtype, **options):
    place = placed(layout)
    params = parameters(shapes, dtype, place)
    optimizer = Muon(params, 0.1, **options)
    give_gradients(params, 0, place)
    with Watch() as seen:
        optimizer.step()
    return seen.events, seen.elements, [str(dtype) for dtype in seen.dtypes]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("layout", "width", "copies"),
    [
        (((4,), [S0]), 4, 0),
        (((4,), [S1]), 4, 0),
        (((2, 2), [S0, S1]), 4, 0),
        (((2, 2), [R, S0]), 2, 1),
        (((4,), [R]), 1, 3),
    ],
    ids=str,
)
def test_elements_sent(four_ranks, layout, width, copies, dtype):
    """In bfloat16: parts that the owner lacks, in both directions, and updates to each further replica."""
    shapes = [(16, 8), (8, 8), (8, 24)]
    results = four_ranks.run(4, watch, layout, shapes, dtype)
    elements = sum(rows * cols for rows, cols in shapes)
    assert sum(sum(sent) for _, sent, _ in results) == elements * (2 * (width - 1) / width + copies)
    for _, sent, dtypes in results:
        assert len(sent) == 2  # one bucket, one pair
        assert dtypes == ["torch.bfloat16"]


def test_uneven_shards_send_at_most_the_matrix_per_direction(four_ranks):
    results = four_ranks.run(4, watch, ((4,), [S0]), [(3, 16), (5, 8)], torch.float32)
    assert sum(sum(sent) for _, sent, _ in results) < 2 * (3 * 16 + 5 * 8)


@pytest.mark.parametrize("layout", [((4,), [S0]), ((2, 2), [S0, S0])], ids=str)
def test_experts_that_are_whole_on_a_rank_are_not_sent(four_ranks, layout):
    for events, sent, _ in four_ranks.run(4, watch, layout, [(8, 6, 4), (4, 4, 4)], torch.float32):
        assert sent == []
        assert ("computed", None) in events


def test_experts_on_replicas_are_orthogonalized_once(four_ranks):
    """With two experts per rank and two replicas, each orthogonalizes one and sends it to the other."""
    results = four_ranks.run(4, watch, ((2, 2), [R, S0]), [(4, 6, 8)], torch.float32)
    for _, sent, _ in results:
        assert sent == [0, 48]


def test_buckets_overlap(four_ranks):
    """A bucket has a pair of all-to-alls; its computation overlaps with those of its neighbours."""
    shapes = [(16, 16)] * 16
    # Four matrices per bucket, one for each rank.
    results = four_ranks.run(4, watch, ((4,), [S0]), shapes, torch.float32, bucket_mb=4 * 16 * 16 * 2 / 2**20)
    for events, sent, _ in results:
        assert len(sent) == 8
        computed = [index for index, (kind, _) in enumerate(events) if kind == "computed"]
        assert len(computed) == 4
        at = {event: index for index, event in enumerate(events)}
        # The order of issue is gather 0, gather 1, then scatter k, gather k + 2.
        gathers, scatters = [0, 1, 3, 5], [2, 4, 6, 7]
        for bucket in range(4):
            assert at["waited", gathers[bucket]] < computed[bucket] < at["issued", scatters[bucket]]
            if bucket < 3:
                assert at["issued", gathers[bucket + 1]] < at["waited", gathers[bucket]]
                assert at["waited", scatters[bucket]] > at["issued", scatters[bucket + 1]]
