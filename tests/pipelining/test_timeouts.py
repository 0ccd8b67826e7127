"""Timeouts of the process groups that ranks create by themselves."""

from __future__ import annotations

import time
import weakref
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.processes import Pools, WorkerPool
from tests.support.waiting import until

SECONDS = 0.3


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    return pools(2)


def wait_until_timeout(
    rank: int, group: object, collective: bool, before: bool, ended: Path
) -> tuple[str, float]:
    """The error and the time of a wait for a late rank; `before`: the group is older than its timeout."""
    from titan_async import _group_internals as groups

    # The process also runs other tests, whose groups keep their timeouts.
    with (
        mock.patch.object(groups, "_timeout", None),
        mock.patch.object(groups, "_groups", weakref.WeakSet()),
    ):
        groups.set_joint_timeout(timedelta(seconds=60 if before else SECONDS))
        joint = groups.joint_group((0, 1))
        tensor = torch.zeros(1)
        dist.all_reduce(tensor)  # both are here
        if before:
            groups.set_joint_timeout(timedelta(seconds=SECONDS))
        if rank == 1:
            until(ended.exists, "the wait does not end")
            return "", 0.0
        start = time.monotonic()
        try:
            if collective:
                dist.all_reduce(tensor, group=joint)
            else:
                groups.wait_for_message(dist.irecv(tensor, 1, joint), torch.device("cpu"))
        except RuntimeError as error:
            return str(error), time.monotonic() - start
        finally:
            ended.touch()
        return "no error", time.monotonic() - start


@pytest.mark.parametrize(("collective", "before"), [(True, True), (True, False), (False, True)])
def test_a_wait_ends_in_time(pool: WorkerPool, collective: bool, before: bool, tmp_path: Path) -> None:
    (error, seconds), _ = pool.run(2, wait_until_timeout, collective, before, tmp_path / "ended")
    assert "Timed out waiting 300ms" in error
    assert seconds > 0.9 * SECONDS
