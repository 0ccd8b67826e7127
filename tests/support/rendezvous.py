"""Walks the stages' programs under rendezvous, where a message moves only when both ends are ready for it.

gloo takes a sent message before its receive is posted; NCCL does not, so a wrong order that no test on gloo
notices would hang there. The walk is a simulation without processes:

- a message is delivered when its send and its receive have both started, in order within its queue (an edge
  of the pipeline in one direction);
- an operation on a channel starts only when all earlier ones on it are delivered; one channel per queue is
  how `P2PChannels` does it, one channel a rank is a single communicator;
- a process stops at a wait until the message is there, and at a send until few enough are under way;
- an all-reduce, of the norm or of tied parameters, is over when all its ranks have started it;
- so is an exchange of tokens between the replicas of a stage, which have to start them in the same order; a
  forward or backward goes on only then, but in an overlapped pair its other half has its turn before;
- where the walk says so, a process stops until all is over that it has started: something has waited for the
  whole device, as the first launch of a kernel, or an allocation, may do at any time.

Any interleaving shows whether there is a deadlock. A rank decides nothing by what happens to come first: it
waits for one thing, and what is once delivered stays so. Thus a step that can be taken can still be taken
after any other, as in a Kahn network, and all orders end in the same state, at the same virtual times. And a
rank that stops less gets as far: if nothing hangs where all wait for the device at every step, nothing does
where some wait at some of them.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal, NamedTuple

from titan_async.pipelining import actions
from titan_async.pipelining.actions import (
    ALL_EARLY,
    Action,
    EarlyReceives,
    Instruction,
    drain_program,
    evaluation_program,
    slots,
    step_program,
)
from titan_async.pipelining.p2p_channels import max_pending_sends

__all__ = [
    "Program",
    "Step",
    "one_channel_per_direction",
    "one_channel_per_rank",
    "overwritten",
    "programs",
    "walk",
]

COST = {"F": 1, "B": 2}
EVALUATION = 0

Queue = tuple[int, int]
"""The rank that sends and the one that receives: an edge of the pipeline in one direction."""


class Step(NamedTuple):
    """An instruction of the pipeline's `filling`-th filling.

    "finish" ends a stage's gradient of a batch, and at the first one joins the all-reduce of tied parameters
    and waits for it; "tie" joins it at the last one. "exchange" starts an action's exchange of tokens of that
    `number`, and "collect" waits for it. "reduce" joins the norm's, and "update" waits for that, as clipping
    does: the optimizer follows. "close" waits for all sends before it ends.
    """

    kind: Literal[
        "receive",
        "wait",
        "compute",
        "send",
        "finish",
        "tie",
        "reduce",
        "update",
        "close",
        "exchange",
        "collect",
    ]
    filling: int
    action: Action | None = None
    fused: bool = False  # starts together with the step before
    overlapped: Action | None = None  # the backward of an overlapped pair
    number: int = 0

    def __str__(self) -> str:
        return " ".join(map(str, filter(None, (self.kind, self.action))))


@dataclass
class Program:
    """All that one rank does."""

    steps: list[Step]
    n_microbatches: int
    slots: int
    max_pending_sends: int


def programs(
    d: int,
    m: int,
    lookahead: int,
    plan: Iterable[int],
    early: Sequence[EarlyReceives] | EarlyReceives = ALL_EARLY,
    overlap: bool = False,
    exchanges: tuple[int, int] = (0, 0),
) -> list[Program]:
    """What each rank does over `plan`: numbers of batches with a drain after each, 0 for an evaluation.

    With so many exchanges of tokens in each forward and in each backward.
    """
    of_rank = [early] * d if isinstance(early, EarlyReceives) else early
    return [_program((r, d, m), lookahead, plan, of_rank[r], overlap, exchanges) for r in range(d)]


def _program(
    shape: tuple[int, int, int],
    lookahead: int,
    plan: Iterable[int],
    early: EarlyReceives,
    overlap: bool,
    exchanges: tuple[int, int],
) -> Program:
    stage, d, m = shape
    # By its module's name, for a test to plant another.
    tail = actions.in_flight(stage, d, lookahead, overlap)
    steps: list[Step] = []
    for filling, batches in enumerate(plan):
        if batches == EVALUATION:
            steps += _steps(evaluation_program(*shape, early), filling, exchanges)
        for batch in range(batches):
            program = _steps(step_program(*shape, batch, lookahead, early, overlap), filling, exchanges)
            steps += _with_collectives(program, filling, batch - 1, stage == d - 1, tail)
        if batches:
            program = _steps(
                drain_program(*shape, batches - 1, lookahead, early, overlap), filling, exchanges
            )
            steps += _with_collectives(program, filling, batches - 1, stage == d - 1, tail)
        steps.append(Step("close", filling))
    return Program(steps, m, slots(stage, d, lookahead, early, overlap), max_pending_sends(tail))


def _steps(instructions: list[Instruction], filling: int, exchanges: tuple[int, int]) -> list[Step]:
    steps = []
    for kind, action, overlapped in instructions:
        steps.append(Step(kind, filling, action, overlapped=overlapped))
        if kind == "compute":
            halves = [_turns(half, filling, exchanges) for half in (overlapped, action) if half]
            steps += [step for turns in zip_longest(*halves, fillvalue=[]) for turn in turns for step in turn]
    return steps


def _turns(action: Action, filling: int, exchanges: tuple[int, int]) -> list[list[Step]]:
    """What a forward or a backward does between any two times that it hands over."""
    count = exchanges[action.kind == "B"]
    turns: list[list[Step]] = [[] for _ in range(count + 1)]
    for number in range(count):
        turns[number].append(Step("exchange", filling, action, number=number))
        turns[number + 1].append(Step("collect", filling, action, number=number))
    return turns


def _with_collectives(program: list[Step], filling: int, batch: int, is_last: bool, tail: int) -> list[Step]:
    """A call that delivers the gradient of `batch`: without a tail it was complete in the call before."""
    if batch < 0:
        return program
    gradient = Action("B", batch, 0)
    if not tail:
        first = int(bool(program) and program[0].kind == "receive")
        return [
            *program[:first],
            Step("tie", filling, gradient),
            Step("reduce", filling, gradient),
            *program[first:],
            Step("update", filling, gradient),
        ]
    steps = []
    for step in program:
        steps.append(step)
        if step.kind == "finish":
            steps += [Step("tie", filling, gradient)] * is_last
            steps.append(Step("reduce", filling, gradient))
    return [*steps, Step("update", filling, gradient)]


class Blocked(NamedTuple):
    """A rank that stands at a step for ever."""

    rank: int
    step: Step
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank} at {self.step}: {self.reason}"


class Outcome(NamedTuple):
    """What a walk has found, and the virtual time it took."""

    blocked: list[Blocked]
    misdelivered: list[str]  # messages that another action received than the one they were for
    left: list[str]  # messages that one end only had started when all programs were over
    time: float

    @property
    def fine(self) -> bool:
        return not (self.blocked or self.misdelivered or self.left)


def one_channel_per_direction(rank: int, queue: Queue) -> Hashable:
    """Messages of one edge and direction wait for each other and for no other ones."""
    return queue


def one_channel_per_rank(rank: int, queue: Queue) -> Hashable:
    """All that a rank sends and receives goes one after another."""
    return None


def walk(
    ranks: list[Program],
    channel: Callable[[int, Queue], Hashable] = one_channel_per_direction,
    sends_block: bool = False,
    device_waits: Callable[[int, Step], bool] = lambda rank, step: False,
    replicas: int = 1,
) -> Outcome:
    """Let all ranks run as far as they get.

    Args:
        ranks: the programs, of one pipeline after the other.
        channel: a name for the channel, of those of a rank, that a queue's messages take there.
        sends_block: stop each process at a send until its message is delivered.
        device_waits: whether a rank's process waits for its device before a step.
        replicas: pipelines, whose ranks of a stage exchange tokens.
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
    """What starts together on a channel."""

    channel: "deque[_Batch]"
    transfers: list[_Transfer] = field(default_factory=list)
    undelivered: int = 0


class _Network:
    """What has been posted, has started, and is delivered."""

    def __init__(self, channel: Callable[[int, Queue], Hashable], ranks: int, replicas: int) -> None:
        self._channel = channel
        self.ranks, self.replicas, self.stages = ranks, replicas, ranks // replicas
        self._joined: dict[Hashable, list[_Transfer]] = defaultdict(list)
        self._channels: dict[Hashable, deque[_Batch]] = defaultdict(deque)
        self._started: dict[tuple[int, Queue], deque[_Transfer]] = defaultdict(deque)
        self.awake: set[int] = set()  # ranks whose wait may be over
        self.misdelivered: list[str] = []

    def post(self, transfers: list[_Transfer]) -> None:
        """Take what starts together at one rank."""
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
        """Take one rank's part of a collective."""
        joined = self._joined[name]
        joined.append(transfer)
        if len(joined) == members:
            if len({each.label for each in joined}) > 1:
                self.misdelivered.append(" exchanges with ".join(map(str, joined)))
            for each in joined:
                each.done, each.time = True, max(other.time for other in joined)
                self.awake.add(each.rank)

    def left(self) -> Iterator[_Transfer]:
        """What has been posted and not delivered."""
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
    """One rank, doing what `ScheduleAsync2BW` and `P2PChannels` do; its methods yield while it waits."""

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
                yield from self._until_done(transfer, step, f"the tokens of {transfer} do not come")
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
        if step.kind == "exchange":  # by their order: what they are for must turn out to be the same
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
        yield from self._until_done(transfer, step, "the message does not come")

    def _update(self, step: Step) -> Iterator[Blocked]:
        norm = self._norms.get((step.filling, step.action))
        while norm is None:
            yield Blocked(self._rank, step, "its gradient was not complete before")
        yield from self._until_done(norm, step, "the norm does not come")

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


def overwritten(program: Program) -> list[str]:
    """Microbatches whose buffer is received into, or computed into, while they still need it.

    A buffer is taken when its receive is posted, or by the forward where nothing is received, and free again
    after the microbatch's backward; in an evaluation, after its forward. A rank's own order decides this.
    """
    computed = [step for step in program.steps if step.kind == "compute"]
    trained = {step.filling for step in computed if step.action.kind == "B" or step.overlapped}
    held: dict[tuple[str, int], Step] = {}
    found = []
    for step in program.steps:
        if step.action is None:
            continue
        kind, slot = step.action.kind, _slot(program, step.action)
        if step.kind == "receive" or (step.kind == "compute" and kind == "F"):
            holder = held.setdefault((kind, slot), step)
            if (holder.filling, holder.action) != (step.filling, step.action):
                found.append(f"{step} of filling {step.filling} over {holder.action} of {holder.filling}")
        done = step.action if kind == "B" or step.filling not in trained else step.overlapped
        if step.kind == "compute" and done:
            for direction in "FB":
                held.pop((direction, _slot(program, done)), None)
    return found


def _slot(program: Program, action: Action) -> int:
    return (action.batch * program.n_microbatches + action.microbatch) % program.slots
