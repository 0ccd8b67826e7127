"""The exchange at which overlapped pairs hand over, against torch's functional one."""

from typing import Any

import pytest
import torch
from torch.distributed._functional_collectives import all_to_all_single as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.support.processes import Pools
from titan_async.pipelining import all_to_all_single, overlap

SENT = {
    "even": [[2, 2], [2, 2]],
    "uneven": [[1, 3], [4, 2]],
    "nothing to one": [[0, 3], [0, 2]],
    "nothing from one": [[0, 0], [2, 1]],
    "nothing": [[0, 0], [0, 0]],
}
"""By rank: its rows for each rank."""


def count_hand_overs() -> list[int]:
    """Count the operator's hand-overs, without handing over."""
    counts = [0]

    def hand_over() -> None:
        counts[0] += 1

    overlap.hand_over = hand_over
    return counts


def weigh(exchange: Any, x: Any, w: Any, came: list[int], went: list[int], group: Any) -> Any:
    """There and back, with a computation in between that differs for every row."""
    there = exchange(x * w, came, went, group)
    return exchange((there * there).transpose(0, 1).contiguous().transpose(0, 1), went, came, group) * w


def exchanges(rank: int, group: Any, sent: list[list[int]], backend: str | None, as_mesh: bool) -> Any:
    """Values and gradients of both exchanges, and the number of hand-overs."""
    torch._dynamo.reset()
    counts = count_hand_overs()
    went, came = sent[rank], [row[rank] for row in sent]
    where = DeviceMesh("cpu", [0, 1]) if as_mesh else group
    found = []
    for exchange in (functional, all_to_all_single):
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(sum(went), 3, generator=generator, dtype=torch.float64, requires_grad=True)
        w = torch.randn(sum(went), 1, generator=generator, dtype=torch.float64, requires_grad=True)
        run = weigh if backend is None else torch.compile(weigh, backend=backend, fullgraph=True)
        y = run(exchange, x, w, came, went, where)
        y.pow(3).sum().backward()
        found.append([y.detach(), x.grad, w.grad])
    return found, counts[0]


@pytest.mark.covering(1)
@pytest.mark.parametrize("as_mesh", [False, True], ids=["group", "mesh"])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("sent", SENT.values(), ids=SENT.keys())
def test_it_equals_the_functional_collective(
    pools: Pools, sent: list[list[int]], backend: str | None, as_mesh: bool
) -> None:
    assert_equal(pools(2).run(2, exchanges, sent, backend, as_mesh))


@pytest.mark.slow
def test_compiled_by_inductor_it_equals_the_functional_collective(pools: Pools) -> None:
    assert_equal(pools(2).run(2, exchanges, SENT["uneven"], "inductor", False))


def assert_equal(results: list[Any]) -> None:
    for (wanted, found), hand_overs in results:
        assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
        assert hand_overs == 4  # twice in the forward, twice in the backward


def routed(rank: int, group: Any) -> Any:
    """Splits that a compiled function computes itself, as torchtitan's dispatcher does; and their kinds."""
    torch._dynamo.reset()
    torch._dynamo.config.capture_scalar_outputs = True

    def route(x: Any, counts: Any) -> Any:
        went = counts.tolist()
        came = functional(counts, None, None, group).tolist()
        return all_to_all_single(x, came, went, group)

    x = torch.arange(5.0).to(torch.bfloat16).view(5, 1)
    counts = torch.tensor([[2, 3], [4, 1]][rank])
    compiled = torch.compile(route, backend="aot_eager", fullgraph=True)
    return [run(x, counts) for run in (route, compiled)], all_to_all_single(counts, [1, 1], [1, 1], group)


def test_splits_may_be_known_only_at_run_time(pools: Pools) -> None:
    rows = [[0, 1, 0, 1, 2, 3], [2, 3, 4, 4]]
    for rank, (found, counts) in enumerate(pools(2).run(2, routed)):
        wanted = torch.tensor(rows[rank], dtype=torch.bfloat16).view(-1, 1)
        assert all(torch.equal(each, wanted) and each.dtype == wanted.dtype for each in found)
        assert counts.tolist() == [[2, 4], [3, 1]][rank]


def recomputed(rank: int, group: Any) -> Any:
    """Hand-overs of a checkpointed exchange and of its backward, without and with a policy that saves it."""
    counts = count_hand_overs()
    saved = torch.ops.titan_async.all_to_all_single.default

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = operator == saved
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    found, gradients = [], []
    for options in ({}, {"context_fn": lambda: create_selective_checkpoint_contexts(policy)}):
        x = torch.full((2, 1), 2.0 + rank, requires_grad=True)
        before = counts[0]

        def block(x: Any) -> Any:
            return all_to_all_single(x.square(), [1, 1], [1, 1], group).square()

        y = checkpoint(block, x, use_reentrant=False, **options)
        forward = counts[0]
        y.sum().backward()
        found.append((forward - before, counts[0] - forward))
        gradients.append(x.grad.flatten().tolist())
    return found, gradients


def test_selective_checkpointing_can_save_it(pools: Pools) -> None:
    for rank, (found, gradients) in enumerate(pools(2).run(2, recomputed)):
        assert found == [(1, 2), (1, 1)]
        assert gradients == [[4 * (2.0 + rank) ** 3] * 2] * 2


def test_fake_tensors_do_not_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def hand_over() -> None:
        raise AssertionError("a fake tensor handed over")

    monkeypatch.setattr(overlap, "hand_over", hand_over)
    for device in ("meta", "cpu"):
        with torch._subclasses.FakeTensorMode():
            x = torch.empty(5, 2, device=device, dtype=torch.float16, requires_grad=True)
        y = torch.ops.titan_async.all_to_all_single(x, [3, 4], [5, 0], "an unused group")
        assert (y.shape, y.dtype, y.device.type) == ((7, 2), torch.float16, device)
        y.sum().backward()
        assert x.grad.shape == x.shape
