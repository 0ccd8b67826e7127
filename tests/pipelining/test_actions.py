"""The order of work: every microbatch once each way, within the limits that the design states."""

import pytest

from titan_async.pipelining import drain_actions, step_actions

CASES = [(d, m) for d in range(1, 9) for m in range(d, 17)]


def run_order(stage, d, m, batches):
    order = [action for b in range(batches) for action in step_actions(stage, d, m, b)]
    return order + drain_actions(stage, d, m, batches - 1)


@pytest.mark.parametrize(("d", "m"), CASES)
def test_every_microbatch_goes_forward_then_backward_once(d, m):
    for stage in range(d):
        order = run_order(stage, d, m, 3)
        forwards = [(a.batch, a.microbatch) for a in order if a.kind == "F"]
        backwards = [(a.batch, a.microbatch) for a in order if a.kind == "B"]
        everything = [(b, i) for b in range(3) for i in range(m)]
        assert forwards == everything and backwards == everything
        held = peak = 0
        for action in order:
            held += 1 if action.kind == "F" else -1
            assert held >= 0
            peak = max(peak, held)
        assert peak == d - stage <= m


@pytest.mark.parametrize(("d", "m"), [(1, 1), (4, 4), (4, 7)])
def test_a_steady_step_has_m_of_each_and_never_waits_for_an_empty_pipeline(d, m):
    for stage in range(d):
        steady = step_actions(stage, d, m, 5)
        assert [a.kind for a in steady] == ["F", "B"] * m
        tail = [("B", 4, i) for i in range(m - (d - 1 - stage), m)]
        assert [a for a in steady if a.kind == "B" and a.batch == 4] == tail
        assert drain_actions(stage, d, m, 4) == tail


def test_actions_print_readably():
    assert " ".join(map(str, step_actions(0, 2, 2, 1))) == "F1.0 B0.1 F1.1 B1.0"
