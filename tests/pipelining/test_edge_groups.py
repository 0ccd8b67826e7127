"""Process groups of a pipeline's edges: their ranks, their NCCL options, and early receives."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import PipelineStage

from tests.support.processes import Pools, WorkerPool
from titan_async import _group_internals
from titan_async.pipelining import ScheduleAsync2BW, p2p_channels
from titan_async.pipelining.actions import ALL_EARLY, EarlyReceives
from titan_async.pipelining.p2p_channels import MAX_CTAS, P2PChannels

M = 4


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    return pools(4)


def schedule_of(rank: int, group: dist.ProcessGroup, tied: bool = False) -> ScheduleAsync2BW:
    torch.manual_seed(rank)
    module = torch.nn.Linear(4, 4)
    stage = PipelineStage(module, rank, group.size(), torch.device("cpu"), group=group)
    parameters = [module.weight] if tied and (stage.is_first or stage.is_last) else []
    loss_fn = torch.nn.functional.mse_loss
    return ScheduleAsync2BW(stage, M, loss_fn=loss_fn, tied_parameters=parameters)


def run(schedule: ScheduleAsync2BW, rank: int, size: int, rows: int = M, train: bool = True) -> None:
    call = schedule.step if train else schedule.eval
    call(
        *([torch.ones(rows, 4)] if rank == 0 else []),
        target=torch.ones(rows, 4) if rank == size - 1 else None,
    )


def train_clipped(rank: int, group: dist.ProcessGroup) -> ScheduleAsync2BW:
    """Run three batches with tied parameters and clipping, which create all groups, and a drain."""
    schedule = schedule_of(rank, group, tied=True)
    for _ in range(3):
        run(schedule, rank, group.size())
        if schedule.gradient_ready:
            schedule.clip_grad_norm_(1.0)
            schedule._stage.submod.zero_grad()
    schedule.drain()
    return schedule


def train_bound(rank: int, group: dist.ProcessGroup) -> tuple[list[tuple[int, ...]], str]:
    """Create all groups, as if `init_process_group` had been given a device."""
    made: list[tuple[int, ...]] = []
    default, size = distributed_c10d._get_default_group(), group.size()
    joint_group, count = p2p_channels.joint_group, distributed_c10d._world.group_count

    def noting(ranks: Any, *options: Any) -> dist.ProcessGroup:
        made.append(tuple(sorted(ranks)))
        return joint_group(ranks, *options)

    def split(parent: dist.ProcessGroup) -> None:
        raise AssertionError("a split takes all ranks of the parent")

    default.bound_device_id = torch.device("cuda", 0)
    try:
        with (
            mock.patch.object(distributed_c10d, "_get_split_source", split),
            mock.patch.object(p2p_channels, "joint_group", noting),
            mock.patch.object(p2p_channels, "_edge_groups", weakref.WeakKeyDictionary()),
        ):
            schedule = train_clipped(rank, group)
            run(
                schedule, rank, size, 2 * M, train=False
            )  # of another shape, so that all ranks compare shapes
        assert distributed_c10d._world.group_count == count
        return made, str(default.bound_device_id)
    finally:
        default.bound_device_id = None


@pytest.mark.parametrize("stages", [3, 4])
def test_no_group_is_split_from_a_default_group_that_is_bound_to_a_device(
    pool: WorkerPool, stages: int
) -> None:
    """A split by two ranks alone hangs under NCCL; three of four ranks cannot split at all."""
    results = pool.run(stages, train_bound)
    assert all(device == "cuda:0" for _, device in results)
    edges = [made for made, _ in results]
    # Those of even stages and the next ones first, so that they connect at the same time.
    assert edges[1] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert edges[2] == [*[(2, 3)] * 2 * (stages == 4), (1, 2), (1, 2)]


def threads_that_read(rank: int, group: dist.ProcessGroup) -> tuple[int, int]:
    """The number of gloo's threads before and after the first steps of a pipeline with its own groups."""

    def count() -> int:
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        return sum(name.startswith("gloo_tcp") for name in names)

    before = count()
    with mock.patch.object(p2p_channels, "_edge_groups", weakref.WeakKeyDictionary()):
        train_clipped(rank, group)
        return before, count()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux lists them")
def test_edge_groups_share_the_thread_of_the_default_group(pool: WorkerPool) -> None:
    """Each would wake up every 10 ms."""
    for before, after in pool.run(3, threads_that_read):
        assert after == before > 0


def losses_of_complex_numbers(rank: int, group: dist.ProcessGroup, x: torch.Tensor) -> list[float]:
    torch.manual_seed(rank)
    module = torch.nn.Linear(4, 4, dtype=x.dtype)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), group=group)
    schedule = ScheduleAsync2BW(stage, M, loss_fn=distance)
    losses: list[torch.Tensor] = []
    with torch.no_grad():  # torch itself trains no such stages
        schedule.eval(*([x] if rank == 0 else []), target=x if rank else None, losses=losses)
    return [loss.item() for loss in losses]


def distance(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).abs().square().mean()


def test_complex_activations_are_sent(pool: WorkerPool) -> None:
    """No backend supports complex tensors."""
    x = torch.randn(M, 4, dtype=torch.complex64)
    modules = []
    for rank in range(2):
        torch.manual_seed(rank)
        modules.append(torch.nn.Linear(4, 4, dtype=x.dtype))
    expected = [distance(modules[1](modules[0](row)), row).item() for row in x.split(1)]
    assert pool.run(2, losses_of_complex_numbers, x)[1] == pytest.approx(expected, rel=1e-5)


def beginning_of_a_step(rank: int, group: dist.ProcessGroup) -> list[str]:
    """The operations of the last stage in the third step up to its first wait, in order."""
    schedule, size, started = schedule_of(rank, group, tied=True), group.size(), []
    run(schedule, rank, size)
    run(schedule, rank, size)
    schedule.clip_grad_norm_(1.0)  # from now on the norm is reduced within the step
    schedule._stage.submod.zero_grad()

    def noting(owner: Any, name: str) -> Any:
        call = getattr(owner, name)

        def noted(*args: Any) -> Any:
            started.append(f"{type(owner).__name__}.{name}")
            return call(*args)

        return mock.patch.object(owner, name, noted)

    channels = schedule._executor._channels
    with (
        noting(channels, "recv"),
        noting(channels, "wait"),
        noting(schedule._executor.tied, "start"),
        noting(schedule._executor.clipper, "start"),
    ):
        run(schedule, rank, size)
    schedule.drain()
    return started[: started.index("P2PChannels.wait")]


def test_the_last_stage_receives_before_it_reduces_what_others_have_yet_to_complete(
    pool: WorkerPool,
) -> None:
    """As in `tests/support/rendezvous.py`: the computation of a reduction may wait for the device."""
    first, *reductions = pool.run(2, beginning_of_a_step)[-1]
    assert first == "P2PChannels.recv"
    assert reductions[:2] == ["TiedParameters.start", "GradientClipper.start"]


class Options:
    """Replaces `ProcessGroupNCCL.Options`, which only builds of torch with NCCL have."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(min_ctas=None, max_ctas=None)


@pytest.mark.parametrize(
    ("backends", "device", "is_nccl"),
    [
        ("cuda:nccl", "cuda", True),
        ("cpu:gloo,cuda:nccl", "cuda", True),
        ("cpu:gloo,cuda:nccl", "cpu", False),
        ("cpu:gloo,cuda:gloo", "cuda", False),
    ],
)
def test_few_thread_blocks_of_nccl_wait_for_a_message(
    monkeypatch: pytest.MonkeyPatch, backends: str, device: str, is_nccl: bool
) -> None:
    asked: list[dict[str, Any]] = []

    def new_group(ranks: list[int], **options: Any) -> object:
        asked.append(options)
        return mock.create_autospec(dist.ProcessGroup, instance=True)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "send", lambda *args: None)
    monkeypatch.setattr(distributed_c10d, "_get_default_group", lambda: SimpleNamespace(bound_device_id=None))
    monkeypatch.setattr(_group_internals, "_groups", set())
    monkeypatch.setattr(torch, "tensor", lambda *args, **kwargs: None)
    p2p_channels._edge_group(0, 1, torch.device(device))
    (options,) = asked
    if not is_nccl:
        assert options["backend"] is None and options["pg_options"] is None
        return
    assert options["backend"] == "nccl" and options["pg_options"].is_high_priority_stream
    config = options["pg_options"].config
    assert (config.min_ctas, config.max_ctas) == (1, MAX_CTAS) and MAX_CTAS <= 4


@pytest.mark.parametrize(
    ("device", "choice", "near", "lookahead", "early"),
    [
        ("cpu", None, True, 0, ALL_EARLY),
        ("cuda", None, True, 1, EarlyReceives(False, False)),
        ("cuda", None, False, 0, EarlyReceives(False, False)),
        ("cuda", None, False, 1, EarlyReceives(True, False)),
        ("cpu", False, False, 1, EarlyReceives(False, False)),
        ("cuda", True, True, 0, ALL_EARLY),
    ],
)
def test_which_receives_are_early(
    device: str, choice: bool | None, near: bool, lookahead: int, early: EarlyReceives
) -> None:
    """The defaults cannot deadlock, however ranks wait for their devices: see `test_rendezvous.py`."""
    channels = P2PChannels(SimpleNamespace(device=torch.device(device)))  # type: ignore[arg-type]
    channels._edges = p2p_channels._EdgeGroups(previous_on_same_host=near)
    assert channels.early(choice, lookahead) == early


def where_upstream_is(rank: int, group: dist.ProcessGroup) -> bool:
    with (
        mock.patch.object(p2p_channels.socket, "gethostname", return_value=f"host{rank // 2}"),
        mock.patch.object(p2p_channels, "_edge_groups", weakref.WeakKeyDictionary()),
    ):
        schedule = schedule_of(rank, group)
        run(schedule, rank, group.size())
        edges = schedule._executor._channels._edges
        schedule.drain()
    assert edges is not None
    return edges.previous_on_same_host


def test_a_stage_detects_whether_the_previous_one_is_on_its_host(pool: WorkerPool) -> None:
    assert pool.run(4, where_upstream_is) == [False, True, False, True]
