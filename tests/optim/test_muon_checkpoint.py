"""Distributed checkpoints of sharded Muon on other numbers of ranks, with feedback in or around it."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.processes import Pools, WorkerPool
from titan_async.optim import ErrorFeedback, Muon

SHAPES = {"a": (8, 6), "b": (5, 9), "c": (4, 3, 5), "d": (1, 7)}
LEVELS = ["update", "gradient"]
STEPS = 8


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    return pools(3)


def build(place, where, level, dtype):
    model = torch.nn.Module()
    for number, (name, shape) in enumerate(SHAPES.items()):
        generator = torch.Generator().manual_seed(number)
        weight = torch.randn(shape, generator=generator).to(dtype)
        model.register_parameter(name, torch.nn.Parameter(place(weight)))
    options = {"lr": 0.1, "weight_decay": 0.3, "momentum_dtype": "float32"}
    if where == "inside":
        options |= {"error_feedback": 0.7, "error_feedback_level": level}
        options |= {"error_feedback_dtype": "bfloat16"}
        return model, Muon(model.named_parameters(), **options)
    inner = Muon(model.named_parameters(), **options)
    return model, ErrorFeedback(inner, 0.7, level, dtype=torch.bfloat16)


def train(model, optimizer, place, steps):
    """Parameter "b" has no gradient in steps 1 and 4, before a save."""
    for step in steps:
        for number, (name, param) in enumerate(model.named_parameters()):
            generator = torch.Generator().manual_seed(100 * step + number)
            grad = place(torch.randn(param.shape, generator=generator).to(param.dtype))
            param.grad = None if name == "b" and step in (1, 4) else grad
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor):
    return tensor


def full(model, optimizer):
    """All weights and all state, unsharded, by name."""
    found = {}
    for name, param in model.named_parameters():
        for key, value in {"weight": param, **optimizer.state[param]}.items():
            value = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{name}.{key}"] = value.detach().clone()
    return found


def resume(rank, group, ranks, steps, load, save, where, level, dtype):
    """Load a checkpoint, if any, train, and save; returns weights and state before and after training."""
    mesh = DeviceMesh("cpu", torch.arange(ranks))
    if rank >= ranks:
        return None

    def place(tensor):
        return distribute_tensor(tensor, mesh, [Shard(0)])

    model, optimizer = build(place, where, level, dtype)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    process_group = mesh.get_group()
    if load:
        train(model, optimizer, place, range(50, 51))  # replaced by loading
        saved = {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=flat),
        }
        dcp.load(saved, checkpoint_id=load, process_group=process_group)
        model.load_state_dict(saved["model"])
        set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=flat)
    loaded = full(model, optimizer)
    train(model, optimizer, place, steps)
    saved = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=flat),
    }
    dcp.save(saved, checkpoint_id=save, process_group=process_group)
    return [
        {name: (value.float().numpy(), str(value.dtype)) for name, value in each.items()}
        for each in (loaded, full(model, optimizer))
    ]


def assert_same_bits(found, expected):
    assert set(found) == set(expected)
    for name, (value, dtype) in found.items():
        assert dtype == expected[name][1], name
        assert (value == expected[name][0]).all(), name


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("where", ["inside", "around", "changing"])
def test_checkpoints_of_two_three_and_one_ranks(pool, tmp_path, where, level, dtype):
    """Loading keeps all bits, and runs in float32 are bitwise equal to a run in one process.

    On the CPU, the rounding of bfloat16 additions depends on the position in the tensor.
    """
    kinds = ["inside", "around", "inside"] if where == "changing" else [where] * 3
    folders = [None, *(str(tmp_path / name) for name in ("two", "three", "one"))]
    spans = [range(2), range(2, 5), range(5, STEPS)]
    saved = {}
    for number, (ranks, kind, steps) in enumerate(zip((2, 3, 1), kinds, spans, strict=True)):
        results = pool.run(3, resume, ranks, steps, folders[number], folders[number + 1], kind, level, dtype)
        results = results[:ranks]
        if number:
            for loaded, _ in results:
                assert_same_bits(loaded, saved)
        for _, found in results:
            assert_same_bits(found, results[0][1])
        saved = results[0][1]
        keys = {"weight", "momentum_buffer", f"error_feedback_{level}", f"error_feedback_{level}_valid"}
        assert {name.split(".")[1] for name in saved} == keys
        for name in SHAPES:
            missing = name == "b" and steps.stop in (2, 5)
            assert bool(saved[f"{name}.error_feedback_{level}_valid"][0]) != missing
        model, optimizer = build(whole, kind, level, dtype)
        train(model, optimizer, whole, range(steps.stop))
        for name, value in full(model, optimizer).items():
            difference = abs(saved[name][0] - value.float().numpy()).max()
            assert difference <= (0 if dtype == torch.float32 else 0.05), name


def load_plain(rank, group, where):
    """Load state into parameters of another placement, without torch.distributed.checkpoint."""
    grid = DeviceMesh("cpu", torch.arange(3))
    model, optimizer = build(
        lambda tensor: distribute_tensor(tensor, grid, [Shard(0)]), where, "update", torch.float32
    )
    saved = optimizer.state_dict()
    other, theirs = build(
        lambda tensor: distribute_tensor(tensor, grid, [Shard(1)]), where, "update", torch.float32
    )
    try:
        theirs.load_state_dict(copy.deepcopy(saved))
    except ValueError as error:
        return str(error)
    return ""


def test_state_of_another_placement_raises(pool):
    for sentence in pool.run(3, load_plain, "inside"):
        assert "momentum_buffer" in sentence and "placements differ" in sentence


@pytest.mark.parametrize("full_state", [False, True])
def test_full_state_dicts(pool, full_state):
    results = pool.run(3, through_full_state, full_state)
    assert all(results)


def through_full_state(rank, group, full_state):
    """Save a full or a sharded state dict, load it, and continue."""
    mesh = DeviceMesh("cpu", torch.arange(3))

    def place(tensor):
        return distribute_tensor(tensor, mesh, [Shard(0)])

    options = StateDictOptions(full_state_dict=full_state)
    model, optimizer = build(place, "inside", "update", torch.bfloat16)
    train(model, optimizer, place, range(2))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    other, theirs = build(place, "inside", "update", torch.bfloat16)
    set_optimizer_state_dict(other, theirs, saved, options=options)
    with torch.no_grad():
        for mine, new in zip(model.parameters(), other.parameters(), strict=True):
            new.copy_(mine)
    for each, its in ((model, optimizer), (other, theirs)):
        train(each, its, place, range(2, 4))
    one, two = full(model, optimizer), full(other, theirs)
    return all(torch.equal(one[name], two[name]) for name in one)
