from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.support.processes import Pools
from tests.support.trainer_loop import Trainers


@pytest.fixture(scope="session")
def trainer_pools() -> Iterator[Pools]:
    """Processes for trainers, which leave global state behind that tests of lower layers must not see."""
    pools = Pools(most_calls=2)  # a trainer leaves some sixty threads in each rank
    yield pools
    pools.close()


@pytest.fixture(scope="module")
def group_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The default process group, of this process alone."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def runs(trainer_pools: Pools) -> Trainers:
    return Trainers(trainer_pools)
