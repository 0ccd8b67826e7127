"""The order of operations of PipeDream-2BW, as lists that can be executed, printed, simulated or verified.

A stage runs the forward of microbatch k, then the backward of microbatch k - w, where w is the number of
microbatches it keeps in flight. Microbatches are numbered across batches, so the pairs continue across the
batch boundary and the pipeline is never flushed (PipeDream-2BW, arXiv 2006.09503, section 3.1).

With w = d - 1 - r at stage r of d, neighbors wait for each other's messages in every pair. A stage that
holds two more than the next one instead of one hides their latency; `lookahead` costs activations.

With `overlap` the two of a pair are computed together, each during the other's all-to-alls between experts.
Then the backward must not depend on the forward, and a hop to the next stage takes a whole pair each way:
w = 2 (d - 1 - r) + 1.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

__all__ = [
    "ALL_EARLY",
    "Action",
    "EarlyReceives",
    "Instruction",
    "check_shape",
    "drain_actions",
    "drain_program",
    "evaluation_program",
    "in_flight",
    "min_microbatches",
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
    """One operation of a stage for an action.

    "receive" posts the receive of the action's input from a neighbor and returns, "wait" waits for that
    input, "compute" runs the action, "send" starts to send its output to the other neighbor. "finish" follows
    the last backward of a batch, when the stage's gradient is complete.
    """

    kind: Literal["receive", "wait", "compute", "send", "finish"]
    action: Action
    overlapped: Action | None = None
    """The backward that "compute" runs together with a forward: an overlapped pair."""

    def __str__(self) -> str:
        return f"{self.kind} {self.action}" + (f" with {self.overlapped}" if self.overlapped else "")


class EarlyReceives(NamedTuple):
    """For which kinds of actions a stage posts a receive while it computes the previous action of that kind.

    A late receive is posted just before its wait. Loading a kernel or allocating memory may make a process
    wait for all work of its device, receives and sends included, and two neighbors may do so at once. Then
    neither may have posted a receive of what the other still has to compute, nor wait for a send to be
    received. Without lookahead that holds if no backward is early.
    """

    forward: bool
    backward: bool

    def of(self, kind: Literal["F", "B"]) -> bool:
        """Whether receives of forwards, or of backwards, are early."""
        return self.forward if kind == "F" else self.backward


ALL_EARLY = EarlyReceives(True, True)


def in_flight(stage_index: int, num_stages: int, lookahead: int = 0, overlap: bool = False) -> int:
    """Microbatches of a stage whose backward is pending when its `step` returns.

    That is d - 1 - r, and `lookahead` more at the first stage; this decreases evenly to none at the last
    stage, because a stage must hold at least one more than the next. With `overlap` it is 2 (d - 1 - r) + 1
    instead of d - 1 - r.
    """
    behind = num_stages - 1 - stage_index
    ahead = lookahead * behind // (num_stages - 1) if behind else 0
    return ahead + (2 * behind + 1 if overlap else behind)


def min_microbatches(num_stages: int, lookahead: int = 0, overlap: bool = False) -> int:
    """Microbatches that a batch needs for the delay to be one: those that the first stage holds.

    Without `overlap` one more, d + lookahead: no stage holds a whole batch.
    """
    return in_flight(0, num_stages, lookahead, overlap) + (not overlap)


def check_shape(num_stages: int, n_microbatches: int, lookahead: int, overlap: bool) -> None:
    """Check that a batch has enough microbatches.

    Raises:
        ValueError: if it has fewer than stages, or too few for `overlap` or `lookahead`.
    """
    if n_microbatches < num_stages:
        raise ValueError(
            f"Async2BW needs at least as many microbatches ({n_microbatches}) as stages "
            f"({num_stages}); use more microbatches or fewer stages"
        )
    needed = min_microbatches(num_stages, overlap=overlap)
    if n_microbatches < needed:
        raise ValueError(
            f"overlapped pairs over {num_stages} stages need at least {needed} microbatches, not "
            f"{n_microbatches}; use more, or overlap=False"
        )
    if not 0 <= lookahead <= n_microbatches - needed:
        raise ValueError(
            f"lookahead is {lookahead}, but {n_microbatches} microbatches over {num_stages} stages leave "
            f"room for 0 to {n_microbatches - needed}; use that or more microbatches"
        )


def slots(
    stage_index: int,
    num_stages: int,
    lookahead: int = 0,
    early: EarlyReceives = ALL_EARLY,
    overlap: bool = False,
) -> int:
    """Microbatches for which a stage needs receive buffers at a time.

    Those in flight, the next forward, and the one after it if its input is received early; the first stage
    receives no activations.
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
    """The forwards and backwards of one stage in one step, in order.

    Args:
        stage_index: the stage, r.
        num_stages: the number of stages, d.
        n_microbatches: microbatches in a batch, m; at least `min_microbatches`.
        batch: the batch's number since the pipeline was last empty. Before batch 0 none is in flight.
        lookahead: additional microbatches that the first stage holds in flight.
        overlap: whether a forward and the backward that directly follows it are computed together.

    Returns:
        The m forwards of `batch`, each followed by the backward that is due then: first the remaining ones of
        the previous batch, then those of `batch`.

    Examples:
        In its second step, the first of two stages runs the two forwards of batch 1, and finishes batch 0
        before the backwards of batch 1:

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
    """The remaining backwards of one stage after the step of `batch`, in order."""
    tail = in_flight(stage_index, num_stages, lookahead, overlap)
    return [Action("B", batch, i) for i in range(n_microbatches - tail, n_microbatches)]


def step_program(
    stage_index: int,
    num_stages: int,
    n_microbatches: int,
    batch: int,
    lookahead: int = 0,
    early: EarlyReceives = ALL_EARLY,
    overlap: bool = False,
) -> list[Instruction]:
    """`step_actions` with their messages.

    An early receive is posted one action of its kind ahead, so that the transfer overlaps with computation.
    The first forward of a step is received within the step, because a drain may precede it. The next backward
    always follows, in the next step or in a drain, so its receive stays posted between steps. The receive of
    the first backward is posted when the stage has sent the forwards that it depends on.
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
    early: EarlyReceives = ALL_EARLY,
    overlap: bool = False,
) -> list[Instruction]:
    """`drain_actions` with their messages; an early first receive has been posted by the previous step."""
    actions = drain_actions(stage_index, num_stages, n_microbatches, batch, lookahead, overlap)
    last = Action("B", batch, n_microbatches - 1)
    program = [
        instruction
        for action in actions
        for instruction in _around(action, stage_index, num_stages, n_microbatches, early, last)
    ]
    return _with_late_receives(program, early)


def evaluation_program(
    stage_index: int, num_stages: int, n_microbatches: int, early: EarlyReceives = ALL_EARLY
) -> list[Instruction]:
    """The forwards of one batch with their messages, on an empty pipeline."""
    program = []
    if stage_index > 0 and early.forward:
        program.append(Instruction("receive", Action("F", 0, 0)))
    for microbatch in range(n_microbatches):
        program += _around(Action("F", 0, microbatch), stage_index, num_stages, n_microbatches, early)
    return _with_late_receives(program, early)


def _together(actions: list[Action], overlap: bool) -> list[list[Action]]:
    """Actions by computation: single ones, or a forward with the backward that directly follows it."""
    groups: list[list[Action]] = []
    for action in actions:
        if overlap and action.kind == "B":
            groups[-1].append(action)
        else:
            groups.append([action])
    return groups


def _pair(instructions: list[Instruction]) -> list[Instruction]:
    """The instructions of an overlapped pair, from those of its forward and its backward."""
    forward, backward = (action for kind, action, _ in instructions if kind == "compute")
    before = [i for kind in ("receive", "wait") for i in instructions if i.kind == kind]
    after = [i for i in instructions if i.kind in ("send", "finish")]
    if after and after[-1].kind == "finish":
        # The next stage has finished this batch. It may receive the forward's output only after the norm of
        # the batch's gradient, in whose all-reduce this stage takes part.
        after.sort(key=Instruction("send", forward).__eq__)  # to the end
    return [*before, Instruction("compute", forward, backward), *after]


def _with_late_receives(program: list[Instruction], early: EarlyReceives) -> list[Instruction]:
    """Insert the late receives, after the last computation before their wait.

    They precede the send of its result: otherwise two neighbors would wait for each other to receive. But a
    gradient's receive follows a finish that splits the sends of a pair: the next stage may send it only when
    all stages have finished.
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
    early: EarlyReceives,
    last: Action | None = None,
) -> Iterator[Instruction]:
    receives, sends = stage_index > 0, stage_index < num_stages - 1
    if action.kind == "B":
        receives, sends = sends, receives
    if receives:
        following = _following(action, n_microbatches)
        expected = action != last and (action.kind == "B" or following.batch == action.batch)
        if expected and early.of(action.kind):
            yield Instruction("receive", following)
        yield Instruction("wait", action)
    yield Instruction("compute", action)
    if sends:
        yield Instruction("send", action)
    if action.kind == "B" and action.microbatch == n_microbatches - 1:
        yield Instruction("finish", action)  # after its message is sent


def _following(action: Action, n_microbatches: int) -> Action:
    number = action.batch * n_microbatches + action.microbatch + 1
    return Action(action.kind, *divmod(number, n_microbatches))
