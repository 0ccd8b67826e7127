"""The programs of all schedules: complete, executable, and with the step times of closed forms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.selection import slow
from titan_async.pipelining._order_internals import torch_order
from titan_async.pipelining.actions import drain_actions, step_actions
from titan_async.pipelining.programs import async_programs, schedule_programs, stages_of_ranks
from titan_async.pipelining.simulation import Task, Timing, simulate

FORWARD, BACKWARD = 1.0, 2.0
PAIR = FORWARD + BACKWARD
SYNCHRONOUS = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"]
ALL = [*SYNCHRONOUS, "DualPipeV", "Async2BW"]


def even(schedule, ranks, **others):
    """Times of stages that together keep a rank busy for a pair; forward, and both halves of a backward,
    take as long as each other."""
    each = len(stages_of_ranks(schedule, ranks)[0])
    stages = ranks * each
    return Timing([FORWARD / each] * stages, [BACKWARD / each] * stages, **others)


def run_of(schedule, ranks, microbatches, batches=5, **others):
    return simulate(
        schedule_programs(schedule, ranks, microbatches, batches), even(schedule, ranks, **others)
    )


@pytest.mark.parametrize(
    ("d", "m", "flush", "boundary", "end_of_step", "deferred"),
    [(4, 4, 0.571, 0.665, 0.797, 0.988), slow(8, 16, 0.696, 0.773, 0.871, 0.993)],
)
def test_the_designs_table(d, m, flush, boundary, end_of_step, deferred):
    """Backwards twice as long as forwards; messages, all-reduces and updates that take no time; sixty
    batches, including the fill and the drain of the pipeline."""
    measured = [
        schedule_programs("1F1B", d, m, 60),
        async_programs(d, m, 60, norm="boundary"),
        async_programs(d, m, 60, norm="end of step"),
        schedule_programs("Async2BW", d, m, 60),
    ]
    for programs, expected in zip(measured, (flush, boundary, end_of_step, deferred), strict=True):
        run = simulate(programs, even("1F1B", d))
        assert sum(run.busy) / d / run.makespan == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("d", "m"), [(1, 1), (2, 2), (3, 7), (4, 4), (8, 16)])
def test_one_stage_per_rank_has_its_bubble(schedule, d, m):
    run = run_of(schedule, d, m)
    assert run.step_seconds == pytest.approx((m + d - 1) * PAIR)
    assert run.makespan == pytest.approx(5 * (m + d - 1) * PAIR)
    assert 1 - run.utilization == pytest.approx((d - 1) / (m + d - 1))
    held = [m if schedule == "GPipe" else min(m, d - r) for r in range(d)]
    assert run.peak_in_flight() == held


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "LoopedBFS"])
@pytest.mark.parametrize(("d", "m"), [(2, 2), (2, 6), (4, 4), (4, 8), (8, 16)])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(schedule, d, m):
    run = run_of(schedule, d, m)
    assert 1 - run.utilization == pytest.approx((d - 1) / (2 * m + d - 1))


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize(("d", "m"), [(2, 4), (4, 8), (4, 12), (8, 16)])
def test_a_zero_bubble_leaves_only_the_skew_between_ranks(schedule, d, m):
    """If forward and both halves of a backward take equally long, a rank never waits once it has begun; but
    the last one begins d - 1 forwards late, and all wait for it before the update."""
    run = run_of(schedule, d, m, batches=3)
    assert run.step_seconds == pytest.approx(m * PAIR + (d - 1) * FORWARD / 2)
    for rank, spans in enumerate(run.timelines):
        own = [span for span in spans if span.task.batch == 0 and span.task.kind in "FBIW"]
        assert own[0].start == rank * FORWARD / 2
        if schedule == "ZBVZeroBubble":
            assert own[-1].end - own[0].start == pytest.approx(m * PAIR)


MEASURED = {
    "GPipe": [0.641, 0.543, 0.692, 0.496, 0.645],
    "1F1B": [0.640, 0.547, 0.695, 0.504, 0.654],
    "Interleaved1F1B": [0.742, 0.662, 0.772, 0.611, 0.746],
    "InterleavedZeroBubble": [0.842, 0.791, 0.837, 0.728, 0.817],
    "ZBVZeroBubble": [0.791, 0.724, 0.856, 0.682, 0.828],
    "DualPipeV": [None, None, 0.813, None, 0.789],
    "Async2BW": [0.960, 0.949, 0.962, 0.936, 0.958],
}
"""Utilization of stages that sleep 20 ms forward and 40 ms backward, as docs/benchmarks.md reports it."""


@pytest.mark.parametrize("schedule", MEASURED)
def test_measured_steps_are_predicted_within_ten_percent(schedule):
    """With 1.5 ms of other work per microbatch (2 if backwards are split), 3 ms per step and 0.3 ms per
    message; docs/planning.md has the errors."""
    each = len(stages_of_ranks(schedule, 2)[0])
    forward, halves = 0.0005, schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    shapes = [(2, 2, 0), (4, 4, 0), (4, 8, 3), (8, 8, 0), (8, 16, 7)]
    for (d, m, lookahead), utilization in zip(shapes, MEASURED[schedule], strict=True):
        if utilization is None:
            continue
        stages = d * each
        timing = Timing(
            [0.020 / each + forward] * stages,
            [0.040 / each + (0.002 if halves else 0.0015) - forward] * stages,
            latency=0.0003,
            update=[0.003 if stage < d else 0.0 for stage in range(stages)],
            norm=0.0003,
        )
        programs = schedule_programs(schedule, d, m, 6, lookahead if schedule == "Async2BW" else 0)
        predicted, measured = simulate(programs, timing).step_seconds, m * 0.060 / utilization
        assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("lookahead", [0, 3])
def test_async_2bw_waits_only_for_a_late_norm(lookahead):
    d, m = 4, 8
    programs = schedule_programs("Async2BW", d, m, 8, lookahead)
    assert simulate(programs, even("Async2BW", d)).utilization == pytest.approx(1)
    # The first stage is the last to send its share: as many pairs before the end of a step as it holds fewer
    # microbatches than m.
    hidden = (m - d - lookahead) * PAIR
    assert simulate(programs, even("Async2BW", d, norm=hidden)).utilization == pytest.approx(1)
    assert simulate(programs, even("Async2BW", d, norm=m * PAIR)).utilization < 0.99
    assert run_of("1F1B", d, m, norm=1.0).step_seconds == pytest.approx((m + d - 1) * PAIR + 1)


def test_async_2bw_computes_the_actions_of_its_steps():
    d, m, batches, lookahead = 3, 4, 5, 1
    for stage, tasks in enumerate(async_programs(d, m, batches, lookahead)):
        steps = [step_actions(stage, d, m, batch, lookahead) for batch in range(batches)]
        drained = drain_actions(stage, d, m, batches - 1, lookahead)
        computed = [(task.kind, task.batch, task.microbatch) for task in tasks if task.kind in "FB"]
        assert computed == [action for actions in (*steps, drained) for action in actions]


@pytest.mark.parametrize(("lookahead", "overlap"), [(0, False), (2, False), (1, True)])
def test_async_2bw_drains_in_every_batch_of_a_synchronous_start(lookahead, overlap):
    d, m, batches = 3, 7, 4
    programs = schedule_programs("Async2BW", d, m, batches, lookahead, overlap=overlap, drains=True)
    for stage, tasks in enumerate(programs):
        alone = [*step_actions(stage, d, m, 0, lookahead, overlap)]
        alone += drain_actions(stage, d, m, 0, lookahead, overlap)
        halves = [half for task in tasks for half in task.halves]
        computed = [(half.kind, half.batch, half.microbatch) for half in halves if half.kind in "FB"]
        assert computed == [(kind, b, microbatch) for b in range(batches) for kind, _, microbatch in alone]
        for b in range(batches):  # the update comes last
            assert [half.kind for half in halves if half.batch == b][-1] == "U"
    run = simulate(programs, even("Async2BW", d))
    if not overlap:
        assert run.step_seconds == pytest.approx((m + d - 1) * PAIR)
    else:
        assert run.step_seconds > m * PAIR + PAIR


def test_overlapped_pairs_are_the_forwards_that_a_backward_follows():
    d, m, batches, lookahead = 3, 7, 4, 2
    programs = schedule_programs("Async2BW", d, m, batches, lookahead, overlap=True)
    for stage, tasks in enumerate(programs):
        w = 2 * (d - 1 - stage) + 1 + (lookahead, 1, 0)[stage]
        assert [task.batch * m + task.microbatch for task in tasks if task.kind == "B"] == [
            *range(batches * m - w, batches * m)
        ]
        for task in tasks:
            number = task.batch * m + task.microbatch - w
            if task.kind == "F":
                assert task.overlapped == (Task("B", stage, *divmod(number, m)) if number >= 0 else None)
    assert str(programs[2][3]) == "F0.2 with B0.1 of stage 2"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_an_update_comes_one_step_late_and_before_the_next_weights_are_read(lookahead, overlap):
    for program in async_programs(3, 6, 5, lookahead, overlap=overlap):
        place = {half: position for position, task in enumerate(program) for half in task.halves}
        stage = program[0].stage
        for batch in range(5):
            reduced, updated = (place[Task(kind, stage, batch, 0)] for kind in "RU")
            assert place[Task("B", stage, batch, 5)] + 1 == reduced < updated
            if batch < 3:
                assert place[Task("F", stage, batch + 1, 5)] < updated < place[Task("G", stage, batch + 2, 0)]


@pytest.mark.parametrize("schedule", ALL)
@given(ranks=st.integers(2, 4), rounds=st.integers(2, 3), latency=st.sampled_from([0.0, 0.125]))
def test_every_rank_runs_each_of_its_tasks_once(schedule, ranks, rounds, latency):
    m = ranks * rounds
    programs = schedule_programs(schedule, ranks, m, 3)
    stages = stages_of_ranks(schedule, ranks)
    for own, program in zip(stages, programs, strict=True):
        assert len(set(program)) == len(program)
        for stage in own:
            for batch in range(3):
                done = [task.kind for task in program if (task.stage, task.batch) == (stage, batch)]
                assert [done.count(kind) for kind in "FGRU"] == [m, 1, 1, 1]
                assert done.count("B") + done.count("I") == m and done.count("I") == done.count("W")
    run = simulate(programs, even(schedule, ranks, latency=latency))
    assert run.busy == [pytest.approx(3 * m * PAIR)] * ranks


def test_torchs_private_names_have_the_assumed_meaning():
    """Fails if torch renames what `_order_internals` reads, or reorders the smallest pipelines."""

    def shown(schedule, stages, m):
        orders = torch_order(schedule, stages, m)
        return [" ".join(f"{kind}{stage}.{i}" for kind, stage, i in order) for order in orders]

    assert shown("Interleaved1F1B", [[0, 2], [1, 3]], 2) == [
        "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1",
    ]
    assert shown("ZBVZeroBubble", [[0, 1]], 1) == ["F0.0 F1.0 I1.0 W1.0 I0.0 W0.0"]
    assert set(shown("DualPipeV", [[0, 1]], 2)[0].split()) >= {"F0.0", "B1.0", "F1.1"}


@pytest.mark.parametrize(
    ("schedule", "ranks", "m", "words"),
    [
        ("1F1B", 4, 3, "at least as many microbatches"),
        ("DualPipeV", 4, 4, "at least as many microbatches as stages"),
        ("Interleaved1F1B", 4, 9, "multiple"),
        ("Interleaved2F2B", 2, 2, "Unknown schedule"),
    ],
)
def test_unsupported_numbers_are_refused(schedule, ranks, m, words):
    with pytest.raises(ValueError, match=words):
        schedule_programs(schedule, ranks, m, 1)
