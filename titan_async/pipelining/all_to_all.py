"""`all_to_all_single`: the exchange of tokens between experts, at which an overlapped pair hands over."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_async.pipelining._torch_internals import process_group
from titan_async.pipelining.overlap import hand_over

__all__ = ["all_to_all_single"]


def all_to_all_single(
    input: Tensor,
    output_split_sizes: list[int],
    input_split_sizes: list[int],
    group: dist.ProcessGroup | DeviceMesh,
) -> Tensor:
    """Scatter `input` along dimension 0 to all ranks of `group`, and gather what they scatter.

    During an overlapped pair the other half runs while the data is in flight (`hand_over`). Differentiable,
    and a single operator for `torch.compile` and selective activation checkpointing:
    `torch.ops.titan_async.all_to_all_single`. As with a synchronous collective, the output may be used when
    this returns; on accelerators the current stream waits for it.

    Args:
        input: tensor to scatter, of at least one dimension; the slices are in the order of ranks.
        output_split_sizes: sizes along dimension 0 to receive from each rank.
        input_split_sizes: sizes along dimension 0 to send to each rank.
        group: the process group to work on, or a one-dimensional mesh.

    Returns:
        The concatenated slices from all ranks, of the dtype of `input`.
    """
    if isinstance(group, DeviceMesh):
        group = group.get_group()
    return _all_to_all_single(input, output_split_sizes, input_split_sizes, group.group_name)


@torch.library.custom_op("titan_async::all_to_all_single", mutates_args=())
def _all_to_all_single(
    input: Tensor, output_split_sizes: list[int], input_split_sizes: list[int], group_name: str
) -> Tensor:
    output = input.new_empty(sum(output_split_sizes), *input.shape[1:])
    # Both tensors live until the wait: the communication may use a stream of its own.
    sent = input.contiguous()
    work = dist.all_to_all_single(
        output, sent, output_split_sizes, input_split_sizes, group=process_group(group_name), async_op=True
    )
    assert work is not None, "the group is without this rank"
    hand_over()
    work.wait()
    return output


@_all_to_all_single.register_fake
def _(input: Tensor, output_split_sizes: list[int], input_split_sizes: list[int], group_name: str) -> Tensor:
    return input.new_empty(sum(output_split_sizes), *input.shape[1:])


def _keep_splits(ctx: Any, inputs: tuple[Tensor, list[int], list[int], str], output: Tensor) -> None:
    _, *ctx.splits, ctx.group_name = inputs


def _send_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    came, went = ctx.splits
    return _all_to_all_single(gradient, went, came, ctx.group_name), None, None, None


_all_to_all_single.register_autograd(_send_back, setup_context=_keep_splits)
