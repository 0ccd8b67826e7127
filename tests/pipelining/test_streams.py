"""Waits of the stream of forwards and backwards, recorded by simulated streams of a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining import PipelineStage
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.processes import Pools, WorkerPool
from tests.support.sharded import shard
from titan_async.pipelining import ScheduleAsync2BW, side_stream
from titan_async.pipelining._fsdp_internals import FsdpParameters

WIDTH, M = 4, 3


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    return pools(2)


class Stream:
    """A stream without a device, which records its waits."""

    device = torch.device("cpu")

    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: Stream) -> None:
        self.log.add("wait", self.name, other.name)

    def wait_event(self, event: Event) -> None:
        self.log.add("wait", self.name, event.stream)
        self.log.waits.append((len(self.log.entries), event.position))

    def record_event(self) -> Event:
        return Event(self.name, len(self.log.entries))

    def __enter__(self) -> None:
        self.log.streams.append(self)

    def __exit__(self, *_: Any) -> None:
        self.log.streams.pop()


class Event:
    def __init__(self, stream: str, position: int = 0) -> None:
        self.stream, self.position = stream, position

    def record(self) -> Event:
        return self


class Log:
    """Records operations and their streams within `standing_in`."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, ...]] = []
        self.made: list[str] = []
        self.waits: list[tuple[int, int]] = []  # the positions of a wait and of its event in the entries
        self.streams = [Stream(self, "compute")]

    def add(self, *entry: str) -> None:
        self.entries.append(entry)

    def current(self, device: Any = None) -> Stream:
        return self.streams[-1]

    def make(self, *_: Any, **__: Any) -> Stream:
        self.made.append(f"side {len(self.made)}")
        return Stream(self, self.made[-1])

    def make_of_fsdp(self, *_: Any, **__: Any) -> Stream:
        return Stream(self, "fsdp")

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        def keep(tensor: Tensor, stream: Stream) -> None:
            self.add("keep", stream.name)

        with ExitStack() as patches:
            for place, name, new in (
                (side_stream, "_has_streams", lambda device: True),
                (torch, "Stream", self.make),
                (torch.accelerator, "current_stream", self.current),
                (torch.cpu, "Stream", self.make_of_fsdp),
                (torch.cpu, "Event", lambda: Event(self.current().name)),
                (torch.cpu, "current_stream", self.current),
                (torch.cpu, "stream", lambda stream: stream),
                (torch.Tensor, "record_stream", keep),
            ):
                patches.enter_context(mock.patch.object(place, name, new))
            yield


class Layer(nn.Linear):
    """Records each forward."""

    log: Log

    def forward(self, x: Tensor) -> Tensor:
        self.log.add("forward", self.log.current().name)
        return super().forward(x)


def train(rank: int, group: Any, sharded: bool, batches: int) -> Log:
    """The log of a run that clips each batch and checks that it is finite."""
    log = Log()
    with log.standing_in():
        module = nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(4)))
        for layer in module:
            layer.log = log
        if sharded:
            mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("pp", "dp"))["dp"]
            for part in [*module, module]:
                shard(part, mesh)
        stage = PipelineStage(module, rank, 2, torch.device("cpu"), group=group)
        # Behind the simulated streams is the CPU, which needs no warm-up.
        with mock.patch("titan_async.pipelining.shape_inference.needs_warmup", return_value=False):
            run(rank, log, stage, batches)
    log.streams.clear()
    return log


def run(rank: int, log: Log, stage: PipelineStage, batches: int) -> None:
    own = ScheduleAsync2BW(stage, M, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    reduce, deliver, wait = (
        FsdpParameters.reduce_grads,
        own._executor._publish,
        FSDPParamGroup.wait_for_unshard,
    )

    def noted_reduce(self: Any) -> Any:
        log.add("reduce", log.current().name)
        return reduce(self)

    def noted_deliver(batch: int) -> None:
        log.add("deliver", log.current().name)
        deliver(batch)

    def noted_wait(self: Any) -> None:
        if self._all_gather_result is not None and self.fsdp_params:
            log.add("gathered", log.current().name)
        wait(self)

    with (
        mock.patch.object(FsdpParameters, "reduce_grads", noted_reduce),
        mock.patch.object(own._executor, "_publish", noted_deliver),
        mock.patch.object(FSDPParamGroup, "wait_for_unshard", noted_wait),
    ):
        for x in torch.randn(batches, 2 * M, WIDTH):
            log.add("step", "")
            own.step(*(() if rank else (x,)), target=x if rank else None)
            if own.gradient_ready:
                own.clip_grad_norm_(1.0)
                assert own.gradient_is_finite()
                optimizer.step()
                optimizer.zero_grad()


def steps_of(entries: list[tuple[str, ...]]) -> list[list[tuple[str, ...]]]:
    """The entries of each step, after those of the first, which also infers shapes."""
    starts = [index for index, entry in enumerate(entries) if entry[0] == "step"]
    return [entries[a:b] for a, b in zip(starts[1:], starts[2:], strict=False)]


@pytest.mark.parametrize("sharded", [False, True])
def test_compute_waits_for_a_gradient_when_it_is_delivered(pool: WorkerPool, sharded: bool) -> None:
    """And in the middle of a step neither for its reduction nor for its norm."""
    for log in pool.run(2, train, sharded, 5):
        for step in steps_of(log.entries):
            delivery = step.index(("deliver", "compute"))
            # FSDP's own streams gather weights, for which compute waits before the layer that needs them.
            assert ("wait", "compute", "side 0") not in step[:delivery]
            assert ("wait", "compute", "side 0") in step[delivery:]
            if sharded:
                reduction = next(index for index, entry in enumerate(step) if entry[0] == "reduce")
                assert step[reduction] == ("reduce", "side 0")
                assert ("keep", "side 0") in step[reduction:]
                assert ("wait", "side 0", "fsdp") in step[reduction:]
                waits = [entry for entry in step[reduction:delivery] if entry[:2] == ("wait", "compute")]
                assert not waits


def test_layers_are_gathered_one_by_one(pool: WorkerPool) -> None:
    """The first forward of a batch does not wait for the weights of the layers after it."""
    for log in pool.run(2, train, True, 5):
        for step in steps_of(log.entries):
            order = [entry[0] for entry in step if entry[0] in ("gathered", "forward")]
            assert order == ["gathered", "forward"] * 4 + ["forward"] * 4 * (M - 1)


def test_the_last_stage_does_not_wait_for_the_batch_after(pool: WorkerPool) -> None:
    """It has started to reduce that one when it delivers a gradient."""
    log = pool.run(2, train, True, 5)[1]
    starts = [index for index, entry in enumerate(log.entries) if entry[0] == "reduce"]
    joins = [
        (wait, event) for wait, event in log.waits if log.entries[wait - 1] == ("wait", "compute", "side 0")
    ]
    assert len(joins) == 4
    for newest, (wait, event) in zip(starts[1:], joins, strict=True):
        assert event < newest < wait


def test_streams_are_made_once(pool: WorkerPool) -> None:
    """A device has 32; a further one would be a communicator's."""
    for log in pool.run(2, train, True, 40):
        assert len(log.made) == 2


class HostWaits(TorchDispatchMode):
    """Collects the operators for which the host waits for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        names = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal", "masked_select", "unique")
        if func.overloadpacket.__name__.removeprefix("aten::") in names:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def collect_waits(rank: int, group: Any, sharded: bool, tied: bool) -> tuple[list[str], list[str]]:
    """Host waits of steady steps with their clips, and of a step that reads a value."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)), nn.BatchNorm1d(WIDTH))
    if sharded:
        mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("pp", "dp"))["dp"]
        for part in [*module, module]:
            shard(part, mesh)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), group=group)
    ties = [module[0].weight] if tied else []
    own = ScheduleAsync2BW(stage, M, loss_fn=nn.functional.mse_loss, tied_parameters=ties)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found: list[list[str]] = []
    for batch, x in enumerate(torch.randn(6, 2 * M, WIDTH)):
        with HostWaits() as waits:
            own.step(*(() if rank else (x,)), target=x if rank else None)
            if own.gradient_ready:
                norm = own.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
            if batch == 4:
                float(norm)
        found.append(waits.found)
    with HostWaits() as waits:
        own.drain()
        own.clip_grad_norm_(1.0)
    return [*found[2], *found[3], *found[5], *waits.found], found[4]


@pytest.mark.parametrize(("sharded", "tied"), [(False, False), (False, True), (True, False)])
def test_the_host_never_waits_within_a_step(pool: WorkerPool, sharded: bool, tied: bool) -> None:
    for steady, asked in pool.run(2, collect_waits, sharded, tied):
        assert steady == []
        assert len(asked) == 1  # so the collector sees them
