"""The order of actions: one forward and one backward of each microbatch, within the limits of the design.

Checked for drawn shapes and drains; `test_rendezvous.py` walks all stages of every small shape together.
"""

from collections import defaultdict
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_async.pipelining import drain_actions, step_actions
from titan_async.pipelining.actions import (
    ALL_EARLY,
    Action,
    EarlyReceives,
    Instruction,
    drain_program,
    evaluation_program,
    in_flight,
    slots,
    step_program,
)


class Shape(NamedTuple):
    stages: int
    microbatches: int
    lookahead: int


@st.composite
def shapes(draw):
    d = draw(st.integers(1, 12))
    m = draw(st.integers(d, d + 12))
    return Shape(d, m, draw(st.integers(0, m - d)))


fillings = st.lists(st.integers(1, 4), min_size=1, max_size=3)
"""Numbers of batches, with a drain after each."""


class Call(NamedTuple):
    """The actions of a stage in a `step`, or in a `drain`; batches are numbered across drains."""

    batch: int | None
    before: int  # batches that were begun before
    actions: list[Action]


def calls(stage, shape, filled):
    d, m, lookahead = shape
    done, start = [], 0
    for batches in filled:

        def shifted(actions, start=start):
            return [action._replace(batch=action.batch + start) for action in actions]

        for b in range(batches):
            done.append(Call(start + b, start + b, shifted(step_actions(stage, d, m, b, lookahead))))
        start += batches
        done.append(Call(None, start, shifted(drain_actions(stage, d, m, batches - 1, lookahead))))
    return done


def each_stage(shape, filled):
    for stage in range(shape.stages):
        yield stage, in_flight(stage, shape.stages, shape.lookahead), calls(stage, shape, filled)


@given(shapes(), fillings)
def test_every_microbatch_has_one_forward_then_one_backward_in_order(shape, filled):
    everything = [(b, i) for b in range(sum(filled)) for i in range(shape.microbatches)]
    for _, _, done in each_stage(shape, filled):
        order = [action for call in done for action in call.actions]
        for kind in "FB":
            assert [(a.batch, a.microbatch) for a in order if a.kind == kind] == everything
        place = {action: i for i, action in enumerate(order)}
        assert all(place[Action("F", *which)] < place[Action("B", *which)] for which in everything)


@given(shapes(), fillings)
def test_microbatches_in_flight_are_bounded_and_none_remains_after_a_drain(shape, filled):
    """Together with the running microbatch they need at most m slots."""
    for _, held, done in each_stage(shape, filled):
        now = 0
        for call in done:
            for action in call.actions:
                now += 1 if action.kind == "F" else -1
                assert 0 <= now <= held + 1 <= shape.microbatches
            assert now == (0 if call.batch is None else held)


@given(shapes())
def test_a_stage_holds_at_least_one_more_than_the_next_and_the_last_none(shape):
    """Otherwise two neighbors wait for each other in every pair. Lookahead decreases evenly."""
    d, m, lookahead = shape
    held = [in_flight(stage, d, lookahead) for stage in range(d)]
    assert held[0] == d - 1 + (lookahead if d > 1 else 0) and held[-1] == 0
    more = [here - behind for here, behind in zip(held, held[1:], strict=False)]
    assert not more or (min(more) >= 1 and max(more) - min(more) <= 1)


@given(shapes())
def test_slots_exceed_microbatches_in_flight_and_not_those_of_torch(shape):
    """torch has a receive buffer for each of the m microbatches."""
    d, m, lookahead = shape
    for stage in range(d):
        assert in_flight(stage, d, lookahead) < slots(stage, d, lookahead) <= m


@given(shapes(), fillings)
def test_a_gradient_is_complete_one_step_later_and_not_before_unless_nothing_is_in_flight(shape, filled):
    """Step b ends with all backwards of batch b-1 done; a drain with those of the last batch."""
    for _, held, done in each_stage(shape, filled):
        backwards = defaultdict(int)
        for call in done:
            for action in call.actions:
                backwards[action.batch] += action.kind == "B"
            newest = call.before - (call.batch is None)
            assert all(backwards[b] == shape.microbatches for b in range(newest))
            missing = 0 if call.batch is None else held
            assert backwards[newest] == shape.microbatches - missing


@given(shapes(), fillings)
def test_weights_of_two_batches_are_enough(shape, filled):
    """Those of a step's batch, and of the one before until its last backward."""
    for _, _, done in each_stage(shape, filled):
        waiting = set()
        for call in done:
            first = call.before - 1
            for action in call.actions:
                which = action.batch, action.microbatch
                needed = {batch for batch, _ in waiting | {which}}
                assert needed <= {first, first + 1}
                if action.kind == "F":
                    waiting.add(which)
                else:
                    waiting.remove(which)


def programs_of(stage, shape, filled, early=ALL_EARLY):
    """The instructions of each call of a stage and its actions; an evaluation ends them."""
    d, m, lookahead = shape
    for batches in filled:
        for b in range(batches):
            yield step_program(stage, d, m, b, lookahead, early), step_actions(stage, d, m, b, lookahead)
        last = batches - 1
        yield drain_program(stage, d, m, last, lookahead, early), drain_actions(stage, d, m, last, lookahead)
    yield evaluation_program(stage, d, m, early), [Action("F", 0, i) for i in range(m)]


choices = st.builds(EarlyReceives, st.booleans(), st.booleans())


@given(shapes(), fillings, choices)
def test_programs_are_the_actions_each_with_its_messages(shape, filled, early):
    for stage in range(shape.stages):
        upstream, downstream = stage > 0, stage < shape.stages - 1
        for program, actions in programs_of(stage, shape, filled, early):
            expected = []
            for action in actions:
                takes, gives = (upstream, downstream) if action.kind == "F" else (downstream, upstream)
                complete = action.kind == "B" and action.microbatch == shape.microbatches - 1
                kinds = ["wait"] * takes + ["compute"] + ["send"] * gives + ["finish"] * complete
                expected += [Instruction(kind, action) for kind in kinds]
            assert [instruction for instruction in program if instruction.kind != "receive"] == expected


@given(shapes(), fillings)
def test_the_next_message_of_a_kind_is_received_while_an_action_is_computed(shape, filled):
    """And no other one: `slots` counts one. A forward of the next step, or after a drain, may not come."""
    for stage in range(shape.stages):
        posted = {"F": [], "B": []}
        for program, actions in programs_of(stage, shape, filled):
            drains = all(action.kind == "B" for action in actions)
            for kind, action, _ in program:
                if kind == "receive":
                    posted[action.kind].append(action)
                elif kind == "wait":
                    assert posted[action.kind].pop(0) == action
                elif kind == "compute" and stage != (0 if action.kind == "F" else shape.stages - 1):
                    last = action.microbatch == shape.microbatches - 1
                    ends = last and (drains or action.kind == "F")
                    assert len(posted[action.kind]) == (not ends)
        assert posted == {"F": [], "B": []}


@given(shapes(), fillings, choices)
def test_no_late_receive_is_posted_while_anything_is_computed(shape, filled, early):
    """All of a GPU's multiprocessors are then free for the computation. None stays posted between calls."""
    for stage in range(shape.stages):
        for program, _ in programs_of(stage, shape, filled, early):
            posted = set()
            for kind, action, _ in program:
                if kind == "receive" and not early.of(action.kind):
                    posted.add(action)
                elif kind == "wait":
                    posted.discard(action)
                elif kind == "compute":
                    assert not posted
            assert not posted


@given(shapes(), fillings)
def test_the_first_gradient_is_received_once_the_forwards_that_it_needs_are_sent(shape, filled):
    """And still while a forward is computed: the one that comes before the first backward."""
    for stage in range(shape.stages - 1):
        held = in_flight(stage, shape.stages, shape.lookahead)
        program, _ = next(programs_of(stage, shape, filled))
        before = program[: program.index(Instruction("receive", Action("B", 0, 0)))]
        assert [a.microbatch for kind, a, _ in before if kind == "send"] == list(range(held))
        assert sum(kind == "compute" for kind, *_ in before) == held


@pytest.mark.parametrize(("d", "m"), [(1, 1), (4, 4), (4, 7)])
def test_a_steady_step_has_m_of_each_and_does_not_empty_the_pipeline(d, m):
    for stage in range(d):
        steady = step_actions(stage, d, m, 5)
        assert [a.kind for a in steady] == ["F", "B"] * m
        tail = [("B", 4, i) for i in range(m - (d - 1 - stage), m)]
        assert [a for a in steady if a.kind == "B" and a.batch == 4] == tail
        assert drain_actions(stage, d, m, 4) == tail


def test_actions_print_readably():
    assert " ".join(map(str, step_actions(0, 2, 2, 1))) == "F1.0 B0.1 F1.1 B1.0"
