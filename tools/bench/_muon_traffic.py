"""Counts the bytes that a rank sends in collectives, including those of DTensor's redistributions.

The count is that of an optimal algorithm, independent of the backend, from the shapes of the tensors, with n
bytes in this rank's input and W ranks in the group:

    all-gather          n (W - 1)             = (W - 1) / W of the output
    reduce-scatter      n (W - 1) / W
    all-reduce          2 n (W - 1) / W
    all-to-all          n minus the part that a rank keeps
    gather, reduce      n, from every rank but the root
    scatter             n minus the root's own part, from the root
    broadcast           n (W - 1), from the root
    send                n

If DTensor uses an all-gather under gloo instead of an all-to-all, the all-gather is counted. Barriers and
headers are not counted. A collective that is not in this list raises.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["TrafficCounter", "is_wrapper"]

_KINDS = {
    "all_gather": "allgather_ _allgather_base_ allgather_coalesced_ allgather_into_tensor_coalesced_ "
    "all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced",
    "reduce_scatter": "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_ "
    "reduce_scatter_tensor reduce_scatter_tensor_out reduce_scatter_tensor_coalesced",
    "all_reduce": "allreduce_ allreduce_coalesced_ all_reduce all_reduce_ all_reduce_coalesced "
    "all_reduce_coalesced_",
    "all_to_all": "alltoall_ alltoall_base_ all_to_all_single shard_dim_alltoall",
    "gather": "gather_ gather_into_tensor_",
    "reduce": "reduce_",
    "scatter": "scatter_",
    "broadcast": "broadcast_ broadcast",
    "send": "send isend",
    "nothing": "barrier monitored_barrier_ wait_tensor _wrap_tensor_autograd check_for_nan recv_ "
    "recv_any_source_ irecv",
}
"""Operators of torch.distributed and of DTensor, by kind of collective."""
_KIND_OF = {operator: kind for kind, operators in _KINDS.items() for operator in operators.split()}
_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
_INPUTS = ("input", "inputs", "input_tensor", "input_tensors", "input_list", "tensor", "tensors")


def is_wrapper(types: Any) -> bool:
    """Whether the arguments are wrapper subclasses, whose operators dispatch others on plain tensors."""
    return any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types)


class TrafficCounter(TorchDispatchMode):
    """A context manager that counts collectives, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0
        """Bytes."""
        self.calls: Counter[str] = Counter()
        """Collectives of each kind."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if is_wrapper(types):
            # DTensor dispatches its collectives as operators on plain tensors, which are counted.
            return NotImplemented
        kwargs = kwargs or {}
        if getattr(func, "namespace", None) in _NAMESPACES:
            named = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
            self._count(func._schema.name.split("::")[1], named)
        return func(*args, **kwargs)

    def _count(self, operator: str, arguments: dict[str, Any]) -> None:
        if operator not in _KIND_OF:
            raise NotImplementedError(f"a collective whose bytes are not counted: {operator}")
        kind = _KIND_OF[operator]
        if kind == "nothing":
            return
        self.calls[kind] += 1
        group = _group(arguments)
        size, rank = group.size(), group.rank()
        inputs = next(arguments[name] for name in _INPUTS if name in arguments)
        total = sum(leaf.nbytes for leaf in tree_iter(inputs) if isinstance(leaf, Tensor))
        root = arguments.get("root_rank", arguments.get("src"))
        if kind == "all_gather":
            self.sent += total * (size - 1)
        elif kind == "reduce_scatter":
            self.sent += total * (size - 1) // size
        elif kind == "all_reduce":
            self.sent += 2 * total * (size - 1) // size
        elif kind == "all_to_all":
            self.sent += total - _kept(inputs, arguments.get("input_split_sizes"), total, size, rank)
        elif kind == "scatter":
            self.sent += total - inputs[0][rank].nbytes if rank == root else 0
        elif kind == "broadcast":
            self.sent += total * (size - 1) if rank == root else 0
        elif kind in ("gather", "reduce"):
            self.sent += total if rank != root else 0
        else:
            self.sent += total


def _kept(inputs: Any, splits: Any, total: int, size: int, rank: int) -> int:
    """Bytes of an all-to-all's input that stay on this rank."""
    if isinstance(inputs, (list, tuple)):
        return inputs[rank].nbytes
    if splits:
        return total // max(sum(splits), 1) * splits[rank]
    return total // size


def _group(arguments: dict[str, Any]) -> dist.ProcessGroup:
    group = arguments.get("process_group", arguments.get("group_name"))
    if isinstance(group, str):
        return torch.distributed.distributed_c10d._resolve_process_group(group)
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)
