"""Messages between a stage and its neighbours, received early where that is safe, and sent without waiting.

Every edge of the pipeline has a process group of its own for each direction. Messages of one group arrive in
the order in which they are sent, and nothing waits for a message of another group: with NCCL, whose
operations on one communicator run one after another, an early receive would otherwise hold up what is sent
after it.
"""

import hashlib
import socket
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.stage import _PipelineStageBase

from titan_async._group_internals import joint_group, wait_for_message
from titan_async.pipelining._torch_internals import group_of
from titan_async.pipelining.actions import EARLY, Action, Early

__all__ = ["MAX_CTAS", "Messages", "most_pending", "wait_for_stage"]

MAX_CTAS = 4
"""Thread blocks that NCCL may use for a message. Each holds a multiprocessor from the post of the receive
until the message has come; left to itself NCCL takes about 16 over NVLink, an eighth of an H100, and 4
between nodes. A message is tens of MB and does not need more."""

_Sends = deque[tuple[list[Tensor], list[dist.Work]]]

_Call = Literal["send", "recv"]


@dataclass(eq=False)
class _Lanes:
    """The groups of a stage's edges, by what it does with their messages and by kind of action."""

    groups: dict[tuple[_Call, str], dist.ProcessGroup] = field(default_factory=dict)
    upstream_is_near: bool = False  # the stage before is on this host
    busy: bool = False


_lanes: "weakref.WeakKeyDictionary[dist.ProcessGroup, list[_Lanes]]" = weakref.WeakKeyDictionary()
_abandoned: list[dist.Work] = []


def most_pending(in_flight: int) -> int:
    """Messages of one direction that a stage may have on their way before it waits for the oldest.

    The neighbour has then answered to those before, so that the wait is for nothing, but for the largest
    lookaheads. A bound that did not grow with the microbatches in flight would deadlock.
    """
    return in_flight + 2


class Messages:
    """What one stage sends to and receives from the stages before and after it.

    Args:
        stage: the stage of this rank.
    """

    def __init__(self, stage: _PipelineStageBase) -> None:
        self._stage = stage
        self._lanes: _Lanes | None = None
        self._receiving: dict[Action, list[dist.Work]] = {}
        self._sending: dict[str, _Sends] = {"F": deque(), "B": deque()}
        # gloo cancels a send whose handle is gone: those of a schedule that is dropped must outlive it.
        weakref.finalize(self, _abandon, list(self._sending.values())).atexit = False

    def open(self) -> None:
        """Get ready for an empty pipeline to fill. A collective of the pipeline's ranks the first time.

        Schedules of the same pipeline share their groups as long as no two of them have microbatches in
        flight, so that making many schedules does not make many connections.
        """
        if self._lanes is not None:
            return
        group = group_of(self._stage)
        there = _lanes.setdefault(group, [])
        self._lanes = next((lanes for lanes in there if not lanes.busy), None)
        if self._lanes is None:
            self._lanes = _connect(self._stage, group)
            there.append(self._lanes)
        self._lanes.busy = True

    def close(self) -> None:
        """Wait until everything that was sent has been taken. Nothing may be left to receive."""
        assert self._lanes is not None and not self._receiving
        for kind in self._sending:
            self._finish(kind, 0)
        self._lanes.busy = False
        self._lanes = None

    def early(self, choice: bool | None, lookahead: int) -> Early:
        """Which receives are to be early; see `ScheduleAsync2BW`."""
        assert self._lanes is not None
        if choice is not None:
            return Early(choice, choice)
        if self._stage.device.type == "cpu":
            return EARLY
        # A stage that is ahead is idle until the gradient comes, and so has posted its receive by then. An
        # activation is there early only with lookahead; without, its receive would wait nearly all the time.
        # Within a host a transfer is short.
        return Early(forward=lookahead > 0 and not self._lanes.upstream_is_near, backward=False)

    def receive(self, action: Action, buffers: list[Tensor]) -> None:
        """Post the receives of the input of `action`."""
        self._receiving[action] = self._start("recv", action, buffers)

    def wait(self, action: Action) -> None:
        """Wait until the input of `action` is there; on an accelerator, let the current stream wait."""
        neighbour = self._stage.stage_index + (-1 if action.kind == "F" else 1)
        wait_for_stage(self._receiving.pop(action), self._stage, neighbour)

    def send(self, action: Action, outputs: list[Tensor], most: int) -> None:
        """Start sending the output of `action`, once fewer than `most` of its kind are on their way."""
        self._finish(action.kind, most - 1)
        self._sending[action.kind].append((outputs, self._start("send", action, outputs)))

    def _start(self, call: _Call, action: Action, tensors: list[Tensor]) -> list[dist.Work]:
        assert self._lanes is not None
        group = self._lanes.groups[call, action.kind]
        # What `dist.isend` and `dist.irecv` come to, which take longer to look the group up than to call it.
        start, neighbour = getattr(group, call), 1 - group.rank()
        return [start([torch.view_as_real(t) if t.is_complex() else t], neighbour, 0) for t in tensors]

    def _finish(self, kind: str, most: int) -> None:
        pending = self._sending[kind]
        neighbour = self._stage.stage_index + (1 if kind == "F" else -1)
        while len(pending) > most:
            _, works = pending.popleft()
            wait_for_stage(works, self._stage, neighbour)


def wait_for_stage(works: Iterable[dist.Work], stage: _PipelineStageBase, other: int) -> None:
    """Wait for communication of `stage` with the stage `other`.

    Raises:
        RuntimeError: naming both, if the other one is gone or does not answer in time.
    """
    try:
        for work in works:
            wait_for_message(work, stage.device)
    except RuntimeError as error:
        raise RuntimeError(
            f"stage {stage.stage_index} waits in vain for stage {other}: see what went wrong there "
            f"({' '.join(str(error).split())})"
        ) from error


def _connect(stage: _PipelineStageBase, group: dist.ProcessGroup) -> _Lanes:
    index, lanes = stage.stage_index, _Lanes()
    rank_of = {
        i: dist.get_global_rank(group, stage.stage_index_to_group_rank[i])
        for i in (index - 1, index, index + 1)
        if 0 <= i < stage.num_stages
    }
    # Every other edge of the pipeline, then those between: all of each half connect at the same time.
    for neighbour in sorted((index - 1, index + 1), key=lambda other: min(index, other) % 2):
        if neighbour in rank_of:
            ranks = rank_of[index], rank_of[neighbour]
            upstream, downstream = ranks if neighbour > index else ranks[::-1]
            forwards, near = _edge_group(upstream, downstream, stage.device)
            backwards, _ = _edge_group(downstream, upstream, stage.device)
            if neighbour > index:
                lanes.groups |= {("send", "F"): forwards, ("recv", "B"): backwards}
            else:
                lanes.groups |= {("recv", "F"): forwards, ("send", "B"): backwards}
                lanes.upstream_is_near = near
    return lanes


def _edge_group(source: int, destination: int, device: torch.device) -> tuple[dist.ProcessGroup, bool]:
    """A group of two neighbours, and for `destination` whether both are on one host.

    Its connection is made here: later, either may wait for the other.
    """
    group = joint_group((source, destination), *_backend(device))
    host = hashlib.sha256(socket.gethostname().encode()).digest()
    token = torch.tensor(list(host), dtype=torch.uint8, device=device)
    if dist.get_rank() == source:
        dist.send(token, destination, group)
        return group, False
    dist.recv(token, source, group)
    return group, bytes(token.tolist()) == host


def _backend(device: torch.device) -> tuple[str | None, object | None]:
    """The backend of an edge's groups and its options, None for those of the default group."""
    if f"{device.type}:nccl" not in dist.get_backend_config():
        return None, None
    # At high priority, or its blocks would wait until the kernels of the next computation leave room.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.min_ctas, options.config.max_ctas = 1, MAX_CTAS
    return "nccl", options


def _abandon(sending: list[_Sends]) -> None:
    _abandoned.extend(work for pending in sending for _, works in pending for work in works)
