"""Parameters that the first and the last stage share: an embedding, and the head tied to it.

Each of the two stages holds a copy. Both gradients are one update late, so the shared weight's gradient is
their sum, and equal updates keep the copies equal. The sum is an all-reduce of two ranks. The last stage
starts it at the beginning of the next step; the first stage joins when it has finished the batch, within that
step and before its last forward. The last stage waits for the sum when the step ends, so no bubble arises.
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
        ValueError: if one is no trainable parameter of the module, or the stage is not at an end of the
            pipeline.
    """

    def __init__(self, stage: _PipelineStageBase, parameters: Sequence[nn.Parameter]) -> None:
        self._stage = stage
        self._parameters = list(parameters)
        self._names: list[str] = []
        self._other = 0 if stage.is_last else stage.num_stages - 1
        self._indices: list[int] = []
        self._group: dist.ProcessGroup | None = None
        self._connected = False
        self._running: dict[int, tuple[list[Tensor], list[dist.Work]]] = {}  # by batch
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
                "tied_parameters must be different trainable parameters of the stage's module, as they are "
                "when the schedule is made"
            )
        self._names = [trainable[id(parameter)] for parameter in parameters]

    def connect(self) -> None:
        """Compare the tied parameters of all stages, and copy the first stage's values to the last.

        The first call is a collective of the pipeline's ranks; later ones do nothing.

        Raises:
            ValueError: on every rank, if the two ends do not tie the same.
        """
        if self._connected:
            return
        self._look_up()
        group = group_of(self._stage)
        mine = [_described(parameter) for parameter in self._parameters]
        everyone: list[list[str]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
        # By ranks, and not by what they say of themselves: in a rehearsal all say what this rank does.
        rank_of = self._stage.stage_index_to_group_rank
        first, last = (everyone[rank_of[index]] for index in (0, self._stage.num_stages - 1))
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
            self._copy_from(ranks[0])

    def _copy_from(self, rank: int) -> None:
        for parameter in self._parameters:
            values = local_part(parameter.detach())
            sent = values.contiguous()
            dist.broadcast(sent, rank, self._group)
            values.copy_(sent)
        if self._stage.is_last:
            reshard(self._stage.submod)  # an earlier forward may have gathered the values of before

    def locate(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note where the tied ones are among the module's trainable `parameters`, the order of gradients."""
        self._look_up()
        positions = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._indices = [positions[id(parameter)] for parameter in self._parameters]

    def _look_up(self) -> None:
        # A module that was made on the meta device gets new parameters where its values are drawn.
        self._parameters = [self._stage.submod.get_parameter(name) for name in self._names]

    def counted(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """`gradients` without those whose norm the first stage counts."""
        if self._stage.is_first:
            return gradients
        return [None if index in self._indices else each for index, each in enumerate(gradients)]

    def start(self, batch: int, gradients: list[Tensor | None]) -> None:
        """Take this stage's parts of a complete batch out of `gradients`, and start to sum them up."""
        parts, works = [], []
        for index, parameter in zip(self._indices, self._parameters, strict=True):
            gradient, gradients[index] = gradients[index], None
            part = torch.zeros_like(parameter) if gradient is None else gradient.contiguous()
            work = dist.all_reduce(local_part(part), group=self._group, async_op=True)
            assert work is not None  # this rank is a member of the group
            parts.append(part)
            works.append(work)
        self._running[batch] = parts, works

    def finish(self, batch: int, gradients: list[Tensor | None]) -> None:
        """Wait for the sums of a batch, add what `.grad` holds, and put them into `gradients`."""
        parts, works = self._running.pop(batch)
        wait_for_stage(works, self._stage, self._other)
        for index, parameter, part in zip(self._indices, self._parameters, parts, strict=True):
            if parameter.grad is not None:
                part.add_(parameter.grad)
            gradients[index] = part


def _described(parameter: Tensor) -> str:
    text = f"a parameter of shape {tuple(parameter.shape)} and {parameter.dtype}"
    if isinstance(parameter, DTensor):
        local = tuple(local_part(parameter.detach()).shape)
        text += f", of which {local} on each rank by {parameter.placements}"
    return text
