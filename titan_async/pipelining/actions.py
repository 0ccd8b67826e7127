"""The order of work of PipeDream-2BW, as plain lists that can be executed, printed or checked.

A stage runs a forward of microbatch k, then the backward of microbatch k - w, where w is the number of
microbatches it keeps in flight: d - 1 - r at stage r of d. Microbatches are numbered through all batches,
so the pairs run across the batch boundary and the pipeline never empties (PipeDream-2BW, arXiv 2006.09503,
section 3.1).
"""

from typing import Literal, NamedTuple

__all__ = ["Action", "drain_actions", "in_flight", "step_actions"]


class Action(NamedTuple):
    """One unit of compute: the forward ("F") or backward ("B") of one microbatch of one batch."""

    kind: Literal["F", "B"]
    batch: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.batch}.{self.microbatch}"


def in_flight(stage_index: int, num_stages: int) -> int:
    """Microbatches whose backward is still to come when a stage's `step` returns: d - 1 - r."""
    return num_stages - 1 - stage_index


def step_actions(stage_index: int, num_stages: int, n_microbatches: int, batch: int) -> list[Action]:
    """What one stage does in one step, in order.

    Args:
        stage_index: the stage, r.
        num_stages: the number of stages, d.
        n_microbatches: microbatches in a batch, m; at least d.
        batch: the batch's number since the pipeline was last empty. Batch 0 has no tail of a former batch
            to finish.

    Returns:
        The m forwards of `batch`, each followed by the backward that is then due: those of the former
        batch's tail first, then those of the head of `batch`.
    """
    tail = in_flight(stage_index, num_stages)
    actions = []
    for microbatch in range(n_microbatches):
        actions.append(Action("F", batch, microbatch))
        due = batch * n_microbatches + microbatch - tail
        if due >= 0:
            actions.append(Action("B", *divmod(due, n_microbatches)))
    return actions


def drain_actions(stage_index: int, num_stages: int, n_microbatches: int, batch: int) -> list[Action]:
    """The backwards that empty one stage after the step of `batch`, in order."""
    tail = in_flight(stage_index, num_stages)
    return [Action("B", batch, i) for i in range(n_microbatches - tail, n_microbatches)]
