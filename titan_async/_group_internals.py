"""Process groups that only their members create, for all layers that communicate.

The uses of torch's private names for process groups are all in this module.
"""

import hashlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["joint_group", "set_joint_timeout", "wait_for_message"]

_joined: Counter[tuple[int, ...]] = Counter()
_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_timeout: timedelta | None = None


def joint_group(
    ranks: Iterable[int], backend: str | None = None, options: object | None = None
) -> dist.ProcessGroup:
    """Creates a process group; only its members call this function.

    torch names such a group by the number of groups that the process has created before, and members with
    different numbers deadlock. Here the number counts the groups of the same ranks only, and torch's own
    count does not change: ranks in the middle of a pipeline create more groups than those at its ends, and
    all of them may later create one together.

    The group is not split from a default group that is bound to a device, because a split requires all ranks
    of the default group.

    Args:
        ranks: the members.
        backend: by default that of the default group.
        options: of the backend, such as `ProcessGroupNCCL.Options`.
    """
    members = tuple(sorted(ranks))
    _joined[members] += 1
    text = f"titan_async {members} {_joined[members]}"
    name = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    torch_name, world = distributed_c10d._hash_ranks_to_str, distributed_c10d._world
    count = world.group_count
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        with _default_group_unbound(), _gloo_on_one_thread():
            group = dist.new_group(
                list(members), backend=backend, pg_options=options, use_local_synchronization=True
            )
    finally:
        distributed_c10d._hash_ranks_to_str = torch_name
        world.group_count = count
    assert isinstance(group, dist.ProcessGroup)
    _groups.add(group)
    if _timeout is not None:
        dist.set_timeout(_timeout, group)
    return group


@contextmanager
def _default_group_unbound() -> Iterator[None]:
    """Lets torch create communicators from the store alone, as without a `device_id`."""
    default = distributed_c10d._get_default_group()
    device = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


@contextmanager
def _gloo_on_one_thread() -> Iterator[None]:
    """Lets a new gloo group share the I/O thread of a default group of gloo.

    A separate thread would wake up a hundred times per second while idle.
    """
    gloo = distributed_c10d.ProcessGroupGloo

    class OnOneThread(gloo):  # a class: torch 2.11 checks whether the new group is an instance
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, **more: Any) -> None:
            default = distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options
            options = gloo._Options()
            options._devices, options._threads, options._timeout = default._devices, default._threads, timeout
            for name, value in more.items():
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    if "cpu:gloo" in dist.get_backend_config():
        distributed_c10d.ProcessGroupGloo = OnOneThread
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = gloo


def set_joint_timeout(timeout: timedelta) -> None:
    """Sets the timeout of all groups of `joint_group`, including later ones."""
    global _timeout
    _timeout = timeout
    for group in _groups:
        dist.set_timeout(timeout, group)


def wait_for_message(work: dist.Work, device: torch.device) -> None:
    """Waits for a P2P operation of a `joint_group`; on an accelerator, the current stream waits.

    Raises:
        RuntimeError: another rank has died, or the timeout has expired.
    """
    # gloo applies a group's timeout to collectives only. NCCL applies it to all operations, and a wait with
    # an explicit timeout would block the process.
    if _timeout is None or device.type != "cpu":
        work.wait()
    else:
        work.wait(_timeout)
