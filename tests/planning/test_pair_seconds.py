"""The time of an overlapped pair, against its halves by turns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_async.planning.stage_cost import Half, pair_seconds


def alternating(forward, backward):
    """How long a pair takes whose halves are lists of what is computed and exchanged, by turns; only one
    exchange is under way at a time."""
    there, now, link, turn = [0.0, 0.0], 0.0, 0.0, 1
    left = [list(forward), list(backward)]
    while left[0] or left[1]:
        if left[turn]:
            computed, exchanged = left[turn].pop(0)
            now = max(now, there[turn]) + computed
            if exchanged:
                link = there[turn] = max(now, link) + exchanged
        turn = 1 - turn
    return now


@given(
    st.integers(1, 6), st.integers(1, 6), *[st.sampled_from([0.125, 0.25, 0.5, 1.0, 2.0]) for _ in range(4)]
)
def test_a_pair_takes_what_its_halves_take_by_turns(ours, theirs, cf, xf, cb, xb):
    forward = [(cf, xf)] * ours + [(0.0, 0.0)]
    backward = [(0.0, xb), *[(cb, xb)] * (theirs - 1), (cb, 0.0)]
    halves = (
        Half(ours * (cf + xf), ours * xf, ours),
        Half(theirs * (cb + xb), theirs * xb, theirs),
    )
    seconds = pair_seconds(*halves)
    if ours == theirs:
        assert seconds == pytest.approx(alternating(forward, backward))
        assert seconds == pytest.approx(ours * (max(cf, xb) + max(cb, xf)))
    # The half that goes on alone hides the last tokens of the other.
    assert 0 <= seconds - alternating(forward, backward) <= min(cb, xf) + min(cf, xb)


def test_a_pair_without_experts_takes_both():
    assert pair_seconds(Half(1.0, 0.0, 0), Half(2.0, 0.0, 0)) == 3.0
