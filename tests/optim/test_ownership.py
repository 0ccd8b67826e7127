"""The division of Muon's work: every matrix once, balanced by cost, parts from where they are near."""

from collections import Counter
from itertools import product

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from titan_async.optim.ownership import Item, divide
from titan_async.optim.shard_regions import boxes, intersection, relative

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
LAYOUTS = {
    "rows": ((4,), [S0]),
    "columns": ((4,), [S1]),
    "replicas": ((4,), [R]),
    "hsdp": ((2, 2), [R, S0]),
    "blocks": ((2, 3), [S0, S1]),
    "fsdp and tp": ((2, 2), [_StridedShard(0, split_factor=2), S0]),
    "three": ((2, 2, 2), [R, S1, S0]),
}
SHAPES = [(8, 6), (3, 16), (1, 4), (5, 7), (6, 4, 4), (3, 8, 5), (1, 4, 4), (0, 3), (9, 9)]


def cubic(rows, cols):
    return float(min(rows, cols) ** 2 * max(rows, cols))


def whole(shape):
    return (tuple((0, size) for size in shape[-2:]),)


def items(shapes, layout, cost=cubic, matrices=whole):
    mesh_shape, placements = layout
    found = []
    for number, shape in enumerate(shapes):
        if any(getattr(placement, "dim", 0) >= len(shape) for placement in placements):
            continue
        found.append(Item(number, shape, boxes(shape, placements, mesh_shape), matrices(shape), cost))
    return found


def division(shapes, layout, bucket_size=10**9, **kwargs):
    """Buckets, loads and items."""
    mesh_shape, _ = layout
    coordinates = list(product(*map(range, mesh_shape)))
    loads = [0.0] * len(coordinates)
    divided = items(shapes, layout, **kwargs)
    return divide(divided, coordinates, loads, bucket_size), loads, divided


def fused(shape):
    """Three logical matrices along the rows, where there are as many."""
    rows, cols = shape[-2:]
    if rows < 3:
        return whole(shape)
    return (((0, 1), (0, cols)), ((1, 2), (0, cols)), ((2, rows), (0, cols)))


@pytest.mark.parametrize("matrices", [whole, fused])
@pytest.mark.parametrize("bucket_size", [1, 50, 10**9])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_entry_is_computed_once_and_reaches_everyone_who_holds_it(layout, bucket_size, matrices):
    """Counted entry by entry, for tasks, for what each is put together from, and for what each rank gets."""
    buckets, loads, divided = division(SHAPES, LAYOUTS[layout], bucket_size, matrices=matrices)
    shapes = {item.number: item.shape for item in divided}
    computed = {number: torch.zeros(shape) for number, shape in shapes.items()}
    ranks = range(len(loads))
    got = {(number, rank): torch.zeros(shape) for number, shape in shapes.items() for rank in ranks}
    costs = Counter()
    assert [number for bucket in buckets for number in bucket.items] == list(shapes)
    for bucket in buckets:
        for task in bucket.tasks:
            assert task.item in bucket.items
            shape = shapes[task.item]
            origin = tuple((0, size) for size in shape)
            computed[task.item][relative(task.box, origin)] += 1
            # A task is made of whole logical matrices, one or the same of several experts.
            assert task.box[-2:] in matrices(shape)
            sides = [stop - start for start, stop in task.box]
            costs[task.owner] += cubic(*sides[-2:]) * (sides[0] if len(sides) == 3 else 1)
            gathered = torch.zeros(shape)
            for part in task.sources:
                assert intersection(divided_box(divided, task.item, part.rank), part.box) == part.box
                gathered[relative(part.box, origin)] += 1
            inside = gathered[relative(task.box, origin)]
            assert (inside == 1).all() and gathered.sum() == inside.sum()
            for part in task.targets:
                got[task.item, part.rank][relative(part.box, origin)] += 1
            assert task.owner in {part.rank for part in task.targets}
    assert all((entries == 1).all() for entries in computed.values())
    for (number, rank), entries in got.items():
        held = torch.zeros(shapes[number])
        held[relative(divided_box(divided, number, rank), tuple((0, size) for size in held.shape))] = 1
        assert torch.equal(entries, held)
    assert [costs[rank] for rank in ranks] == pytest.approx(loads)


def divided_box(divided, number, rank):
    return next(item.boxes[rank] for item in divided if item.number == number)


@pytest.mark.parametrize("layout", ["rows", "columns", "replicas", "hsdp", "fsdp and tp"])
@pytest.mark.parametrize("order", ["as given", "reversed"])
def test_loads_are_balanced_by_cost(layout, order):
    """Two large matrices among many small ones: by count one rank would have both, and some of the small."""
    shapes = [(64, 64), *[(16, 16)] * 3, (64, 64), *[(16, 16)] * 3, (48, 48), *[(16, 16)] * 120]
    buckets, loads, _ = division(shapes if order == "as given" else shapes[::-1], LAYOUTS[layout])
    largest, total = cubic(64, 64), sum(cubic(*shape) for shape in shapes)
    assert sum(loads) == pytest.approx(total)
    best = max(largest, total / 4)
    # Dealt out by number they would be worse, so that this says something.
    in_turn = [sum(cubic(*shape) for shape in shapes[rank::4]) for rank in range(4)]
    assert max(in_turn) > 1.5 * best
    assert max(loads) <= best + cubic(16, 16)


def test_loads_are_balanced_over_buckets():
    """What a rank did in one bucket counts in the next."""
    shapes = [(32, 32), (16, 16), (16, 16), (16, 16)] * 6
    _, loads, _ = division(shapes, LAYOUTS["rows"], bucket_size=4 * 16 * 16)
    assert max(loads) - min(loads) <= cubic(32, 32)


def test_loads_that_ranks_have_already_count():
    mesh_shape, _ = LAYOUTS["rows"]
    loads = [100.0, 0.0, 100.0, 100.0]
    [bucket] = divide(items([(4, 4)], LAYOUTS["rows"]), [(0,), (1,), (2,), (3,)], loads, 1)
    assert bucket.tasks[0].owner == 1
    assert loads == [100.0, cubic(4, 4), 100.0, 100.0]


def test_matrices_that_are_whole_on_one_rank_stay_there():
    [bucket], _, divided = division([(8, 4, 4), (4, 6, 3)], LAYOUTS["rows"])
    assert not bucket.communicates
    for task in bucket.tasks:
        assert [part.rank for part in task.targets] == [task.owner]


def test_experts_on_replicas_are_divided_among_them():
    [bucket], loads, _ = division([(4, 4, 4)], LAYOUTS["hsdp"])
    assert loads == [cubic(4, 4)] * 4
    [bucket], loads, _ = division([(8, 4, 4)], LAYOUTS["replicas"])
    assert loads == [2 * cubic(4, 4)] * 4


def test_parts_come_from_the_replica_of_the_owner():
    """Between replicas the network is slowest, and results have to take it anyway."""
    mesh_shape, _ = LAYOUTS["hsdp"]
    coordinates = list(product(*map(range, mesh_shape)))
    [bucket], _, _ = division([(8, 8)] * 8, LAYOUTS["hsdp"])
    for task in bucket.tasks:
        assert len(task.sources) == 2
        for part in task.sources:
            assert coordinates[part.rank][0] == coordinates[task.owner][0]


@pytest.mark.parametrize(
    ("size", "count"), [(1, 6), (64, 6), (65, 3), (200, 2), (10**9, 1), (float("inf"), 1)]
)
def test_buckets_close_when_they_are_full(size, count):
    buckets, _, _ = division([(8, 8)] * 6, LAYOUTS["rows"], size)
    assert len(buckets) == count
