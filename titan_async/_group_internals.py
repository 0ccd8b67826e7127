"""Process groups that their members make alone, for the layers that talk to other ranks.

Everything that touches how torch names process groups is here, so that a change in torch is found here.
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
    """A new process group, made by its members alone.

    torch names such a group by the number of groups that the process has made before, and members that
    have made different numbers wait for each other for ever. Here the number is that of groups of the very
    same ranks, and torch's own count stays what it was: the ranks in the middle of a pipeline make more
    groups than those at its ends, and all of them may yet make one together.

    Nor is it split from a default group that is bound to a device, which takes all of that group's ranks: a
    pipeline may lie on some of them, and of its stages some alone have matrices that need a group.

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
    """Let torch make communicators from nothing but the store, as where no `device_id` was given."""
    default = distributed_c10d._get_default_group()
    device = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


@contextmanager
def _gloo_on_one_thread() -> Iterator[None]:
    """Let the thread that reads for the default group read for a new one, too, where both are gloo's.

    One of its own would wake up a hundred times a second while nothing comes.
    """
    gloo = distributed_c10d.ProcessGroupGloo

    class OnOneThread(gloo):  # a class: torch 2.11 asks whether the new group is an instance
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
    """Let ranks wait so long, and not longer, for each other in groups of `joint_group`, later ones too."""
    global _timeout
    _timeout = timeout
    for group in _groups:
        dist.set_timeout(timeout, group)


def wait_for_message(work: dist.Work, device: torch.device) -> None:
    """Wait for a message of a `joint_group`; on an accelerator, let the current stream wait.

    Raises:
        RuntimeError: another rank is gone, or does not answer in time.
    """
    # gloo takes a group's timeout for its collectives alone; with one of its own a wait for NCCL would block
    # the process, and NCCL takes the group's.
    if _timeout is None or device.type != "cpu":
        work.wait()
    else:
        work.wait(_timeout)
