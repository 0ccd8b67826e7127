"""The orders of work of torch's schedules that keep several stages on a rank, taken from torch itself.

Everything that this layer uses of torch's private names for that; `tests/pipelining/test_programs.py` fails
when one is gone or means something else.
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
    """Something that torch's schedule computes, or the gather of a stage's weights, as microbatch 0."""

    kind: Kind
    stage: int
    microbatch: int


def torch_order(
    schedule: str, stages: list[list[int]], n_microbatches: int, *, gathers: bool = False
) -> list[list[TorchAction]]:
    """What each rank computes in one batch, in order.

    Args:
        schedule: torch's name of a schedule of several stages a rank.
        stages: the indices of the stages on each rank.
        n_microbatches: microbatches in a batch.
        gathers: whether the gathers of weights ("G") are in it, where torch starts them: of each of the three
            stages that are computed next, if it is not gathered.

    Raises:
        ValueError: if the schedule does not go together with these numbers; torch's own words.
    """
    # Here, so that those who ask for none of torch's schedules need not wait for torch.
    from torch.distributed.pipelining.schedules import _add_unshard_reshard, get_schedule_class

    build: Any = get_schedule_class(schedule)
    total = sum(map(len, stages))
    # The order depends on numbers alone, so that no process group is needed, and no module.
    stand_ins = [
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
    order = build(stand_ins, n_microbatches, loss_fn=lambda output, target: output).pipeline_order
    if not gathers:
        return [list(_actions(order[rank], _KINDS)) for rank in range(len(stages))]
    return [list(_actions(_add_unshard_reshard(order[rank]), _KINDS_OF_FSDP)) for rank in range(len(stages))]


def _actions(actions: Any, kinds: dict[str, Kind]) -> Any:
    for action in actions:
        if action is None:  # a slot in which torch draws the rank as waiting
            continue
        # A forward and a backward that overlap on paper run one after the other.
        for part in action.sub_actions or (action,):
            kind = kinds.get(part.computation_type.name)
            if kind is not None:
                yield TorchAction(kind, part.stage_index, part.microbatch_index or 0)
