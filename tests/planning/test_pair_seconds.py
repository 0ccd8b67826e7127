"""The time of an overlapped pair, against a simulation of its alternating halves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_async.planning.stage_cost import Half, pair_seconds


def alternating(forward, backward):
    """Seconds of a pair whose halves alternate; each is a list of computations and the all-to-alls after
    them. All-to-alls run one at a time."""
    arrival, now, link, half = [0.0, 0.0], 0.0, 0.0, 1
    remaining = [list(forward), list(backward)]
    while remaining[0] or remaining[1]:
        if remaining[half]:
            computed, exchanged = remaining[half].pop(0)
            now = max(now, arrival[half]) + computed
            if exchanged:
                link = arrival[half] = max(now, link) + exchanged
        half = 1 - half
    return now


@given(
    st.integers(1, 6), st.integers(1, 6), *[st.sampled_from([0.125, 0.25, 0.5, 1.0, 2.0]) for _ in range(4)]
)
def test_pair_takes_the_time_of_alternating_halves(nf, nb, cf, xf, cb, xb):
    forward = [(cf, xf)] * nf + [(0.0, 0.0)]
    backward = [(0.0, xb), *[(cb, xb)] * (nb - 1), (cb, 0.0)]
    seconds = pair_seconds(Half(nf * (cf + xf), nf * xf, nf), Half(nb * (cb + xb), nb * xb, nb))
    if nf == nb:
        assert seconds == pytest.approx(alternating(forward, backward))
        assert seconds == pytest.approx(nf * (max(cf, xb) + max(cb, xf)))
    # The longer half hides the last all-to-all of the other.
    assert 0 <= seconds - alternating(forward, backward) <= min(cb, xf) + min(cf, xb)


def test_pair_without_experts_takes_the_sum_of_its_halves():
    assert pair_seconds(Half(1.0, 0.0, 0), Half(2.0, 0.0, 0)) == 3.0
