"""The study of several stages per rank: its searches compared with brute force, and its smallest form."""

import itertools

import pytest
from _greedy import greedy_programs
from _layout import Layout, least_peak, most_utilization
from _periodic import find_order
from _placements import PLACEMENTS, slowest_rank
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tools import measured
from titan_async.pipelining.simulation import simulate


def best_by_brute_force(placement, layers, ranks, first, last):
    per_rank = 1 if placement == "one stage" else 2
    layout = Layout(ranks, per_rank, v_shaped=placement == "V")
    best = None
    for cuts in itertools.combinations_with_replacement(range(len(layers) + 1), layout.stages - 1):
        loads = [0] * ranks
        for stage, (start, end) in enumerate(itertools.pairwise([0, *cuts, len(layers)])):
            loads[layout.rank_of(stage)] += sum(layers[start:end])
        loads[layout.rank_of(0)] += first
        loads[layout.rank_of(layout.stages - 1)] += last
        best = min(best or max(loads), max(loads))
    return best


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=7),
    st.integers(1, 3),
    st.integers(0, 5),
    st.integers(0, 9),
)
def test_slowest_rank_equals_that_of_the_best_split(layers, ranks, first, last):
    for placement in PLACEMENTS:
        found = slowest_rank(placement, layers, ranks, first=first, last=last)
        assert found == best_by_brute_force(placement, layers, ranks, first, last)


def test_placement_of_stages():
    assert [Layout(3, 2).rank_of(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [Layout(3, 2, v_shaped=True).rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [Layout(3, 1).messages, Layout(3, 2).messages, Layout(3, 2, v_shaped=True).messages] == [4, 10, 8]


@pytest.mark.parametrize("latency", [0, 0.02])
@pytest.mark.parametrize("d", [2, 4])
def test_search_with_one_stage_per_rank_finds_the_order_of_async_2bw(d, latency):
    layout = Layout(d)
    order = find_order(layout, latency, 2 * d, tries=2000)
    run = simulate(order.programs(2 * d, 8), layout.timing(latency))
    assert run.utilization == pytest.approx(1)
    assert max(run.peak_in_flight()) == (2 * d - 1 if latency else d)


def keeps_the_recurrence(programs, m):
    for program in programs:
        place = {task: i for i, task in enumerate(program)}
        for task in program:
            if task.kind == "F" and task.batch >= 2:
                last = task._replace(kind="B", batch=task.batch - 2, microbatch=m - 1)
                assert place[last] < place[task]
    return True


def test_found_orders_satisfy_the_bounds_and_the_recurrence():
    layout, latency, m = Layout(4, 2, v_shaped=True), 0.02, 8
    programs = find_order(layout, latency, m).programs(m, 8)
    run = simulate(programs, layout.timing(latency))
    assert run.utilization == pytest.approx(most_utilization(layout, latency, m)) == 1
    assert max(run.peak_in_flight([0.5] * 8)) >= least_peak(layout, latency)
    assert keeps_the_recurrence(programs, m)


@pytest.mark.parametrize("most", [1, 2, 4])
def test_greedy_order_is_complete_and_satisfies_the_bounds(most):
    layout, latency, m = Layout(3, 2), 0.05, 4
    timing = layout.timing(latency)
    programs = greedy_programs(layout, timing, m, 6, most)
    assert sum(map(len, programs)) == len({task for program in programs for task in program}) == 6 * m * 12
    run = simulate(programs, timing)
    assert run.utilization <= most_utilization(layout, latency, most) + 1e-9
    assert max(run.peak_in_flight([0.5] * 6)) <= most
    assert keeps_the_recurrence(programs, m)


def test_no_order_is_found_if_none_exists():
    assert find_order(Layout(4), 0, 3, tries=400) is None
    assert most_utilization(Layout(4), 0, 3) == 0.75


def test_the_study_runs_and_records_everything(tmp_path):
    parts = measured(tmp_path, "bench/interleaving.py", "--quick")
    assert list(parts) == ["pace", "jitter", "limits", "balance"]
    assert all(parts.values())
