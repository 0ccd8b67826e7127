"""No deadlock where nothing is buffered: the programs of all stages, walked under rendezvous.

The tests of the schedule run on gloo, which accepts a message before its receive is posted; NCCL does not.
The walk is a simulation (`tests/support/rendezvous.py`), so it can try every shape; the second half of this
file plants mistakes that it must find.
"""

import dataclasses
import itertools

import pytest
import torch

from tests.support.rank_programs import Program, Step, overwritten, programs
from tests.support.rendezvous import one_channel_per_direction, one_channel_per_rank, walk
from tests.support.selection import slow
from titan_async.pipelining import actions
from titan_async.pipelining.actions import ALL_EARLY, Action, EarlyReceives, in_flight
from titan_async.pipelining.overlap import Overlap, hand_over

STAGES = range(1, 9)
MOST = 16  # microbatches
PLAN = (2, 0, 1)
"""Batches up to a drain each; 0 evaluates."""


def shapes(d):
    return [(m, lookahead) for m in range(d, MOST + 1) for lookahead in range(m - d + 1)]


def some_shapes(d):
    """All with up to three microbatches more than stages, and those at the other end."""
    return [
        (m, lookahead) for m, lookahead in shapes(d) if m <= d + 3 or (m == MOST and lookahead in (0, m - d))
    ]


def F(microbatch, batch=0):  # noqa: N802
    return Action("F", batch, microbatch)


def B(microbatch, batch=0):  # noqa: N802
    return Action("B", batch, microbatch)


LATE = EarlyReceives(False, False)
ON_GPUS = [LATE, EarlyReceives(True, False)]
"""The choices for an edge within a host and between hosts, where a device is waited for."""


def mixed(choices):
    """One of `choices` for each stage, in turn."""
    return [choices[stage % len(choices)] for stage in range(max(STAGES))]


ACTIVATIONS, GRADIENTS = EarlyReceives(True, False), EarlyReceives(False, True)
CHOICES = [ALL_EARLY, LATE, mixed([ALL_EARLY, LATE]), mixed([ACTIVATIONS, GRADIENTS])]


def few_shapes(d):
    """Without lookahead, and with as much as is of use."""
    return [(m, lookahead) for m in (d, d + 2) for lookahead in {0, min(d - 1, m - d)}]


@pytest.mark.parametrize("shapes", [some_shapes, slow(shapes, id="all_shapes")])
@pytest.mark.parametrize("d", STAGES)
def test_every_shape_ends_with_all_messages_at_their_action_and_no_buffer_overwritten(d, shapes):
    check_messages_and_buffers(d, shapes(d), ALL_EARLY)


def overlapped(shapes, d):
    """As many microbatches more than pairs need as `shapes` has more than stages."""
    return [(m + d - 1, lookahead) for m, lookahead in shapes(d)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("shapes", [few_shapes, slow(some_shapes)])
@pytest.mark.parametrize("early", CHOICES)
@pytest.mark.parametrize("d", STAGES)
def test_every_shape_of_overlapped_pairs_ends_likewise(d, early, shapes):
    check_messages_and_buffers(d, overlapped(shapes, d), early, overlap=True)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shapes", [few_shapes, slow(shapes, id="all_shapes")])
@pytest.mark.parametrize("early", CHOICES[1:])
@pytest.mark.parametrize("d", STAGES)
def test_every_choice_of_early_receives_ends_likewise(d, early, shapes):
    check_messages_and_buffers(d, shapes(d), early)


def check_messages_and_buffers(d, shapes, early, **how):
    """No buffer is filled again before its backward, which autograd would not detect.

    And none is superfluous: with one fewer than `slots`, one is overwritten.
    """
    for m, lookahead in shapes:
        ranks = programs(d, m, lookahead, PLAN, early, **how)
        outcome = walk(ranks)
        assert outcome.fine, (m, lookahead, outcome)
        for program in ranks:
            assert not overwritten(program), (m, lookahead)
            program.slots -= 1
            assert program.slots == 0 or overwritten(program), (m, lookahead)


@pytest.mark.parametrize("d", STAGES)
def test_the_pipeline_is_not_flushed_between_batches(d):
    """Forwards take 1 and backwards 2: three batches take the time of their computation, and one filling.

    So the limit on pending sends does not delay a stage either.
    """
    for m, lookahead in {(n, la) for n in (d, d + 1, MOST) for la in (0, min(d - 1, n - d))}:
        outcome = walk(programs(d, m, lookahead, (3,)))
        assert outcome.fine and outcome.time == 3 * 3 * m + 3 * (d - 1), (m, lookahead, outcome)


@pytest.mark.parametrize("d", STAGES)
def test_the_pipeline_is_not_flushed_between_overlapped_pairs(d):
    for m, lookahead in {
        (n, la) for n in (2 * d - 1, 2 * d, 2 * MOST) for la in (0, min(d - 1, n - 2 * d + 1))
    }:
        outcome = walk(programs(d, m, lookahead, (3,), overlap=True))
        assert outcome.fine and outcome.time == 3 * 3 * m + 3 * (d - 1), (m, lookahead, outcome)


HAND_OVERS = [(1, 1), (2, 2), (2, 4), (3, 1), (0, 2)]
"""Exchanges of tokens in a forward and a backward; activation checkpointing repeats those of the former."""


@pytest.mark.covering(1)
@pytest.mark.parametrize("early", CHOICES)
@pytest.mark.parametrize("exchanges", HAND_OVERS)
@pytest.mark.parametrize("d", STAGES)
def test_ranks_that_share_experts_meet_in_the_same_exchange(d, exchanges, early):
    """Each stage of three pipelines, whatever the receives and however long a rank's device is waited for."""
    for m, lookahead in overlapped(few_shapes, d):
        ranks = programs(d, m, lookahead, PLAN, early, True, exchanges) * 3
        for waiting in (None, d // 2, 2 * d + d // 2):
            outcome = walk(
                ranks,
                replicas=3,
                device_waits=lambda rank, step, waiting=waiting: rank == waiting and anywhere(rank, step),
            )
            assert outcome.fine, (m, lookahead, waiting, outcome)


def test_it_finds_halves_that_begin_in_another_order_on_one_rank():
    ranks = programs(2, 4, 0, PLAN, overlap=True, exchanges=(2, 2)) * 2
    assert walk(ranks, replicas=2).fine
    steps = [*ranks[3].steps]
    ranks[3] = dataclasses.replace(ranks[3], steps=steps)
    pair = next(i for i, step in enumerate(steps) if step.overlapped)
    assert [str(step) for step in steps[pair + 1 : pair + 3]] == ["exchange B0.0", "exchange F0.1"]
    steps[pair + 1 : pair + 3] = reversed(steps[pair + 1 : pair + 3])
    assert " exchanges with " in walk(ranks, replicas=2).misdelivered[0]


@pytest.mark.parametrize("exchanges", HAND_OVERS)
def test_the_halves_of_a_pair_take_turns_as_in_the_walk(exchanges):
    """The order of `Overlap`'s two threads, whose halves are here a list of what they do."""
    done = []

    def half(kind):
        for number in range(exchanges[kind == "B"]):
            done.append(("exchange", kind, number))
            hand_over()
            done.append(("collect", kind, number))

    Overlap(torch.device("cpu")).run(lambda: half("F"), lambda: half("B"), Nothing())
    pair = programs(1, 2, 0, (1,), ALL_EARLY, True, exchanges)[0].steps
    begin = next(i for i, step in enumerate(pair) if step.overlapped) + 1
    assert done == [(s.kind, s.action.kind, s.number) for s in pair[begin : begin + len(done)]]


class Nothing:
    def leave(self, half):
        pass

    def enter(self, half):
        pass


def anywhere(rank, step):
    """Allocations and computations of a step may wait; a send is prepared before a late receive is posted."""
    return step.kind != "send"


@pytest.mark.covering(1)
@pytest.mark.parametrize("shapes", [few_shapes, slow(shapes, id="all_shapes")])
@pytest.mark.parametrize("early", [*ON_GPUS, mixed(ON_GPUS), mixed(ON_GPUS[::-1])])
@pytest.mark.parametrize("d", STAGES)
def test_all_ranks_may_wait_for_their_devices_anywhere(d, early, shapes):
    """The defaults of accelerators without lookahead: no order of such waits deadlocks."""
    for m, lookahead in shapes(d):
        if lookahead == 0:
            outcome = walk(programs(d, m, 0, PLAN, early), device_waits=anywhere)
            assert outcome.fine, (m, outcome)


@pytest.mark.covering(1)
@pytest.mark.parametrize("early", [*ON_GPUS, mixed(ON_GPUS), mixed(ON_GPUS[::-1])])
@pytest.mark.parametrize("d", STAGES)
def test_all_ranks_may_wait_for_their_devices_with_overlapped_pairs(d, early):
    for m, lookahead in overlapped(few_shapes, d):
        if lookahead == 0:
            ranks = programs(d, m, 0, PLAN, early, True, (2, 4)) * 2
            outcome = walk(ranks, device_waits=anywhere, replicas=2)
            assert outcome.fine, (m, outcome)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shapes", [few_shapes, slow(shapes, id="all_shapes")])
@pytest.mark.parametrize("early", CHOICES)
@pytest.mark.parametrize("d", STAGES)
def test_one_rank_may_wait_for_its_device_anywhere_whichever_receives_are_early(d, early, shapes):
    """No receive is posted whose message depends on what this stage has yet to send."""
    for (m, lookahead), waiting in itertools.product(shapes(d), {0, d // 2, d - 1}):
        if lookahead < d:
            outcome = walk(
                programs(d, m, lookahead, PLAN, early),
                device_waits=lambda rank, step, waiting=waiting: rank == waiting and anywhere(rank, step),
            )
            assert outcome.fine, (m, lookahead, waiting, outcome)


@pytest.mark.parametrize(("lookahead", "early"), [(0, ALL_EARLY), (1, LATE)])
@pytest.mark.parametrize("d", STAGES[1:])
def test_two_that_wait_at_once_hang_with_early_receives_at_both_ends_or_lookahead(d, lookahead, early):
    """So neither is the default on accelerators."""
    outcome = walk(programs(d, d + 1, lookahead, PLAN, early), device_waits=anywhere)
    assert any("device waits" in blocked.reason for blocked in outcome.blocked), outcome


@pytest.mark.parametrize("early", [ALL_EARLY, LATE])
def test_it_finds_the_first_gradient_received_before_any_forward_was_sent(early):
    """Without a wait for the device that is no deadlock, but the first such wait never ends."""
    ranks = programs(3, 5, 0, PLAN, early)
    steps = ranks[0].steps
    first = Step("receive", 0, B(0))
    steps.remove(first)
    steps.insert(0, first)
    assert walk(ranks).fine
    outcome = walk(ranks, device_waits=lambda rank, step: rank == 0 and step.kind == "compute")
    assert str(outcome.blocked[0]) == "rank 0 at compute F0.0: the device waits for B0.0 of filling 0"


@pytest.mark.parametrize("d", STAGES)
def test_without_lookahead_sends_may_even_block_until_their_receive_is_posted(d):
    for m in range(d, MOST + 1):
        outcome = walk(programs(d, m, 0, PLAN), sends_block=True)
        assert outcome.fine, (m, outcome)


@pytest.mark.parametrize("d", STAGES[1:])
def test_lookahead_needs_sends_that_do_not_block(d):
    """The first stage runs ahead into a batch, whose first receive the second one posts in its own step."""
    for m in range(d + 1, MOST + 1):
        for lookahead in {1, m - d}:
            outcome = walk(programs(d, m, lookahead, PLAN), sends_block=True)
            assert [b.step.kind for b in outcome.blocked[:2]] == ["send", "send"], (m, lookahead, outcome)


def one_channel_per_edge(rank, queue):
    return frozenset(queue)


@pytest.mark.parametrize("channel", [one_channel_per_rank, one_channel_per_edge])
@pytest.mark.parametrize("d", STAGES[1:])
def test_one_communicator_per_rank_or_edge_deadlocks_at_once(d, channel):
    """So `P2PChannels` has one per edge and direction: an early receive would block later sends."""
    for m, lookahead in shapes(d)[:: d + 1]:
        outcome = walk(programs(d, m, lookahead, PLAN), channel)
        assert len(outcome.blocked) == d, (m, lookahead, outcome)
        assert [b.step.filling for b in outcome.blocked] == [0] * d


def plant(rank, edit, d=3, m=5, lookahead=1, **how):
    """The walk of programs of which `edit` has changed that of `rank`."""
    ranks = programs(d, m, lookahead, PLAN)
    assert walk(ranks, **how).fine
    edit(ranks[rank].steps)
    return walk(ranks, **how)


def move(step, behind):
    def edit(steps):
        steps.remove(step)
        steps.insert(steps.index(behind) + 1, step)

    return edit


def test_it_finds_a_receive_that_is_posted_after_its_wait():
    receive, wait = (Step(kind, 0, F(2)) for kind in ("receive", "wait"))
    outcome = plant(1, move(receive, behind=wait))
    assert (outcome.blocked[1].rank, outcome.blocked[1].step) == (1, wait)
    assert "not posted" in str(outcome.blocked[1]) and len(outcome.blocked) == 3


def test_it_finds_a_send_behind_the_wait_for_its_answer():
    outcome = plant(1, move(Step("send", 0, F(4, 1)), behind=Step("wait", 0, B(4, 1))))
    assert [str(b.step) for b in outcome.blocked] == ["wait B1.4", "wait B1.4", "wait F1.4"]


def post_receives_late(steps):
    """Each directly before its wait."""
    for receive in [step for step in steps if step.kind == "receive"]:
        steps.remove(receive)
        steps.insert(steps.index(receive._replace(kind="wait")), receive)


def test_it_finds_receives_that_are_posted_late_where_sends_block():
    """Two neighbors then block in sends to each other, as in 1F1B without fused messages."""
    ranks = programs(3, 5, 0, PLAN)
    for program in ranks:
        post_receives_late(program.steps)
    assert walk(ranks).fine
    assert [b.step.kind for b in walk(ranks, sends_block=True).blocked][:2] == ["send", "send"]


def test_it_finds_two_sends_in_the_wrong_order():
    def swap(steps):
        first, second = (steps.index(Step("send", 0, F(i))) for i in (0, 1))
        steps[first], steps[second] = steps[second], steps[first]

    outcome = plant(0, swap)
    assert not outcome.blocked and len(outcome.misdelivered) == 2
    assert outcome.misdelivered[0] == "F0.1 of filling 0 arrives as F0.0 of filling 0"


@pytest.mark.parametrize(
    ("rank", "kind", "reason"), [(0, "send", "not taken"), (1, "receive", "nothing waits")]
)
def test_it_finds_a_superfluous_message(rank, kind, reason):
    outcome = plant(rank, lambda steps: steps.insert(-1, Step(kind, 2, F(5))))
    assert [(b.rank, str(b.step)) for b in outcome.blocked] == [(rank, "close")]
    assert reason in outcome.blocked[0].reason


def test_it_finds_a_message_that_is_left_at_the_end():
    program = programs(2, 2, 0, (1,))
    program[0].steps.append(Step("send", 1, F(0)))
    outcome = walk(program)
    assert len(outcome.left) == 1 and not outcome.blocked and not outcome.fine


def test_it_finds_a_limit_on_sends_that_is_too_low_for_the_lookahead():
    """The limit on pending sends must grow with the microbatches in flight."""
    ranks = programs(2, 8, 6, PLAN)
    assert walk(ranks).fine
    for program in ranks:
        program.max_pending_sends = 2
    assert [b.step.kind for b in walk(ranks).blocked] == ["send", "send"]


def hold_more_behind(monkeypatch, stage, more):
    """Four stages, of which all those after `stage` hold `more` microbatches too many."""

    def held(r, d, lookahead=0, overlap=False):
        return in_flight(r, d) + (more if r > stage else 0)

    monkeypatch.setattr(actions, "in_flight", held)


@pytest.mark.parametrize("stage", range(3))
def test_it_finds_a_stage_that_holds_less_than_the_next(monkeypatch, stage):
    hold_more_behind(monkeypatch, stage, 2)
    outcome = walk(programs(4, 6, 0, PLAN))
    assert {stage, stage + 1} <= {b.rank for b in outcome.blocked}, outcome


@pytest.mark.parametrize("stage", range(3))
def test_it_finds_a_stage_that_holds_as_many_as_the_next(monkeypatch, stage):
    """No deadlock, but the two wait for each other in every pair, at half the speed."""
    hold_more_behind(monkeypatch, stage, 1)
    batches, m = 4, 16
    outcome = walk(programs(4, m, 0, (batches,)))
    assert outcome.fine and outcome.time > 1.9 * 3 * batches * m


@pytest.mark.parametrize(("d", "m"), [(d, m) for d in (3, 4, 8) for m in range(1, d - 1)])
def test_it_finds_too_few_microbatches(d, m):
    """With two fewer than stages the first one holds more than a batch, whose gradient no step receives."""
    assert not walk(programs(d, m, 0, PLAN)).fine


def synchronous(rank, d, m, fused):
    """1F1B as torch runs it: no early receives, but a send and the next receive of an edge start together."""
    ahead = min(m, d - rank)
    order = [F(i) for i in range(ahead)]
    for i in range(m):
        order += [B(i)] + ([F(i + ahead)] if i + ahead < m else [])
    steps, sent_to = [], None
    for action in order:
        up, down = (rank > 0, rank < d - 1) if action.kind == "F" else (rank < d - 1, rank > 0)
        source, to = (-1, 1) if action.kind == "F" else (1, -1)
        if up:
            steps += [Step("receive", 0, action, fused and sent_to == source), Step("wait", 0, action)]
        steps.append(Step("compute", 0, action))
        if down:
            steps.append(Step("send", 0, action))
        sent_to = to if down else None
    return Program(steps + [Step("close", 0)], m, m, 1)


@pytest.mark.parametrize("channel", [one_channel_per_direction, one_channel_per_rank])
@pytest.mark.parametrize(("d", "m"), list(itertools.product((2, 3, 5), (5, 8))))
def test_1f1b_needs_fused_messages(channel, d, m):
    """A known order: torch fuses these, so that neighbors do not block in sends to each other."""
    for fused in (True, False):
        outcome = walk([synchronous(r, d, m, fused) for r in range(d)], channel, sends_block=True)
        assert outcome.fine == fused, outcome
        if not fused:
            assert [b.step.kind for b in outcome.blocked][-2:] == ["send", "send"]
