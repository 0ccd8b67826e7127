"""The orders of operations of torch's schedules with several stages per rank, taken from torch itself.

All uses of torch's private names for that in this layer; `tests/pipelining/test_programs.py` fails when one
is removed or its meaning changes.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

from titan_async.pipelining.simulation import Kind

__all__ = ["TorchAction", "torch_order"]

_KINDS: dict[str, Kind] = {
    "FORWARD": "F",
    "FULL_BACKWARD": "B",
    "BACKWARD_INPUT": "I",
    "BACKWARD_WEIGHT": "W",
}
_KINDS_OF_FSDP: dict[str, Kind] = {**_KINDS, "UNSHARD": "G"}


class TorchAction(NamedTuple):
    """An action of torch's schedule; the gather of a stage's weights is microbatch 0."""

    kind: Kind
    stage: int
    microbatch: int


def torch_order(
    schedule: str, stages: list[list[int]], n_microbatches: int, *, gathers: bool = False
) -> list[list[TorchAction]]:
    """The actions of each rank in one batch, in order.

    Args:
        schedule: torch's name of a schedule with several stages per rank.
        stages: the indices of the stages on each rank.
        n_microbatches: microbatches in a batch.
        gathers: whether to include the gathers of weights ("G") where torch starts them: for each of the next
            three stages, unless it is gathered.

    Raises:
        ValueError: from torch, if the schedule does not support these numbers.
    """
    # Imported here: without torch's schedules, simulation does not need torch.
    from torch.distributed.pipelining.schedules import _add_unshard_reshard, get_schedule_class

    build: Any = get_schedule_class(schedule)
    total = sum(map(len, stages))
    # The order depends on these numbers only, so no process group and no module are needed.
    stages_of_rank_0 = [
        SimpleNamespace(
            stage_index=index,
            num_stages=total,
            group_size=len(stages),
            group_rank=0,
            is_first=index == 0,
            is_last=index == total - 1,
            submod=None,
            has_backward=True,
        )
        for index in stages[0]
    ]
    order = build(stages_of_rank_0, n_microbatches, loss_fn=lambda output, target: output).pipeline_order
    if not gathers:
        return [list(_actions(order[rank], _KINDS)) for rank in range(len(stages))]
    return [list(_actions(_add_unshard_reshard(order[rank]), _KINDS_OF_FSDP)) for rank in range(len(stages))]


def _actions(actions: Any, kinds: dict[str, Kind]) -> Any:
    for action in actions:
        if action is None:  # an idle slot
            continue
        # A forward and a backward that torch draws as overlapping run one after the other.
        for part in action.sub_actions or (action,):
            kind = kinds.get(part.computation_type.name)
            if kind is not None:
                yield TorchAction(kind, part.stage_index, part.microbatch_index or 0)
