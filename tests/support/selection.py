"""Which tests run by default, those that are not slow and of crossed parameters a covering part; and where.

Ranks that wait for each other's messages lose much more time to other processes than these gain. So the first
worker of xdist begins with the files whose tests have ranks and the second with the others, until they meet.
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
    """One file after another: the first worker takes them from the front, all others from the back."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        if node is not self.nodes[0]:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


@lru_cache
def has_ranks(file: Path) -> bool:
    """Whether a test file starts processes that talk to each other, by the names of what starts them."""
    text = file.read_text(encoding="utf-8")
    starters = ("Pools", "four_ranks", "Trainers", "support.training", "rehearsal.rank", "from _pool")
    return any(name in text for name in starters)


def slow(*values: Any, id: str | None = None) -> Any:
    """A `pytest.param` that the default suite leaves out."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def covering(cases: Sequence[Case], strength: int) -> list[bool]:
    """Whether each case is among those in which all values of any `strength` parameters meet.

    With strength 1 every value occurs at least once; with 2 every pair of values of two parameters does. The
    next case to be taken is always the one in which most values meet that have not yet; of several, the one
    whose values were taken least.
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

    A test is if it is marked as `slow`, or if the `covering` of its function does not need it. With
    `slow_too` marked tests run, and of crossed parameters a covering of the next strength, too.
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
