"""No rank waits longer for another one than it is told, in the groups that ranks make by themselves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.support.processes import WorkerPool

SECONDS = 1.0


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    pool.close()


def wait_in_vain(rank: int, group: object, collective: bool, before: bool) -> tuple[str, float]:
    """Waits for a rank that does not come; `before` says whether the group is older than its timeout."""
    from titan_async import _group_internals as groups

    groups.set_joint_timeout(timedelta(seconds=60 * SECONDS if before else SECONDS))
    joint = groups.joint_group((0, 1))
    tensor = torch.zeros(1)
    dist.all_reduce(tensor)  # both are here
    if before:
        groups.set_joint_timeout(timedelta(seconds=SECONDS))
    if rank == 1:
        time.sleep(4 * SECONDS)
        return "", 0.0
    start = time.monotonic()
    try:
        if collective:
            dist.all_reduce(tensor, group=joint)
        else:
            groups.wait_for_message(dist.irecv(tensor, 1, joint), torch.device("cpu"))
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "no error", time.monotonic() - start


@pytest.mark.parametrize(("collective", "before"), [(True, True), (True, False), (False, True)])
def test_a_wait_ends_in_time(pool: WorkerPool, collective: bool, before: bool) -> None:
    (error, seconds), _ = pool.run(2, wait_in_vain, collective, before)
    assert "Timed out waiting 1000ms" in error
    assert 0.9 * SECONDS < seconds < 3 * SECONDS
