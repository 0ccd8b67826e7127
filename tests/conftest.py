"""For all tests: offline, one thread per process, and torchtitan on the CPU if there is no accelerator.

hypothesis has no deadline, since the duration of an example depends on the load of the machine.
"""

import os
import signal
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

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


def pytest_configure(config: pytest.Config) -> None:
    """Calls `ensure_device` before a test imports torchtitan, except in the controller of pytest-xdist.

    Restores the default for SIGINT, which a shell's background job ignores: tests of Ctrl-C would hang.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    is_controller = config.getoption("numprocesses", default=None) and not config.getoption("collectonly")
    if not is_controller:
        from titan_async.config.device import ensure_device

        ensure_device()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run tests that are marked as slow")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects slow or redundant tests, unless selected by name or `-m`; runs files with ranks first."""
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
