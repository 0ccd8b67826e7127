"""The steps of each rank of a pipeline, in order, for the simulation in `rendezvous.py`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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

__all__ = ["Program", "Step", "overwritten", "programs"]

EVALUATION = 0


class Step(NamedTuple):
    """An instruction of the pipeline's `filling`-th filling.

    "finish" completes a stage's gradient of a batch; on the first stage it also joins the all-reduce of tied
    parameters and waits for it. "tie" joins that all-reduce on the last stage. "exchange" starts an action's
    exchange of tokens number `number`, and "collect" waits for it. "reduce" joins the all-reduce of the norm,
    and "update" waits for it, as clipping does before the optimizer. "close" waits for all pending sends.
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
    fused: bool = False  # starts together with the previous step
    overlapped: Action | None = None  # the backward of an overlapped pair
    number: int = 0

    def __str__(self) -> str:
        return " ".join(map(str, filter(None, (self.kind, self.action))))


@dataclass
class Program:
    """All steps of one rank."""

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
    """The programs of all ranks over `plan`: numbers of batches with a drain after each, 0 for an evaluation.

    `exchanges` is the number of exchanges of tokens in each forward and in each backward.
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
    # Looked up in its module, so that a test can replace it.
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
    """The steps of a forward or a backward between successive switches to the other half of a pair."""
    count = exchanges[action.kind == "B"]
    turns: list[list[Step]] = [[] for _ in range(count + 1)]
    for number in range(count):
        turns[number].append(Step("exchange", filling, action, number=number))
        turns[number + 1].append(Step("collect", filling, action, number=number))
    return turns


def _with_collectives(program: list[Step], filling: int, batch: int, is_last: bool, tail: int) -> list[Step]:
    """Adds the collectives of the gradient of `batch`; without a tail it completed in the previous call."""
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


def overwritten(program: Program) -> list[str]:
    """Microbatches whose buffer is overwritten by a receive or a forward while they still need it.

    A buffer is in use from when its receive is posted, or from the forward if nothing is received, until the
    microbatch's backward, or in an evaluation until its forward. This depends on the rank's own order only.
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
