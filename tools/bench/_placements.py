"""The minimum cost of the slowest rank of a pipeline, by exact search over all splits into stages.

Stages may have no layers, which favours several stages per rank. Costs are integers.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

__all__ = ["PLACEMENTS", "slowest_rank"]


def _one_stage_fits(sums: list[int], first: int, last: int, ranks: int, most: int) -> bool:
    place = 0
    for rank in range(ranks):
        room = most - first * (rank == 0) - last * (rank == ranks - 1)
        if room < 0:
            return False
        place = bisect_right(sums, sums[place] + room) - 1
    return place == len(sums) - 1


def _looped_fits(sums: list[int], first: int, last: int, ranks: int, most: int) -> bool:
    return any(_looped_from(sums, first, last, ranks, most, middle) for middle in range(len(sums)))


def _looped_from(sums: list[int], first: int, last: int, ranks: int, most: int, middle: int) -> bool:
    """Whether it fits if the ranks' first stages together hold the layers before `middle`."""
    reached = {0: middle}  # end of a rank's first stage -> maximum end of its second stage
    for rank in range(ranks):
        room = most - first * (rank == 0) - last * (rank == ranks - 1)
        following: dict[int, int] = {}
        for start, second in reached.items():
            for end in range(start, min(middle, bisect_right(sums, sums[start] + room) - 1) + 1):
                left = room - (sums[end] - sums[start])
                reach = bisect_right(sums, sums[second] + left) - 1
                following[end] = max(following.get(end, 0), reach)
        reached = following
    return reached.get(middle) == len(sums) - 1


def _v_fits(sums: list[int], first: int, last: int, ranks: int, most: int) -> bool:
    layers = len(sums) - 1
    reached = {0: layers}  # layers placed from the front -> start of those placed from the back
    for rank in range(ranks):
        room = most - (first + last) * (rank == 0)
        following: dict[int, int] = {}
        for start, stop in reached.items():
            for end in range(start, min(stop, bisect_right(sums, sums[start] + room) - 1) + 1):
                left = room - (sums[end] - sums[start])
                begin = max(end, bisect_left(sums, sums[stop] - left))
                following[end] = min(following.get(end, layers), begin)
        reached = following
    return any(end == begin for end, begin in reached.items())


PLACEMENTS: dict[str, Callable[[list[int], int, int, int, int], bool]] = {
    "one stage": _one_stage_fits,
    "looped": _looped_fits,
    "V": _v_fits,
}
"""One stage per rank; or two, r and r + p on rank r of p ("looped"), or r and 2 p - 1 - r ("V")."""


def slowest_rank(
    placement: str, layers: Sequence[int], ranks: int, *, first: int, last: int, at_most: int | None = None
) -> int:
    """The minimum over all splits of the largest cost of a rank.

    Args:
        placement: one of `PLACEMENTS`.
        layers: the cost of each layer.
        ranks: p.
        first: additional cost of the first stage.
        last: additional cost of the last stage.
        at_most: a cost that is known to be possible, which shortens the search.
    """
    fits = PLACEMENTS[placement]
    sums = [0, *accumulate(layers)]
    too_low = max(-(-(sums[-1] + first + last) // ranks) - 1, 0)
    possible = sums[-1] + first + last if at_most is None else at_most
    if at_most is not None and not fits(sums, first, last, ranks, at_most - 1):
        return at_most
    while possible - too_low > 1:
        middle = (possible + too_low) // 2
        if fits(sums, first, last, ranks, middle):
            possible = middle
        else:
            too_low = middle
    return possible
