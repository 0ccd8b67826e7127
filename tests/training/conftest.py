from collections.abc import Iterator

import pytest

from tests.support.processes import Pools
from tests.support.trainer_loop import Trainers


@pytest.fixture(scope="session")
def trainer_pools() -> Iterator[Pools]:
    """Processes for trainers, which leave more behind in them than the tests of a layer below could bear."""
    pools = Pools(most_calls=2)  # a trainer leaves some sixty threads in each rank
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def runs(trainer_pools: Pools) -> Trainers:
    return Trainers(trainer_pools)
