"""For every test: offline, one thread a process, and torchtitan on the CPU where there is no accelerator.

Drawn examples may take their time: how long one takes says more about the machine than about the code.
"""

import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from tests.support.processes import Pools
from tests.support.selection import Scheduling, has_ranks, is_left_out
from tests.support.tools import module_folders

sys.path += module_folders()

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


def pytest_configure(config: pytest.Config) -> None:
    """Settles the device before any test imports torchtitan, except where tests are only handed out."""
    handed_out = config.getoption("numprocesses", default=None) and not config.getoption("collectonly")
    if not handed_out:
        from titan_async.config.device import ensure_device

        ensure_device()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests that are marked as slow, too")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is slow or redundant, unless its own name or `-m` asks for it; ranks come first."""
    items.sort(key=lambda item: not has_ranks(item.path))
    if config.getoption("-m"):
        return
    named = [word for word in config.args if "::" in word]
    left_out = {
        item
        for item, is_one in zip(items, is_left_out(items, config.getoption("--all")), strict=True)
        if is_one and not any(item.nodeid.startswith(word) for word in named)
    }
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Gloo processes for any number of ranks, shared by test files and restarted after some calls."""
    pools = Pools()
    yield pools
    pools.close()
