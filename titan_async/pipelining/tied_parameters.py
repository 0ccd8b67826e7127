"""Parameters shared by the first and the last stage: an embedding, and the head tied to it.

Each of the two stages holds a copy. Both gradients are one update late, so the gradient of the shared weight
is their sum, and equal updates keep the copies equal. The sum is an all-reduce of two ranks. The last stage
starts it at the beginning of the next step; the first stage joins when it has finished the batch, within that
step and before its last forward. The last stage waits for the sum at the end of the step, so there is no
bubble.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.tensor import DTensor

from titan_async._group_internals import joint_group
from titan_async.local_tensors import local_part
from titan_async.pipelining._torch_internals import group_of, reshard
from titan_async.pipelining.p2p_channels import wait_for_stage

__all__ = ["TiedParameters"]


class TiedParameters:
    """This stage's copies of tied parameters, and the all-reduces of their gradients.

    Args:
        stage: the stage of this rank.
        parameters: trainable parameters of its module; see `ScheduleAsync2BW`.

    Raises:
        ValueError: if one is not a trainable parameter of the module, or the stage is neither the first nor
            the last one.
    """

    def __init__(self, stage: _PipelineStageBase, parameters: Sequence[nn.Parameter]) -> None:
        self._stage = stage
        self._parameters = list(parameters)
        self._names: list[str] = []
        self._peer_stage = 0 if stage.is_last else stage.num_stages - 1
        self._indices: list[int] = []
        self._group: dist.ProcessGroup | None = None
        self._connected = False
        self._pending: dict[int, tuple[list[Tensor], list[dist.Work]]] = {}  # by batch
        if not parameters:
            return
        if stage.num_stages == 1:
            raise ValueError(
                "tied_parameters are copies on two stages, but the pipeline has one: assign one nn.Parameter "
                "to both modules instead"
            )
        if not (stage.is_first or stage.is_last):
            raise ValueError(
                f"tied_parameters belong to the first and the last stage, but this is stage "
                f"{stage.stage_index} of {stage.num_stages}: pass none here"
            )
        trainable = {id(p): name for name, p in stage.submod.named_parameters() if p.requires_grad}
        if len({id(p) for p in parameters} & trainable.keys()) < len(parameters):
            raise ValueError(
                "tied_parameters must be different trainable parameters of the stage's module at the time "
                "the schedule is created"
            )
        self._names = [trainable[id(parameter)] for parameter in parameters]

    def connect(self) -> None:
        """Compare the tied parameters of all stages, and broadcast the first stage's values to the last.

        The first call is a collective of the pipeline's ranks; later calls do nothing.

        Raises:
            ValueError: on every rank, if the two stages do not tie the same parameters.
        """
        if self._connected:
            return
        self._resolve()
        group = group_of(self._stage)
        mine = [_described(parameter) for parameter in self._parameters]
        gathered: list[list[str]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(gathered, mine, group=group)
        # Indexed by rank rather than by what each rank reports: in a rehearsal all entries are this rank's.
        rank_of = self._stage.stage_index_to_group_rank
        first, last = (gathered[rank_of[index]] for index in (0, self._stage.num_stages - 1))
        if first != last:
            raise ValueError(
                f"the first stage ties {' and '.join(first) or 'nothing'}, the last stage "
                f"{' and '.join(last) or 'nothing'}: pass the same number of tied_parameters on both, in the "
                "same order, of the same shapes and placements"
            )
        self._connected = True
        if self._parameters:
            ranks = [dist.get_global_rank(group, rank_of[index]) for index in (0, self._stage.num_stages - 1)]
            self._group = joint_group(ranks)
            self._broadcast_from(ranks[0])

    def _broadcast_from(self, rank: int) -> None:
        for parameter in self._parameters:
            values = local_part(parameter.detach())
            buffer = values.contiguous()
            dist.broadcast(buffer, rank, self._group)
            values.copy_(buffer)
        if self._stage.is_last:
            reshard(self._stage.submod)  # an earlier forward may have gathered the old values

    def locate(self, parameters: Sequence[nn.Parameter]) -> None:
        """Store the positions of the tied parameters in `parameters`, the order of the gradients."""
        self._resolve()
        positions = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._indices = [positions[id(parameter)] for parameter in self._parameters]

    def _resolve(self) -> None:
        # A module that was built on the meta device gets new parameters when it is materialized.
        self._parameters = [self._stage.submod.get_parameter(name) for name in self._names]

    def exclude_shared(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """`grads` without those whose norm the first stage counts."""
        if self._stage.is_first:
            return grads
        return [None if index in self._indices else each for index, each in enumerate(grads)]

    def start(self, batch: int, grads: list[Tensor | None]) -> None:
        """Remove the tied gradients of a finished batch from `grads`, and start their all-reduce."""
        parts, works = [], []
        for index, parameter in zip(self._indices, self._parameters, strict=True):
            grad, grads[index] = grads[index], None
            part = torch.zeros_like(parameter) if grad is None else grad.contiguous()
            work = dist.all_reduce(local_part(part), group=self._group, async_op=True)
            assert work is not None  # this rank is a member of the group
            parts.append(part)
            works.append(work)
        self._pending[batch] = parts, works

    def finish(self, batch: int, grads: list[Tensor | None]) -> None:
        """Wait for the all-reduces of a batch, add `.grad`, and put the sums into `grads`."""
        parts, works = self._pending.pop(batch)
        wait_for_stage(works, self._stage, self._peer_stage)
        for index, parameter, part in zip(self._indices, self._parameters, parts, strict=True):
            if parameter.grad is not None:
                part.add_(parameter.grad)
            grads[index] = part


def _described(parameter: Tensor) -> str:
    text = f"a parameter of shape {tuple(parameter.shape)} and {parameter.dtype}"
    if isinstance(parameter, DTensor):
        local = tuple(local_part(parameter.detach()).shape)
        text += f", of which {local} on each rank by {parameter.placements}"
    return text
