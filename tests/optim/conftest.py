"""Four ranks with meshes, shared by the tests of sharded optimizers."""

import pytest

from tests.support.optim import make_meshes
from tests.support.processes import Pools, WorkerPool


@pytest.fixture(scope="module")
def four_ranks(pools: Pools) -> WorkerPool:
    """Four processes with the meshes of `tests.support.optim`."""
    pool = pools(4)
    pool.run(4, make_meshes, keeps=True)
    return pool
