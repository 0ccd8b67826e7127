"""Task lists of every schedule for `simulation`, updates included.

Each batch of a stage begins by gathering its weights ("G"), which is free without data parallelism, and ends
with "R" and "U". Synchronous schedules run these after their last backward and wait there for the norm of the
gradient; Async2BW starts the reduction of a batch after its last backward, which is in the next step, and
clips at the end of that step.
"""

from collections.abc import Sequence
from typing import Literal

from titan_async.pipelining._order_internals import TorchAction, torch_order
from titan_async.pipelining.actions import drain_actions, step_actions
from titan_async.pipelining.simulation import Task

__all__ = [
    "ONE_STAGE",
    "SPLIT_BACKWARD",
    "V_SHAPED",
    "Norm",
    "async_programs",
    "schedule_programs",
    "stages_of_ranks",
    "synchronous_programs",
]

SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""torch's schedules that split backwards into the gradients of the input and of the weights."""

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules that place stages on the ranks in a V; others with several stages place them in a loop."""

ONE_STAGE = ("GPipe", "1F1B", "Async2BW")
"""Schedules with one stage per rank."""

Norm = Literal["deferred", "end of step", "boundary"]
"""When Async2BW reduces the norm of a gradient: "deferred", as implemented, starts when the stage's gradient
is complete and waits at the end of the step; "end of step" does both there; "boundary" waits at once."""


def schedule_programs(
    schedule: str,
    ranks: int,
    n_microbatches: int,
    n_batches: int,
    lookahead: int = 0,
    passes: int = 1,
    each: int = 2,
    overlap: bool = False,
    drains: bool = False,
) -> list[list[Task]]:
    """Each rank's tasks in `n_batches` batches.

    Args:
        schedule: "Async2BW" or the name of one of torch's schedules.
        ranks: of the pipeline.
        n_microbatches: in a batch, m.
        n_batches: number of batches.
        lookahead: of Async2BW.
        passes: of the others, pipeline flushes per batch (gradient accumulation), over equal numbers of
            microbatches.
        each: stages per rank, for schedules with several.
        overlap: of Async2BW, whether a stage runs a forward and a backward as an overlapped pair.
        drains: of Async2BW, whether each batch drains the pipeline, as in a synchronous start.

    Raises:
        ValueError: if the schedule does not support these numbers.
    """
    if schedule == "Async2BW":
        if drains:
            alone = async_programs(ranks, n_microbatches, 1, lookahead, overlap=overlap)
            return [[_of_batch(b, task) for b in range(n_batches) for task in tasks] for tasks in alone]
        return async_programs(ranks, n_microbatches, n_batches, lookahead, overlap=overlap)
    if n_microbatches % passes:
        raise ValueError(f"{n_microbatches} microbatches do not make {passes} equal passes")
    of_a_pass = n_microbatches // passes
    orders: list[list[TorchAction]]
    if schedule == "GPipe":
        orders = [_gpipe(rank, of_a_pass) for rank in range(ranks)]
    elif schedule == "1F1B":
        if of_a_pass < ranks:
            raise ValueError(f"1F1B needs at least as many microbatches ({of_a_pass}) as stages ({ranks})")
        orders = [_one_f_one_b(rank, ranks, of_a_pass) for rank in range(ranks)]
    else:
        orders = torch_order(schedule, stages_of_ranks(schedule, ranks, each), of_a_pass)
    return synchronous_programs(
        [
            [a._replace(microbatch=turn * of_a_pass + a.microbatch) for turn in range(passes) for a in order]
            for order in orders
        ],
        n_batches,
    )


def stages_of_ranks(schedule: str, ranks: int, each: int = 2) -> list[list[int]]:
    """The stage indices of each rank: `each` of them, where the schedule supports any number."""
    if schedule in ONE_STAGE:
        return [[rank] for rank in range(ranks)]
    if schedule in V_SHAPED:
        return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]
    return [list(range(rank, each * ranks, ranks)) for rank in range(ranks)]


def synchronous_programs(orders: Sequence[Sequence[TorchAction]], n_batches: int) -> list[list[Task]]:
    """The tasks of a schedule with a flush after each batch, from each rank's order in one batch."""
    programs = []
    for order in orders:
        stages = sorted({action.stage for action in order})
        ends = {action.stage: position for position, action in enumerate(order)}
        program: list[Task] = []
        for batch in range(n_batches):
            program += [Task("G", stage, batch, 0) for stage in stages]
            for position, (kind, stage, microbatch) in enumerate(order):
                program.append(Task(kind, stage, batch, microbatch))
                if ends[stage] == position:
                    program.append(Task("R", stage, batch, 0))
            program += [Task("U", stage, batch, 0) for stage in stages]
        programs.append(program)
    return programs


def async_programs(
    num_stages: int,
    n_microbatches: int,
    n_batches: int,
    lookahead: int = 0,
    norm: Norm = "deferred",
    overlap: bool = False,
) -> list[list[Task]]:
    """`ScheduleAsync2BW` with its updates, and a drain at the end."""
    programs = []
    for stage in range(num_stages):
        program: list[Task] = []
        for batch in range(n_batches):
            program.append(Task("G", stage, batch, 0))
            actions = step_actions(stage, num_stages, n_microbatches, batch, lookahead, overlap)
            for kind, of, microbatch in actions:
                task = Task(kind, stage, of, microbatch)
                if overlap and kind == "B":
                    program[-1] = program[-1]._replace(overlapped=task)
                else:
                    program.append(task)
                if kind == "B" and microbatch == n_microbatches - 1 and norm != "end of step":
                    program += _norm_tasks(stage, of, waits=norm == "boundary")
            if batch and norm != "boundary":
                program += _norm_tasks(stage, batch - 1, waits=True)[norm == "deferred" :]
        last = n_batches - 1
        drain = drain_actions(stage, num_stages, n_microbatches, last, lookahead, overlap)
        program += [Task(kind, stage, of, microbatch) for kind, of, microbatch in drain]
        remaining = [task for task in _norm_tasks(stage, last, waits=True) if task not in program]
        programs.append(program + remaining)
    return programs


def _of_batch(batch: int, task: Task) -> Task:
    return task._replace(batch=batch, overlapped=task.overlapped and _of_batch(batch, task.overlapped))


def _norm_tasks(stage: int, batch: int, waits: bool) -> list[Task]:
    return [Task("R", stage, batch, 0), Task("U", stage, batch, 0)][: 1 + waits]


def _gpipe(rank: int, n_microbatches: int) -> list[TorchAction]:
    forwards = [TorchAction("F", rank, i) for i in range(n_microbatches)]
    return forwards + [action._replace(kind="B") for action in forwards]


def _one_f_one_b(rank: int, ranks: int, n_microbatches: int) -> list[TorchAction]:
    # As `Schedule1F1B` runs it; its `pipeline_order` counts the last stage's forwards from 1.
    ahead = ranks - 1 - rank
    order = [TorchAction("F", rank, i) for i in range(ahead)]
    for i in range(n_microbatches):
        if ahead + i < n_microbatches:
            order.append(TorchAction("F", rank, ahead + i))
        order.append(TorchAction("B", rank, i))
    return order
