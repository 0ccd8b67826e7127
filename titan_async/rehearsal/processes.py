"""Runs each rank of a rehearsal in a process of its own, since torch keeps for good which rank it is."""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

__all__ = ["for_each"]


def for_each(function: Callable[..., Any], calls: Iterable[tuple]) -> Iterator[Any]:
    """The results of `function(*call)` for each of `calls`, in their order.

    As many calls run at a time as there are cores. Their processes are copies of one that has imported what
    they need, and has done nothing else.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["titan_async.rehearsal.rank"])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ProcessPoolExecutor(cores, mp_context=context, max_tasks_per_child=1) as pool:
        futures = [pool.submit(function, *call) for call in calls]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()
