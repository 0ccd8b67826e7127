"""Selects the tests that run by default (not slow, covering cases of crossed parameters), and their workers.

Tests with ranks that wait for each other's messages are slow next to other tests with ranks. So the first
worker of xdist starts with the files of tests with ranks, and the second one with the others, until they
meet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

__all__ = ["Scheduling", "covering", "has_ranks", "is_left_out", "slow"]

Case = tuple[tuple[str, int], ...]
"""Each parameter's name and a key of its value."""


class Scheduling(LoadFileScheduling):
    """Schedules by file: the first worker takes files from the front, all others from the back."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        if node is not self.nodes[0]:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


@lru_cache
def has_ranks(file: Path) -> bool:
    """Whether a test file starts processes that communicate, by the names of their starters."""
    text = file.read_text(encoding="utf-8")
    starters = ("Pools", "four_ranks", "Trainers", "support.training", "rehearsal.rank", "from _pool")
    return any(name in text for name in starters)


def slow(*values: Any, id: str | None = None) -> Any:
    """A `pytest.param` that the default suite leaves out."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def covering(cases: Sequence[Case], strength: int) -> list[bool]:
    """Selects cases that cover all combinations of the values of any `strength` parameters.

    With strength 1 every value occurs at least once; with 2 every pair of values of two parameters does. Each
    selected case is the one with the most uncovered combinations; of several, the one with the least used
    values.
    """
    meetings = [set(combinations(sorted(case), min(strength, len(case)))) for case in cases]
    missing = set().union(*meetings)
    needed = [False] * len(cases)
    taken: Counter[tuple[str, int]] = Counter()
    while missing:
        best = max(
            range(len(cases)),
            key=lambda index: (len(meetings[index] & missing), -sum(taken[value] for value in cases[index])),
        )
        needed[best] = True
        missing -= meetings[best]
        taken.update(cases[best])
    return needed


def is_left_out(items: list[Any], slow_too: bool = False) -> list[bool]:
    """Whether each collected test is deselected.

    This is so if it is marked as `slow`, or if the `covering` of its function does not need it. With
    `slow_too`, slow tests are selected, and additionally a covering of the next strength.
    """
    left_out = [not slow_too and item.get_closest_marker("slow") is not None for item in items]
    crossed: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        if not left_out[index] and item.get_closest_marker("covering") is not None:
            crossed.setdefault(item.nodeid.partition("[")[0], []).append(index)
    for indices in crossed.values():
        strength = items[indices[0]].get_closest_marker("covering").args[0] + slow_too
        cases = [
            tuple((name, id(value)) for name, value in items[index].callspec.params.items())
            for index in indices
        ]
        for index, needed in zip(indices, covering(cases, strength), strict=True):
            left_out[index] = not needed
    if slow_too:
        return [one and other for one, other in zip(left_out, is_left_out(items), strict=True)]
    return left_out
