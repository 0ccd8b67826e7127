"""Muon on sharded matrices, against the same matrices in one process: gloo, four processes."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.support.optim import (
    MUONS,
    assert_close,
    bits,
    distribute,
    full,
    give_gradients,
    meshes,
    parameters,
    placed,
    randn,
    same_bits,
    updated,
    whole,
)
from titan_async.optim import Muon

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
LAYOUTS = {
    "rows": ((4,), [S0]),
    "two ranks": ((2, 2), [S0]),  # of the inner dimension
    "columns": ((4,), [S1]),
    "replicated": ((4,), [R]),
    "hsdp": ((2, 2), [R, S0]),
    "rows and columns": ((2, 2), [S0, S1]),
    "columns and rows": ((2, 2), [S1, S0]),
    "rows twice": ((2, 2), [S0, S0]),
    "fsdp and replicated": ((2, 2), [S0, R]),
    "all replicated": ((2, 2), [R, R]),
}


STACKS = {
    "experts": ((4,), [S0]),
    "inside": ((4,), [S1]),
    "last": ((4,), [S2]),
    "experts and rows": ((2, 2), [S1, S0]),
    "experts and columns": ((2, 2), [S2, S0]),
    "experts twice": ((2, 2), [S0, S0]),
    "replicated experts": ((2, 2), [R, S0]),
    "replicated": ((4,), [R]),
}


SHAPES = [(1, 4), (3, 16), (18, 8), (16, 16), (5, 7), (12, 3), (0, 5), (24, 8)]


STACK_SHAPES = [(8, 4, 4), (3, 6, 10), (5, 9, 2), (1, 4, 8)]


def train_sharded(rank, group, layout, shapes, **options):
    """The full weights, and this rank's shards."""
    params, optimizer = updated(shapes, placed(layout), **options)
    for param in params:
        buffer = optimizer.state[param]["momentum_buffer"]
        for tensor in (param, buffer):
            assert isinstance(tensor, DTensor)
            assert list(tensor.placements) == layout[1]
        assert buffer.to_local().shape == param.to_local().shape
    return full(params), [param.to_local().detach().numpy() for param in params]


def assert_like_one_process(results, shapes, tolerance=1e-12, **options):
    expected = full(updated(shapes, **options)[0])
    for found, _ in results:
        assert_close(found, expected, tolerance)


# Communication does not depend on the options.
OPTIONS = [
    {"compute_dtype": "float64"},
    {"compute_dtype": "float64", "adjust_lr": "match_rms_adamw", "nesterov": False, "ns_form": "gram"},
    {"compute_dtype": "float64", "error_feedback": 1.0, "cautious_weight_decay": True, "bucket_mb": 1e-4},
    {"compute_dtype": "float64", "error_feedback": 0.5, "error_feedback_level": "gradient"},
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "gram", "feedback", "gradient"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrices_of_every_layout_equal_one_process(four_ranks, layout, options):
    results = four_ranks.run(4, train_sharded, LAYOUTS[layout], SHAPES, **options)
    assert_like_one_process(results, SHAPES, **options)


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "gram", "feedback", "gradient"])
@pytest.mark.parametrize("layout", STACKS)
def test_experts_of_every_layout_equal_one_process(four_ranks, layout, options):
    results = four_ranks.run(4, train_sharded, STACKS[layout], STACK_SHAPES, **options)
    assert_like_one_process(results, STACK_SHAPES, **options)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 2e-2), ("float16", 3e-3)])
@pytest.mark.parametrize("layout", ["rows", "columns", "hsdp", "rows and columns", "replicated"])
def test_communication_in_half_precision(four_ranks, layout, dtype, tolerance):
    options = {"compute_dtype": dtype, "dtype": torch.float32}
    results = four_ranks.run(4, train_sharded, LAYOUTS[layout], SHAPES, **options)
    assert_like_one_process(results, SHAPES, tolerance, **options)
    if layout in ("replicated", "hsdp"):
        for (_, one), (_, other) in pairwise(results[:: 2 if layout == "hsdp" else 1]):
            assert all((a == b).all() for a, b in zip(one, other, strict=True))


SPLIT = (8, 8, 2, 2)


@pytest.mark.covering(2)
@pytest.mark.parametrize("adjust_lr", ["original", "spectral"])
@pytest.mark.parametrize("layout", [((4,), [S0]), ((4,), [S1]), ((2, 2), [S1, S0]), ((2, 2), [R, S0])])
@pytest.mark.parametrize(("dim", "shape"), [(-2, (20, 6)), (-1, (6, 20)), (-2, (3, 20, 6)), (-1, (3, 6, 20))])
def test_fused_weights_with_shards_across_their_parts(four_ranks, dim, shape, layout, adjust_lr):
    """Compared with a separate parameter for each part."""
    [start] = parameters([shape], torch.float64)
    parts = [torch.nn.Parameter(part.clone()) for part in start.detach().split(SPLIT, dim)]
    options = {"adjust_lr": adjust_lr, "compute_dtype": "float64"}
    apart = Muon(parts, 0.1, **options)
    for step in range(3):
        for part, grad in zip(parts, randn(shape, step, 0).split(SPLIT, dim), strict=True):
            part.grad = grad.clone()
        apart.step()
    options |= {"split_sizes": SPLIT, "split_dim": dim}
    for found, _ in four_ranks.run(4, train_sharded, layout, [shape], **options):
        assert_close(found, full([torch.cat(parts, dim)]))


def place_on_several_meshes():
    """A layout for each parameter: rows, blocks, replicas, an inner or transposed mesh, or plain."""
    line, grid, transposed = (meshes[name] for name in ("line", "grid", "turned"))
    layouts = [
        (line, [S0]),
        (grid, [S0, S1]),
        (grid["inner"], [S1]),
        (transposed, [R, S0]),
        None,
        (grid["outer"], [S0]),
        (transposed, [S1, S0]),
        (line, [R]),
    ]
    return [whole if each is None else lambda t, each=each: distribute(t, *each) for each in layouts]


MIXED = [(8, 4), (6, 10), (12, 5), (7, 7), (3, 5), (9, 4), (4, 12), (5, 6)]


def train_on_several_meshes(rank, group, bucket_mb):
    places = place_on_several_meshes()
    params = [
        torch.nn.Parameter(place(randn(s, 99, n)))
        for n, (place, s) in enumerate(zip(places, MIXED, strict=True))
    ]
    optimizer = MUONS["inside update"](params, lr=0.1, compute_dtype="float64", bucket_mb=bucket_mb)
    for step in range(8):
        for number, (param, place) in enumerate(zip(params, places, strict=True)):
            # Varying sets of gradients, missing on one rank only.
            missing = rank == step % 4 and (step * 37 >> number) & 1
            grad = place(randn(param.shape, step, number))  # a collective
            param.grad = None if missing else grad
        if step == 5 and rank == 1:
            params[2].grad.to_local()[0] = math.nan
        optimizer.step()
    return full(params)


@pytest.mark.parametrize("bucket_mb", [1e-4, 32])
def test_several_meshes_and_changing_gradients(four_ranks, bucket_mb):
    params = parameters(MIXED, torch.float64)
    optimizer = MUONS["inside update"](params, lr=0.1, compute_dtype="float64")
    for step in range(8):
        if step != 5:
            give_gradients(params, step, whole, missing=[n for n in range(8) if (step * 37 >> n) & 1])
            optimizer.step()
    for found in four_ranks.run(4, train_on_several_meshes, bucket_mb):
        assert_close(found, full(params))


def train_like_two_stages(rank, group):
    """Ranks 0, 1 and ranks 2, 3 have different parameters and numbers of steps."""
    stage = rank // 2
    mesh, other_mesh = (meshes[f"{half} half"] for half in ("first", "second")[:: -1 if stage else 1])
    shapes = [SHAPES, [(4, 6)]][stage]

    def place(tensor):
        return distribute(tensor, mesh, [S0])

    params, optimizer = updated(shapes, place, steps=range(3 - stage), compute_dtype="float64")
    # A mesh that this process is not in.
    other = DTensor.from_local(torch.zeros(2, 6), other_mesh, [S0], run_check=False)
    try:
        optimizer.add_param_group({"params": [torch.nn.Parameter(other)]})
        sentence = ""
    except NotImplementedError as error:
        sentence = str(error)
    return full(params), sentence, len(optimizer.param_groups)


def test_pipeline_stages_are_independent(four_ranks):
    results = four_ranks.run(4, train_like_two_stages)
    for stage, (shapes, steps) in enumerate([(SHAPES, 3), ([(4, 6)], 2)]):
        params, _ = updated(shapes, steps=range(steps), compute_dtype="float64")
        for found, sentence, groups in results[2 * stage : 2 * stage + 2]:
            assert_close(found, full(params))
            assert "not in its mesh" in sentence
            assert groups == 1


def train_on_strided_shards(rank, group):
    """Train with local shards of parameters and gradients that are not contiguous."""
    mesh = meshes["line"]

    def place(tensor):
        local = distribute(tensor, mesh, [S0]).to_local()
        return DTensor.from_local(local.mT.contiguous().mT, mesh, [S0], shape=tensor.shape, stride=(1, 8))

    params, _ = updated([(8, 6)], place, MUONS["inside update"], compute_dtype="float64")
    assert not params[0].to_local().is_contiguous()
    return full(params)


def test_shards_that_are_not_contiguous(four_ranks):
    params, _ = updated([(8, 6)], make=MUONS["inside update"], compute_dtype="float64")
    for found in four_ranks.run(4, train_on_strided_shards):
        assert_close(found, full(params))


def freeze(rank, group):
    """The layout of the state after each step, with a parameter that is initially frozen."""
    place = placed(LAYOUTS["rows"])
    params = parameters(SHAPES, torch.float64, place)
    params[1].requires_grad_(False)
    optimizer = MUONS["inside update"](params, momentum_dtype="float32")
    kinds = []
    for step in range(3):
        if step == 1:
            params[1].requires_grad_(True)
        give_gradients(params, step, place, missing=[1] if step == 0 else [])
        optimizer.step()
        kinds.append(
            [
                (key, value.dtype, tuple(value.shape), str(getattr(value, "placements", None)))
                for param in params
                for key, value in optimizer.state.get(param, {}).items()
            ]
        )
    return kinds


def test_all_ranks_have_the_same_layout_of_state(four_ranks):
    """Including ranks with empty shards."""
    kinds = four_ranks.run(4, freeze)
    assert all(kind == kinds[0] for kind in kinds)
    assert [len(each) for each in kinds[0]] == [21, 24, 24]
    assert ("momentum_buffer", torch.float32, (1, 4), "(Shard(dim=0),)") in kinds[0][0]


def unsupported(rank, group):
    line, grid = meshes["line"], meshes["grid"]
    sentences = []
    for mesh, placements, local in [
        (line, [Partial()], (8, 4)),
        (grid, [S0, Partial()], (4, 4)),
        (line, [S0], (3, 4)),  # [2, 4] is expected
    ]:
        param = torch.nn.Parameter(
            DTensor.from_local(
                torch.zeros(local), mesh, placements, run_check=False, shape=torch.Size((8, 4)), stride=(4, 1)
            )
        )
        try:
            Muon([("layer.weight", param)])
            sentences.append("")
        except NotImplementedError as error:
            sentences.append(str(error))
    return sentences


def test_unsupported_placements_raise(four_ranks):
    for sentences in four_ranks.run(4, unsupported):
        for sentence, words in zip(sentences, ["placement P", "placement P", "[2, 4]"], strict=True):
            assert "'layer.weight'" in sentence
            assert words in sentence


def copies(rank, group):
    place = placed(LAYOUTS["rows"])
    params = parameters(SHAPES, torch.float64, place)
    optimizer = MUONS["inside update"](params, lr=0.1)
    give_gradients(params, 0, place)
    optimizer.step()
    others, other = copy.deepcopy((params, optimizer))
    for each, each_params in ((optimizer, params), (other, others)):
        give_gradients(each_params, 1, place)
        each.step()
    return same_bits(bits(params, optimizer), bits(others, other))


def test_deep_copies_are_independent(four_ranks):
    assert all(four_ranks.run(4, copies))
