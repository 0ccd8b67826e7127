"""Stages compile in parallel before their first message, and the warm-up microbatch has no side effects."""

from __future__ import annotations

import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.support.processes import Pools, WorkerPool
from tests.support.sharded import shard
from tests.support.waiting import until
from titan_async import _group_internals as groups
from titan_async.pipelining import ScheduleAsync2BW, shape_inference
from titan_async.pipelining.p2p_channels import P2PChannels
from titan_async.pipelining.shape_inference import infer_eagerly

WIDTH, BATCHES = 4, 4


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    return pools(4)


def compile_side_by_side(rank: int, group: Any, folder: Path) -> tuple[int, list[int]]:
    """Each stage's compilation ends when those of all others have begun.

    Returns:
        Compilations, and messages that had been posted when each began.
    """
    torch._dynamo.reset()
    compiled: list[int] = []
    posted = mock.Mock(wraps=P2PChannels._start)

    def wait_for_the_others(graph: Any, inputs: Any) -> Any:
        compiled.append(posted.call_count)
        (folder / f"{len(compiled)} {rank}").touch()
        names = [folder / f"{len(compiled)} {other}" for other in range(group.size())]
        until(lambda: all(name.exists() for name in names), "the others do not compile meanwhile")
        return graph.forward

    module = nn.Linear(WIDTH, WIDTH)
    module.compile(backend=wait_for_the_others)
    stage = PipelineStage(module, rank, group.size(), torch.device("cpu"), group=group)
    own = ScheduleAsync2BW(stage, group.size(), loss_fn=nn.functional.mse_loss)
    x = torch.randn(2 * group.size(), WIDTH)
    args, target = (x,) if stage.is_first else (), x if stage.is_last else None
    with mock.patch.object(P2PChannels, "_start", lambda self, *given: posted(self, *given)):
        for _ in range(2):
            own.step(*args, target=target)
            own.drain()
            posted.reset_mock()
            with torch.no_grad():
                own.eval(*args, target=target)
            posted.reset_mock()
    return len(compiled), compiled


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_compile_in_parallel_before_any_message(pool: WorkerPool, stages: int, tmp_path: Path) -> None:
    """For training and for evaluation, each once."""
    for count, posted in pool.run(stages, compile_side_by_side, tmp_path):
        assert count == 2 and posted == [0, 0]


def fail_to_compile(rank: int, group: Any) -> str:
    def fail(graph: Any, inputs: Any) -> Any:
        raise ValueError("no\nkernel")

    module = nn.Linear(WIDTH, WIDTH)
    if rank == 1:
        module.compile(backend=fail)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), group=group)
    own = ScheduleAsync2BW(stage, 2, loss_fn=nn.functional.mse_loss)
    x = torch.randn(2, WIDTH)
    # The process also runs other tests, whose groups keep their timeouts.
    with (
        mock.patch.object(groups, "_timeout", timedelta(seconds=0.3)),
        mock.patch.object(groups, "_groups", weakref.WeakSet()),
    ):
        try:
            own.step(*((x,) if rank == 0 else ()), target=x if rank else None)
            own.drain()
        except RuntimeError as error:
            return str(error)
    return "no error"


def test_a_stage_that_fails_to_compile_is_named(pool: WorkerPool) -> None:
    other, failed = pool.run(2, fail_to_compile)
    assert failed.startswith("stage 1 failed on a first microbatch, before any message: ")
    assert "no kernel" in failed and "\n" not in failed
    assert other.startswith("stage 0 lost contact with stage 1: see the error of that stage")


class Part(nn.Module):
    """A module on which a warm-up could have side effects: RNG, statistics, counts, replaced buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.register_buffer("rows", torch.zeros(()))
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.rows += len(x)
        self.total = self.total + x.detach().sum(0)
        return self.dropout(self.norm(self.linear(x)))


class Headed(nn.Module):
    """A last stage whose loss applies its head and runs that backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Part(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return nn.functional.mse_loss(self.head(hidden), target)
        leaf = hidden.detach().requires_grad_()
        loss = nn.functional.mse_loss(self.head(leaf), target)
        loss.backward()
        assert leaf.grad is not None
        return loss.detach() + ((hidden - hidden.detach()) * leaf.grad).sum()


def train(
    rank: int, group: Any, sharded: bool, warms_up: bool
) -> tuple[dict[str, Tensor], list[Tensor], Tensor]:
    """State, losses, and the state of random numbers after a run with a drain and an evaluation."""
    torch.manual_seed(rank)
    module = (nn.Sequential(Part(), Part()), Headed())[rank]
    if sharded:
        mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("pp", "dp"))["dp"]
        for part in [*module.children(), module]:
            shard(part, mesh)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), group=group)
    loss_fn = module.loss if rank else nn.functional.mse_loss
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, foreach=False)
    losses: list[Tensor] = []
    with mock.patch.object(shape_inference, "needs_warmup", return_value=warms_up):
        own = ScheduleAsync2BW(stage, 3, loss_fn=loss_fn)
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)  # gradients accumulate
        for batch, x in enumerate(torch.randn(BATCHES, 6, WIDTH, generator=torch.Generator().manual_seed(0))):
            args, target, found = (x,) if rank == 0 else (), x if rank else None, []
            own.step(*args, target=target, losses=found)
            losses += found
            if batch == 2:
                own.drain()
                with torch.no_grad():
                    own.eval(*args, target=target, losses=found)
                losses += found
            if own.gradient_ready:
                own.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
        own.drain()
    state = {
        name: (value.full_tensor() if sharded and isinstance(value, nn.Parameter) else value).detach().clone()
        for name, value in module.state_dict(keep_vars=True).items()
    }
    return state, losses, torch.get_rng_state()


@pytest.mark.parametrize("sharded", [False, True])
def test_a_warmup_has_no_side_effects(pools: Pools, sharded: bool) -> None:
    """Bit by bit."""
    pool = pools(2)  # whose ranks all create the mesh
    for warm, cold in zip(pool.run(2, train, sharded, True), pool.run(2, train, sharded, False), strict=True):
        assert warm[0].keys() == cold[0].keys()
        for name in warm[0]:
            assert torch.equal(warm[0][name], cold[0][name]), name
        assert warm[1] == cold[1] and torch.equal(warm[2], cold[2])


def test_shapes_are_inferred_without_compiling_or_attending() -> None:
    """Uncompiled, FlexAttention would hold the scores of all heads."""
    query, key = (torch.randn(1, 4, 8, 16, requires_grad=True) for _ in range(2))
    value = torch.randn(1, 4, 8, 6, requires_grad=True)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 8, 8, device="cpu")

    def refuse(graph: Any, inputs: Any) -> Any:
        raise AssertionError("compiled")

    attend = torch.compile(flex_attention, backend=refuse)
    with infer_eagerly():
        assert not attend(query.detach(), key.detach(), value.detach(), block_mask=mask).any()
        # On the CPU flex_attention itself refuses to be differentiated.
        arguments = (lambda score, *_: score), mask.as_tuple(), 1.0, {}
        out, *_ = torch.ops.higher_order.flex_attention(query, key, value, *arguments)
    assert out.shape == (1, 4, 8, 6)
    gradients = torch.autograd.grad(out.sum(), (query, key, value))
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, value.shape]
