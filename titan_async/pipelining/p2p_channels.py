"""P2P channels between a stage and its neighbors: each edge has one process group for each direction.

Messages of one process group arrive in the order in which they are sent, and no message waits for one of
another group. With a single NCCL communicator, whose operations run one after another, an early receive would
block all sends that follow it.
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
from titan_async.pipelining.actions import ALL_EARLY, Action, EarlyReceives

__all__ = ["MAX_CTAS", "P2PChannels", "max_pending_sends", "wait_for_stage"]

MAX_CTAS = 4
"""Upper limit of the thread blocks that NCCL uses for a message. Each occupies a multiprocessor from the post
of the receive until the message has arrived. NCCL's default is about 16 over NVLink, an eighth of an H100,
and 4 between nodes. A message is tens of MB and does not need more."""

_Sends = deque[tuple[list[Tensor], list[dist.Work]]]

_Op = Literal["send", "recv"]


@dataclass(eq=False)
class _EdgeGroups:
    """The process groups of a stage's edges, by operation and by kind of action."""

    groups: dict[tuple[_Op, str], dist.ProcessGroup] = field(default_factory=dict)
    previous_on_same_host: bool = False
    in_use: bool = False


_edge_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, list[_EdgeGroups]]" = weakref.WeakKeyDictionary()
_abandoned: list[dist.Work] = []


def max_pending_sends(in_flight: int) -> int:
    """Sends of one direction that may be pending before a stage waits for the oldest.

    By then the neighbor has answered the earlier ones, so that the wait returns at once except with the
    largest lookaheads. A limit that did not grow with the microbatches in flight would deadlock.
    """
    return in_flight + 2


class P2PChannels:
    """Sends to and receives from the previous and the next stage.

    Args:
        stage: the stage of this rank.
    """

    def __init__(self, stage: _PipelineStageBase) -> None:
        self._stage = stage
        self._edges: _EdgeGroups | None = None
        self._pending_recvs: dict[Action, list[dist.Work]] = {}
        self._pending_sends: dict[str, _Sends] = {"F": deque(), "B": deque()}
        # gloo cancels a send whose handle is freed: the sends of a schedule that is dropped must outlive it.
        weakref.finalize(self, _abandon, list(self._pending_sends.values())).atexit = False

    def open(self) -> None:
        """Create the edge process groups, or reuse idle ones. Collective over the pipeline the first time.

        Schedules of the same pipeline share their groups as long as no two of them have microbatches in
        flight, so that the number of connections does not grow with the number of schedules.
        """
        if self._edges is not None:
            return
        group = group_of(self._stage)
        existing = _edge_groups.setdefault(group, [])
        self._edges = next((edges for edges in existing if not edges.in_use), None)
        if self._edges is None:
            self._edges = _connect(self._stage, group)
            existing.append(self._edges)
        self._edges.in_use = True

    def close(self) -> None:
        """Wait until all sends have completed. No receive may be pending."""
        assert self._edges is not None and not self._pending_recvs
        for kind in self._pending_sends:
            self._wait_for_sends(kind, 0)
        self._edges.in_use = False
        self._edges = None

    def early(self, choice: bool | None, lookahead: int) -> EarlyReceives:
        """Which receives are posted early; see `ScheduleAsync2BW`."""
        assert self._edges is not None
        if choice is not None:
            return EarlyReceives(choice, choice)
        if self._stage.device.type == "cpu":
            return ALL_EARLY
        # A stage that is ahead of the next one idles until the gradient arrives, and so has posted its
        # receive by then. An activation arrives early only with lookahead; without it the receive would be
        # pending nearly all the time. Within a host a transfer is short.
        return EarlyReceives(forward=lookahead > 0 and not self._edges.previous_on_same_host, backward=False)

    def recv(self, action: Action, buffers: list[Tensor]) -> None:
        """Post the receives of the input of `action`."""
        self._pending_recvs[action] = self._start("recv", action, buffers)

    def wait(self, action: Action) -> None:
        """Wait for the input of `action`; on an accelerator, the current stream waits."""
        neighbor = self._stage.stage_index + (-1 if action.kind == "F" else 1)
        wait_for_stage(self._pending_recvs.pop(action), self._stage, neighbor)

    def send(self, action: Action, outputs: list[Tensor], max_pending: int) -> None:
        """Start sending the output of `action` when fewer than `max_pending` of its kind are pending."""
        self._wait_for_sends(action.kind, max_pending - 1)
        self._pending_sends[action.kind].append((outputs, self._start("send", action, outputs)))

    def _start(self, op: _Op, action: Action, tensors: list[Tensor]) -> list[dist.Work]:
        assert self._edges is not None
        group = self._edges.groups[op, action.kind]
        # As `dist.isend` and `dist.irecv`, which spend more time on looking up the group than on the call.
        start, neighbor = getattr(group, op), 1 - group.rank()
        return [start([torch.view_as_real(t) if t.is_complex() else t], neighbor, 0) for t in tensors]

    def _wait_for_sends(self, kind: str, max_pending: int) -> None:
        pending = self._pending_sends[kind]
        neighbor = self._stage.stage_index + (1 if kind == "F" else -1)
        while len(pending) > max_pending:
            _, works = pending.popleft()
            wait_for_stage(works, self._stage, neighbor)


def wait_for_stage(works: Iterable[dist.Work], stage: _PipelineStageBase, other: int) -> None:
    """Wait for communication of `stage` with the stage `other`.

    Raises:
        RuntimeError: naming both stages, if the other one has failed or does not answer in time.
    """
    try:
        for work in works:
            wait_for_message(work, stage.device)
    except RuntimeError as error:
        raise RuntimeError(
            f"stage {stage.stage_index} lost contact with stage {other}: see the error of that stage "
            f"({' '.join(str(error).split())})"
        ) from error


def _connect(stage: _PipelineStageBase, group: dist.ProcessGroup) -> _EdgeGroups:
    index, edges = stage.stage_index, _EdgeGroups()
    rank_of = {
        i: dist.get_global_rank(group, stage.stage_index_to_group_rank[i])
        for i in (index - 1, index, index + 1)
        if 0 <= i < stage.num_stages
    }
    # Every other edge of the pipeline, then those between: all edges of each half connect at the same time.
    for neighbor in sorted((index - 1, index + 1), key=lambda other: min(index, other) % 2):
        if neighbor in rank_of:
            ranks = rank_of[index], rank_of[neighbor]
            previous, following = ranks if neighbor > index else ranks[::-1]
            forwards, same_host = _edge_group(previous, following, stage.device)
            backwards, _ = _edge_group(following, previous, stage.device)
            if neighbor > index:
                edges.groups |= {("send", "F"): forwards, ("recv", "B"): backwards}
            else:
                edges.groups |= {("recv", "F"): forwards, ("send", "B"): backwards}
                edges.previous_on_same_host = same_host
    return edges


def _edge_group(source: int, destination: int, device: torch.device) -> tuple[dist.ProcessGroup, bool]:
    """A process group of two neighbors, and on `destination` whether both are on one host.

    It connects here: later, one rank may have to wait for the other.
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
    """The backend of the edge groups and its options; None for those of the default group."""
    if f"{device.type}:nccl" not in dist.get_backend_config():
        return None, None
    # At high priority: otherwise its blocks wait until the kernels of the next computation leave room.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.min_ctas, options.config.max_ctas = 1, MAX_CTAS
    return "nccl", options


def _abandon(pending_sends: list[_Sends]) -> None:
    _abandoned.extend(work for pending in pending_sends for _, works in pending for work in works)
