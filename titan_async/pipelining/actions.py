"""The order of work of PipeDream-2BW, as plain lists that can be executed, printed, simulated or checked.

A stage runs the forward of microbatch k, then the backward of microbatch k - w, where w is the number of
microbatches it keeps in flight. Microbatches are numbered through all batches, so the pairs run across the
batch boundary and the pipeline never empties (PipeDream-2BW, arXiv 2006.09503, section 3.1).

With w = d - 1 - r at stage r of d, neighbours wait for each other's messages in every pair. A stage that
holds two more than the next one instead of one hides their latency; `lookahead` spends activations on that.

With `overlap` the two of a pair are computed together, each while the other's tokens travel between experts.
Then the backward must not depend on the forward, and a hop to the next stage takes a whole pair each way:
w = 2 (d - 1 - r) + 1.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

__all__ = [
    "EARLY",
    "Action",
    "Early",
    "Instruction",
    "drain_actions",
    "drain_program",
    "evaluation_program",
    "in_flight",
    "least_microbatches",
    "slots",
    "step_actions",
    "step_program",
]


class Action(NamedTuple):
    """One unit of compute: the forward ("F") or backward ("B") of one microbatch of one batch."""

    kind: Literal["F", "B"]
    batch: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.batch}.{self.microbatch}"


class Instruction(NamedTuple):
    """One thing that a stage does for an action, in the order in which its process does them.

    "receive" posts the receive of the action's input from the neighbour and goes on, "wait" waits until that
    input is there, "compute" runs the action, "send" starts sending its output to the other neighbour.
    "finish" follows the last backward of a batch: the stage's gradient of it is complete.
    """

    kind: Literal["receive", "wait", "compute", "send", "finish"]
    action: Action
    beside: Action | None = None
    """The backward that "compute" runs together with a forward: an overlapped pair."""

    def __str__(self) -> str:
        return f"{self.kind} {self.action}" + (f" with {self.beside}" if self.beside else "")


class Early(NamedTuple):
    """For which kind of action a stage posts a receive while it still computes the one of that kind before.

    A late receive is posted just before its wait. Anything may make a process wait for all work of its
    device (a kernel that is loaded, memory that is allocated), receives and sends included, and two
    neighbours may do so at once. Neither may then have posted a receive of what the other still has to
    compute, nor wait for a send to be received. Without lookahead that holds if no backward is early.
    """

    forward: bool
    backward: bool

    def of(self, kind: Literal["F", "B"]) -> bool:
        """Whether those of forwards are, or of backwards."""
        return self.forward if kind == "F" else self.backward


EARLY = Early(True, True)


def in_flight(stage_index: int, num_stages: int, lookahead: int = 0, overlap: bool = False) -> int:
    """Microbatches whose backward is still to come when a stage's `step` returns.

    That is d - 1 - r, and `lookahead` more at the first stage; in between their number falls evenly, because
    a stage must hold at least one more than the next. The last stage holds none. With `overlap` it is
    2 (d - 1 - r) + 1 instead of d - 1 - r.
    """
    behind = num_stages - 1 - stage_index
    ahead = lookahead * behind // (num_stages - 1) if behind else 0
    return ahead + (2 * behind + 1 if overlap else behind)


def least_microbatches(num_stages: int, lookahead: int = 0, overlap: bool = False) -> int:
    """Microbatches that a batch must have for the delay to be one: those that the first stage holds.

    Without `overlap` one more, d + lookahead: no stage holds the whole of a batch.
    """
    return in_flight(0, num_stages, lookahead, overlap) + (not overlap)


def slots(
    stage_index: int, num_stages: int, lookahead: int = 0, early: Early = EARLY, overlap: bool = False
) -> int:
    """Microbatches that a stage needs receive buffers for at a time.

    Those in flight, the one whose forward comes next, and the one after it if its input is received early;
    the first stage receives no activations.
    """
    return in_flight(stage_index, num_stages, lookahead, overlap) + (
        2 if stage_index and early.forward else 1
    )


def step_actions(
    stage_index: int,
    num_stages: int,
    n_microbatches: int,
    batch: int,
    lookahead: int = 0,
    overlap: bool = False,
) -> list[Action]:
    """What one stage computes in one step, in order.

    Args:
        stage_index: the stage, r.
        num_stages: the number of stages, d.
        n_microbatches: microbatches in a batch, m; at least `least_microbatches`.
        batch: the batch's number since the pipeline was last empty. Batch 0 has no tail of a former batch
            to finish.
        lookahead: microbatches that the first stage holds beyond those that it must.
        overlap: whether a forward and the backward that directly follows it are computed together.

    Returns:
        The m forwards of `batch`, each followed by the backward that is then due: those of the former
        batch's tail first, then those of the head of `batch`.

    Examples:
        The first of two stages, in its second step, runs the two forwards of batch 1, and finishes batch 0
        before it begins with the backwards of batch 1:

        >>> [str(action) for action in step_actions(0, 2, n_microbatches=2, batch=1)]
        ['F1.0', 'B0.1', 'F1.1', 'B1.0']
    """
    tail = in_flight(stage_index, num_stages, lookahead, overlap)
    actions = []
    for microbatch in range(n_microbatches):
        actions.append(Action("F", batch, microbatch))
        due = batch * n_microbatches + microbatch - tail
        if due >= 0:
            actions.append(Action("B", *divmod(due, n_microbatches)))
    return actions


def drain_actions(
    stage_index: int,
    num_stages: int,
    n_microbatches: int,
    batch: int,
    lookahead: int = 0,
    overlap: bool = False,
) -> list[Action]:
    """The backwards that empty one stage after the step of `batch`, in order."""
    tail = in_flight(stage_index, num_stages, lookahead, overlap)
    return [Action("B", batch, i) for i in range(n_microbatches - tail, n_microbatches)]


def step_program(
    stage_index: int,
    num_stages: int,
    n_microbatches: int,
    batch: int,
    lookahead: int = 0,
    early: Early = EARLY,
    overlap: bool = False,
) -> list[Instruction]:
    """`step_actions` with their messages.

    An early receive is posted one action of its kind ahead, so that the message is under way while the stage
    computes. Forwards of the next step are not known to come, so its first one is received in it; the next
    backward always comes, in the next step or in a drain, so its receive stays posted between steps. That of
    the very first backward is posted once the stage has sent the forwards that it depends on.
    """
    shape = stage_index, num_stages
    actions = step_actions(*shape, n_microbatches, batch, lookahead, overlap)
    tail = in_flight(*shape, lookahead, overlap)
    first_gradient = []
    if stage_index < num_stages - 1 and early.backward:
        first_gradient.append(Instruction("receive", Action("B", 0, 0)))
    program = []
    if stage_index > 0 and early.forward:
        program.append(Instruction("receive", Action("F", batch, 0)))
    for together in _together(actions, overlap):
        if together[0] == Action("F", 0, tail):
            program += first_gradient
        around = [i for action in together for i in _around(action, *shape, n_microbatches, early)]
        program += around if len(together) == 1 else _pair(around)
    if batch == 0 and tail == n_microbatches:
        program += first_gradient
    return _with_late_receives(program, early)


def drain_program(
    stage_index: int,
    num_stages: int,
    n_microbatches: int,
    batch: int,
    lookahead: int = 0,
    early: Early = EARLY,
    overlap: bool = False,
) -> list[Instruction]:
    """`drain_actions` with their messages; the step before has posted the first receive, if it is early."""
    actions = drain_actions(stage_index, num_stages, n_microbatches, batch, lookahead, overlap)
    last = Action("B", batch, n_microbatches - 1)
    program = [
        instruction
        for action in actions
        for instruction in _around(action, stage_index, num_stages, n_microbatches, early, last)
    ]
    return _with_late_receives(program, early)


def evaluation_program(
    stage_index: int, num_stages: int, n_microbatches: int, early: Early = EARLY
) -> list[Instruction]:
    """One batch of forwards with their messages, for an empty pipeline."""
    program = []
    if stage_index > 0 and early.forward:
        program.append(Instruction("receive", Action("F", 0, 0)))
    for microbatch in range(n_microbatches):
        program += _around(Action("F", 0, microbatch), stage_index, num_stages, n_microbatches, early)
    return _with_late_receives(program, early)


def _together(actions: list[Action], overlap: bool) -> list[list[Action]]:
    """Actions as they are computed: one by one, or a forward with the backward that directly follows it."""
    groups: list[list[Action]] = []
    for action in actions:
        if overlap and action.kind == "B":
            groups[-1].append(action)
        else:
            groups.append([action])
    return groups


def _pair(instructions: list[Instruction]) -> list[Instruction]:
    """Let a forward and a backward be computed together, from the instructions of both."""
    forward, backward = (action for kind, action, _ in instructions if kind == "compute")
    before = [i for kind in ("receive", "wait") for i in instructions if i.kind == kind]
    after = [i for i in instructions if i.kind in ("send", "finish")]
    if after and after[-1].kind == "finish":
        # The next stage has finished this batch. It may take what the forward sends only when it has the norm
        # of the batch's gradient, in which this stage has to take part.
        after.sort(key=Instruction("send", forward).__eq__)  # to the end
    return [*before, Instruction("compute", forward, backward), *after]


def _with_late_receives(program: list[Instruction], early: Early) -> list[Instruction]:
    """Insert the receives that are not early, after the last computation before their wait.

    And before the send of its result, or two neighbours would wait for each other to receive. But that of a
    gradient after a finish that splits the sends of a pair: the next stage may send it only when all have
    finished.
    """
    complete: list[Instruction] = []
    for instruction in program:
        kind, action, _ = instruction
        if kind == "wait" and not early.of(action.kind):
            place = len(complete)
            while place and complete[place - 1].kind != "compute":
                if action.kind == "B" and _splits_sends(complete[place - 1 :]):
                    break
                place -= 1
            while complete[place:] and complete[place].kind == "receive":
                place += 1
            complete.insert(place, Instruction("receive", action))
        complete.append(instruction)
    return complete


def _splits_sends(rest: list[Instruction]) -> bool:
    """Whether a finish is followed by a send, as in an overlapped pair."""
    return rest[0].kind == "finish" and any(i.kind == "send" for i in rest)


def _around(
    action: Action,
    stage_index: int,
    num_stages: int,
    n_microbatches: int,
    early: Early,
    last: Action | None = None,
) -> Iterator[Instruction]:
    from_neighbour, to_neighbour = stage_index > 0, stage_index < num_stages - 1
    if action.kind == "B":
        from_neighbour, to_neighbour = to_neighbour, from_neighbour
    if from_neighbour:
        following = _following(action, n_microbatches)
        comes = action != last and (action.kind == "B" or following.batch == action.batch)
        if comes and early.of(action.kind):
            yield Instruction("receive", following)
        yield Instruction("wait", action)
    yield Instruction("compute", action)
    if to_neighbour:
        yield Instruction("send", action)
    if action.kind == "B" and action.microbatch == n_microbatches - 1:
        yield Instruction("finish", action)  # the neighbour has its message first


def _following(action: Action, n_microbatches: int) -> Action:
    number = action.batch * n_microbatches + action.microbatch + 1
    return Action(action.kind, *divmod(number, n_microbatches))
