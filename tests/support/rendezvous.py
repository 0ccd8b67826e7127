"""Simulates the stages' programs under rendezvous: a message moves only when both ends are ready for it.

gloo accepts a message before its receive is posted; NCCL does not, so a wrong order that passes every test on
gloo could hang there. The simulation needs no processes:

- A message is delivered when its send and its receive have both started, in order within its queue (an edge
  of the pipeline in one direction).
- An operation on a channel starts when all earlier ones on it are delivered. `P2PChannels` has one channel
  per queue; one channel per rank is a single communicator.
- A rank blocks at a wait until the message is delivered, and at a send while too many sends are pending.
- An all-reduce, of the norm or of tied parameters, completes when all its ranks have started it.
- So does an exchange of tokens between the replicas of a stage, which must start exchanges in the same order.
  A forward or backward continues only then; in an overlapped pair the other half runs in between.
- Where `device_waits` returns True, a rank blocks until everything it has started completes: the first launch
  of a kernel, or an allocation, may synchronize with the device at any time.

Any interleaving shows whether there is a deadlock. Each rank waits for one thing at a time, and what is
delivered stays delivered. So a step that can run can still run after any other step, as in a Kahn network,
and all orders end in the same state at the same virtual times. A rank that synchronizes less gets at least as
far: if nothing hangs where all ranks synchronize at every step, nothing hangs where some do at some steps.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.support.rank_programs import Program, Step
from titan_async.pipelining.actions import Action

__all__ = ["one_channel_per_direction", "one_channel_per_rank", "walk"]

COST = {"F": 1, "B": 2}

Queue = tuple[int, int]
"""The rank that sends and the one that receives: an edge of the pipeline in one direction."""


class Blocked(NamedTuple):
    """A rank that never completes a step."""

    rank: int
    step: Step
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank} at {self.step}: {self.reason}"


class Outcome(NamedTuple):
    """The errors that a walk found, and its virtual time."""

    blocked: list[Blocked]
    misdelivered: list[str]  # messages that the wrong action received
    left: list[str]  # messages that only one end had started when all programs ended
    time: float

    @property
    def fine(self) -> bool:
        return not (self.blocked or self.misdelivered or self.left)


def one_channel_per_direction(rank: int, queue: Queue) -> Hashable:
    """Messages wait only for earlier ones of the same edge and direction."""
    return queue


def one_channel_per_rank(rank: int, queue: Queue) -> Hashable:
    """All messages of a rank are serialized."""
    return None


def walk(
    ranks: list[Program],
    channel: Callable[[int, Queue], Hashable] = one_channel_per_direction,
    sends_block: bool = False,
    device_waits: Callable[[int, Step], bool] = lambda rank, step: False,
    replicas: int = 1,
) -> Outcome:
    """Runs all ranks until each has ended or is blocked.

    Args:
        ranks: the programs, one pipeline after the other.
        channel: returns a key for the channel of a rank that carries a queue's messages.
        sends_block: whether a rank blocks at a send until its message is delivered.
        device_waits: whether a rank waits for its device before a step.
        replicas: number of pipelines; the ranks of a stage in all of them exchange tokens.
    """
    network = _Network(channel, len(ranks), replicas)
    processes = [_Process(r, program, network, sends_block, device_waits) for r, program in enumerate(ranks)]
    runs = [process.run() for process in processes]
    blocked: dict[int, Blocked] = {}
    network.awake.update(range(len(ranks)))
    while network.awake:
        rank = network.awake.pop()
        try:
            blocked[rank] = next(runs[rank])
        except StopIteration:
            blocked.pop(rank, None)
    left = [] if blocked else [f"{transfer} at rank {transfer.rank}" for transfer in network.left()]
    return Outcome(
        [blocked[r] for r in sorted(blocked)], network.misdelivered, left, max(p.clock for p in processes)
    )


@dataclass(eq=False)
class _Transfer:
    """One end of a message."""

    rank: int
    queue: Queue
    label: tuple[int | Action | None, ...]  # filling and action
    time: float  # at which it was posted, then started, then delivered
    batch: "_Batch | None" = None
    done: bool = False

    def __str__(self) -> str:
        return f"{self.label[1]} of filling {self.label[0]}"


@dataclass(eq=False)
class _Batch:
    """Transfers that start together on a channel."""

    channel: "deque[_Batch]"
    transfers: list[_Transfer] = field(default_factory=list)
    undelivered: int = 0


class _Network:
    """The transfers that were posted, started and delivered."""

    def __init__(self, channel: Callable[[int, Queue], Hashable], ranks: int, replicas: int) -> None:
        self._channel = channel
        self.ranks, self.replicas, self.stages = ranks, replicas, ranks // replicas
        self._joined: dict[Hashable, list[_Transfer]] = defaultdict(list)
        self._channels: dict[Hashable, deque[_Batch]] = defaultdict(deque)
        self._started: dict[tuple[int, Queue], deque[_Transfer]] = defaultdict(deque)
        self.awake: set[int] = set()  # ranks that may no longer be blocked
        self.misdelivered: list[str] = []

    def post(self, transfers: list[_Transfer]) -> None:
        """Adds transfers that start together on one rank."""
        batches: dict[Hashable, _Batch] = {}
        for transfer in transfers:
            name = transfer.rank, self._channel(transfer.rank, transfer.queue)
            transfer.batch = batches.setdefault(name, _Batch(self._channels[name]))
            transfer.batch.transfers.append(transfer)
        for batch in batches.values():
            batch.undelivered = len(batch.transfers)
            batch.channel.append(batch)
            if batch.channel[0] is batch:
                self._start(batch, 0)

    def join(self, name: Hashable, members: int, transfer: _Transfer) -> None:
        """Adds one rank to a collective, which completes when all have joined."""
        joined = self._joined[name]
        joined.append(transfer)
        if len(joined) == members:
            if len({each.label for each in joined}) > 1:
                self.misdelivered.append(" exchanges with ".join(map(str, joined)))
            for each in joined:
                each.done, each.time = True, max(other.time for other in joined)
                self.awake.add(each.rank)

    def left(self) -> Iterator[_Transfer]:
        """The transfers that were posted and not delivered."""
        for channel in self._channels.values():
            for batch in channel:
                yield from (transfer for transfer in batch.transfers if not transfer.done)

    def _start(self, batch: _Batch, time: float) -> None:
        for transfer in batch.transfers:
            transfer.time = max(transfer.time, time)
            self._started[transfer.rank, transfer.queue].append(transfer)
        for queue in {transfer.queue for transfer in batch.transfers}:
            self._deliver(queue)

    def _deliver(self, queue: Queue) -> None:
        source, destination = queue
        sends, receives = self._started[source, queue], self._started[destination, queue]
        while sends and receives:
            ends = sends.popleft(), receives.popleft()
            if ends[0].label != ends[1].label:
                self.misdelivered.append(f"{ends[0]} arrives as {ends[1]}")
            time = max(end.time for end in ends)
            for end in ends:
                end.done, end.time = True, time
                self.awake.add(end.rank)
            for end in ends:
                self._finish(end)

    def _finish(self, transfer: _Transfer) -> None:
        batch = transfer.batch
        assert batch is not None
        batch.undelivered -= 1
        if not batch.undelivered:
            batch.channel.popleft()
            if batch.channel:
                self._start(batch.channel[0], max(end.time for end in batch.transfers))


class _Process:
    """One rank, as `ScheduleAsync2BW` and `P2PChannels` run it; its methods yield while it is blocked."""

    def __init__(
        self,
        rank: int,
        program: Program,
        network: _Network,
        sends_block: bool,
        device_waits: Callable[[int, Step], bool],
    ) -> None:
        self._rank, self._program, self._network = rank, program, network
        self._replica, self._stage = divmod(rank, network.stages)
        self._exchanging: deque[_Transfer] = deque()
        self._exchanged = 0
        self._sends_block, self._device_waits = sends_block, device_waits
        self._started: list[_Transfer] = []
        self._norms: dict[tuple[int, Action | None], _Transfer] = {}
        self._receiving: dict[tuple[int, Action | None], _Transfer] = {}
        self._sending: dict[str, deque[_Transfer]] = {"F": deque(), "B": deque()}
        self.clock = 0.0

    def run(self) -> Iterator[Blocked]:
        for steps in _fused(self._program.steps):
            step = steps[0]
            if self._device_waits(self._rank, step):
                for transfer in self._started:
                    yield from self._until_done(transfer, step, f"the device waits for {transfer}")
                self._started.clear()
            if step.kind == "compute":
                self.clock += COST[step.action.kind] + (COST["B"] if step.overlapped else 0)
            elif step.kind == "exchange":
                self._exchanging.append(self._join(("experts", self._stage), self._network.replicas, step))
            elif step.kind == "collect":
                transfer = self._exchanging.popleft()
                yield from self._until_done(transfer, step, f"the tokens of {transfer} do not arrive")
            elif step.kind == "wait":
                yield from self._wait(step)
            elif step.kind == "close":
                yield from self._close(step)
            elif step.kind == "finish":
                if self._stage == 0 and self._network.stages > 1:
                    tied = self._join(("tied", self._replica), 2, step)
                    yield from self._until_done(tied, step, "the last stage is late")
            elif step.kind == "tie":
                if self._stage > 0:
                    self._join(("tied", self._replica), 2, step)
            elif step.kind == "reduce":
                self._norms[step.filling, step.action] = self._join("norm", self._network.ranks, step)
            elif step.kind == "update":
                yield from self._update(step)
            else:
                yield from self._post(steps)

    def _join(self, name: Hashable, members: int, step: Step) -> _Transfer:
        assert step.action is not None
        label: tuple[int | Action | None, ...] = step.filling, Action("B", step.action.batch, 0)
        place = label
        if step.kind == "exchange":  # matched by order; `join` checks that the labels are equal
            label, place = (step.filling, step.action, step.number), (self._exchanged,)
            self._exchanged += 1
        transfer = _Transfer(self._rank, (self._rank, self._rank), label, self.clock)
        self._started.append(transfer)
        self._network.join((name, place), members, transfer)
        return transfer

    def _wait(self, step: Step) -> Iterator[Blocked]:
        transfer = self._receiving.pop((step.filling, step.action), None)
        while transfer is None:
            yield Blocked(self._rank, step, "its receive was not posted before")
        yield from self._until_done(transfer, step, "the message does not arrive")

    def _update(self, step: Step) -> Iterator[Blocked]:
        norm = self._norms.get((step.filling, step.action))
        while norm is None:
            yield Blocked(self._rank, step, "its gradient was not complete before")
        yield from self._until_done(norm, step, "the all-reduce of the norm does not complete")

    def _close(self, step: Step) -> Iterator[Blocked]:
        while self._receiving:
            yield Blocked(self._rank, step, "it has posted receives that nothing waits for")
        for kind in self._sending:
            yield from self._until_sending(0, kind, step)

    def _post(self, steps: list[Step]) -> Iterator[Blocked]:
        sends = [step for step in steps if step.kind == "send"]
        for kind, count in Counter(step.action.kind for step in sends).items():
            yield from self._until_sending(self._program.max_pending_sends - count, kind, steps[0])
        transfers = [_transfer(self._rank, step, self.clock) for step in steps]
        for step, transfer in zip(steps, transfers, strict=True):
            if step.kind == "send":
                self._sending[step.action.kind].append(transfer)
            else:
                self._receiving[transfer.label] = transfer
        self._started += transfers
        self._network.post(transfers)
        if self._sends_block:
            for step in sends:
                yield from self._until_sending(0, step.action.kind, step)

    def _until_sending(self, most: int, kind: str, step: Step) -> Iterator[Blocked]:
        pending = self._sending[kind]
        while len(pending) > most:
            yield from self._until_done(pending[0], step, f"{pending[0]} is not taken")
            pending.popleft()

    def _until_done(self, transfer: _Transfer, step: Step, reason: str) -> Iterator[Blocked]:
        while not transfer.done:
            yield Blocked(self._rank, step, reason)
        self.clock = max(self.clock, transfer.time)


def _fused(steps: list[Step]) -> Iterator[list[Step]]:
    together: list[Step] = []
    for step in steps:
        if together and not step.fused:
            yield together
            together = []
        together.append(step)
    if together:
        yield together


def _transfer(rank: int, step: Step, time: float) -> _Transfer:
    assert step.action is not None
    downstream = 1 if step.action.kind == "F" else -1
    queue = (rank, rank + downstream) if step.kind == "send" else (rank - downstream, rank)
    return _Transfer(rank, queue, (step.filling, step.action), time)
