"""The simulation against closed forms and the design's table. Backward takes twice as long as forward."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_async.pipelining.actions import drain_actions, step_actions
from titan_async.pipelining.simulation import Run, Span, Task, Timing, simulate

FORWARD, BACKWARD = 1.0, 2.0
PAIR = FORWARD + BACKWARD
SHAPES = [(1, 1), (2, 2), (4, 4), (4, 8), (8, 8), (8, 16)]


def even(stages, **others):
    return Timing([FORWARD] * stages, [BACKWARD] * stages, **others)


def one_stage(batches, microbatches, order):
    return [[Task(kind, 0, b, i) for b in range(batches) for i in range(microbatches) for kind in order]]


def async_2bw_programs(stages, microbatches, batches, lookahead=0):
    """The forwards and backwards of `ScheduleAsync2BW` in `batches` steps and a drain, without updates."""
    programs = []
    for stage in range(stages):
        actions = [
            action
            for batch in range(batches)
            for action in step_actions(stage, stages, microbatches, batch, lookahead)
        ]
        actions += drain_actions(stage, stages, microbatches, batches - 1, lookahead)
        programs.append([Task(kind, stage, batch, microbatch) for kind, batch, microbatch in actions])
    return programs


def overlapped_programs(stages, microbatches, batches, lookahead=0, too_few=0):
    """The same with forward k and backward k - w in one task, for the w of the design; the first stage may
    hold `too_few`."""
    programs = []
    for stage in range(stages):
        last = stages - 1
        w = 2 * (last - stage) + 1 + (lookahead * (last - stage) // last if last else 0)
        w -= 0 if stage else too_few
        program = []
        for k in range(microbatches * batches + w):
            forward, backward = (
                Task(kind, stage, *divmod(n, microbatches)) for kind, n in (("F", k), ("B", k - w))
            )
            if k < w:
                program.append(forward)
            elif k < microbatches * batches:
                program.append(forward._replace(overlapped=backward))
            else:
                program.append(backward)
        programs.append(program)
    return programs


def programs_holding(in_flight, microbatches):
    """Forward k, then backward k - w, with the given w of each stage; one batch."""
    programs = []
    for stage, tail in enumerate(in_flight):
        program = []
        for k in range(microbatches + tail):
            program += [Task("F", stage, 0, k)] if k < microbatches else []
            program += [Task("B", stage, 0, k - tail)] if k >= tail else []
        programs.append(program)
    return programs


@pytest.mark.parametrize(("d", "m"), SHAPES)
def test_async_2bw_is_always_busy(d, m):
    run = simulate(async_2bw_programs(d, m, 6), even(d))
    assert run.utilization == pytest.approx(1)
    assert run.makespan == pytest.approx((6 * m + d - 1) * PAIR)  # it fills and empties once
    assert run.peak_in_flight() == [d - r for r in range(d)]


@pytest.mark.parametrize("latency", [0.015, 0.06, 0.15])
@pytest.mark.parametrize(("d", "m"), [(2, 4), (4, 8), (8, 16)])
def test_lookahead_hides_the_latency_that_a_strict_order_waits_for(d, m, latency):
    # Little's law: d microbatches in flight, each on its way for d pairs and 2 (d - 1) messages.
    strict = simulate(async_2bw_programs(d, m, 8), even(d, latency=latency))
    assert strict.utilization == pytest.approx(PAIR / (PAIR + 2 * latency * (d - 1) / d))
    ahead = simulate(async_2bw_programs(d, m, 8, lookahead=d - 1), even(d, latency=latency))
    assert ahead.utilization == pytest.approx(1)
    assert ahead.peak_in_flight() == [1 + 2 * (d - 1 - r) for r in range(d)]


@pytest.mark.parametrize(("d", "m"), [(1, 1), (2, 3), (2, 16), (4, 7), (4, 8), (8, 15)])
def test_overlapped_pairs_are_always_busy_and_hold_one_microbatch_more_than_are_in_flight(d, m):
    run = simulate(overlapped_programs(d, m, 6), even(d))
    assert run.utilization == pytest.approx(1)
    assert run.step_seconds == pytest.approx(m * PAIR)
    assert run.makespan == pytest.approx((6 * m + d - 1) * PAIR)  # it fills and empties once
    assert run.peak_in_flight() == [2 * (d - 1 - r) + 2 for r in range(d)]


@pytest.mark.parametrize(("d", "m"), [(2, 4), (4, 8), (8, 16)])
def test_a_step_of_overlapped_pairs_takes_their_time(d, m):
    slowest = [1.75] * (d - 1) + [2.5]
    timing = even(d, pair=slowest)
    run = simulate(overlapped_programs(d, m, 8), timing)
    assert run.step_seconds == pytest.approx(m * 2.5)
    assert run.utilization == pytest.approx(((d - 1) * 1.75 + 2.5) / d / 2.5)
    assert run.busy[0] == pytest.approx((8 * m - 2 * d + 1) * 1.75 + (2 * d - 1) * PAIR)
    ends = {span.task: span.end for spans in run.timelines for span in spans}
    assert min(span.end - span.start for span in run.timelines[-1] if span.task.overlapped) == 2.5
    assert len(ends) == sum(map(len, run.timelines))


def test_a_stage_holds_two_more_than_the_next_where_pairs_overlap():
    """A hop to the next stage and its answer take a whole pair each."""
    seconds = simulate(overlapped_programs(4, 30, 6, too_few=1), even(4)).step_seconds
    assert seconds == pytest.approx(30 * 2 * PAIR, rel=0.1)
    with pytest.raises(ValueError, match=r"rank 0 cannot run F0.5 with B0.0 of stage 0, rank 1 cannot run F"):
        simulate(overlapped_programs(4, 30, 6, too_few=2), even(4))


def test_lookahead_hides_the_latency_that_overlapped_pairs_wait_for():
    # d pairs and 2 (d - 1) messages there and back, with 2 d - 1 microbatches in flight at a time.
    d, m, latency = 4, 12, 0.1
    strict = simulate(overlapped_programs(d, m, 8), even(d, latency=latency))
    ahead = simulate(overlapped_programs(d, m, 8, lookahead=d - 1), even(d, latency=latency))
    assert strict.step_seconds == pytest.approx(m * (PAIR + latency))
    assert ahead.step_seconds == pytest.approx(m * PAIR)


def test_a_stage_that_holds_no_more_than_the_next_waits_in_every_pair():
    last_quarter = slice(-100, -20)
    run = simulate(programs_holding([1, 1, 0], 200), even(3, latency=0.06 * PAIR))
    spans = run.timelines[0][last_quarter]
    period = (spans[-1].start - spans[1].start) / (len(spans) / 2 - 1)
    assert period == pytest.approx(2 * PAIR + 2 * 0.06 * PAIR)  # a utilization of .47


def test_a_stage_that_holds_less_than_the_next_stops_the_pipeline():
    with pytest.raises(ValueError, match=r"rank 0 cannot run B0.0 of stage 0, rank 1 cannot run F0.1"):
        simulate(programs_holding([0, 1], 4), even(2))


def test_a_backward_needs_its_forward():
    with pytest.raises(ValueError, match="wait for each other"):
        simulate(one_stage(1, 1, "BF"), even(1))


def test_gathering_reducing_and_updating_take_their_time_once_per_batch():
    once = [Task(kind, 0, 0, 0) for kind in "GFBRU"]
    program = [task._replace(batch=batch) for batch in range(4) for task in once]
    timing = even(1, gather=[0.5], reduction=[0.25], update=[2.0], norm=0.125)
    run = simulate([program], timing)
    extra = 0.5 + 0.25 + 2.0 + 0.125
    assert run.makespan == 4 * (PAIR + extra)
    assert run.step_seconds == PAIR + extra
    assert run.busy == [4 * PAIR]
    assert run.utilization == pytest.approx(PAIR / (PAIR + extra))


def test_an_update_waits_for_the_norm_of_every_stage():
    slow = [Task("F", 0, 0, 0), Task("B", 0, 0, 0), Task("R", 0, 0, 0), Task("U", 0, 0, 0)]
    quick = [task._replace(stage=1) for task in slow]
    timing = Timing([5.0, 1.0], [5.0, 1.0], norm=0.5)
    ends = [[span.end for span in spans] for spans in simulate([slow, quick], timing).timelines]
    assert ends == [[5.0, 12.0, 12.0, 12.5], [6.0, 7.0, 7.0, 12.5]]


def test_the_halves_of_a_backward_add_up_to_it():
    order = [("F", 0), ("F", 1), ("I", 1), ("I", 0), ("W", 1), ("W", 0)]
    program = [Task(kind, stage, batch, 0) for batch in range(3) for kind, stage in order]
    run = simulate([program], Timing([1, 1], [3, 5], weight_gradient=[1, 4]))
    spans = {str(span.task)[0] + str(span.task.stage): span.end - span.start for span in run.timelines[0]}
    assert spans == {"F0": 1, "F1": 1, "I0": 2, "I1": 1, "W0": 1, "W1": 4}
    assert run.makespan == 3 * 10


def test_an_input_gradient_frees_no_activations():
    order = [("F", 0), ("I", 0), ("F", 1), ("W", 0), ("I", 1), ("W", 1)]
    run = simulate([[Task(kind, 0, 0, microbatch) for kind, microbatch in order]], even(1))
    assert run.peak_in_flight() == [2]


def test_a_gradient_of_weights_needs_that_of_the_input():
    with pytest.raises(ValueError, match="wait for each other"):
        simulate([[Task(kind, 0, 0, 0) for kind in "FWI"]], even(1))


def test_messages_between_two_stages_take_their_own_time():
    chain = [[Task("F", 0, 0, 0), Task("B", 0, 0, 0)]]
    chain += [[task._replace(stage=stage) for task in chain[0]] for stage in (1, 2)]
    run = simulate(chain, Timing([1] * 3, [2] * 3, latency=[0.25, 4.0]))
    starts = [[span.start for span in spans] for spans in run.timelines]
    assert starts == [[0, 13.25 + 2 + 0.25], [1.25, 7.25 + 2 + 4], [6.25, 7.25]]


def test_stages_of_one_rank_exchange_no_messages():
    tasks = [("F", 0), ("F", 1), ("B", 1), ("B", 0)]
    program = [Task(kind, stage, batch, 0) for batch in range(3) for kind, stage in tasks]
    run = simulate([program], even(2, latency=7.0))
    assert run.makespan == 3 * 2 * PAIR
    assert run.peak_in_flight() == [2]
    assert run.peak_in_flight([0.5, 0.25]) == [0.75]


def test_the_slowest_stage_sets_the_pace():
    run = simulate(async_2bw_programs(2, 4, 8, lookahead=2), Timing([1, 2], [2, 4]))
    assert run.utilization == pytest.approx((1 / 2 + 1) / 2)


def test_jitter_is_that_of_the_seed_and_the_task():
    programs = async_2bw_programs(2, 4, 8)
    runs = [simulate(programs, even(2, jitter=0.3, seed=seed)) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    for seconds, mean in ((FORWARD, "F"), (BACKWARD, "B")):
        times = [s.end - s.start for spans in runs[0].timelines for s in spans if s.task.kind == mean]
        assert 0.7 * seconds <= min(times) < 0.9 * seconds < 1.1 * seconds < max(times) <= 1.3 * seconds


def test_the_noise_of_a_pair_is_that_of_its_halves():
    """So the noise does not depend on whether they overlap."""
    alone = simulate(async_2bw_programs(2, 6, 8), even(2, jitter=0.3))
    times = {span.task: span.end - span.start for spans in alone.timelines for span in spans}
    for pair, factor in ((), 1.0), ([1.5, 2.25], None):
        together = simulate(overlapped_programs(2, 6, 8), even(2, jitter=0.3, pair=pair))
        for spans in together.timelines:
            for task, start, end in spans:
                scale = factor or (pair[task.stage] / PAIR if task.overlapped else 1.0)
                assert end - start == pytest.approx(scale * sum(times[half] for half in task.halves))


def test_a_steady_state_needs_three_batches():
    assert simulate(one_stage(3, 1, "FB"), even(1)).utilization == 1
    with pytest.raises(ValueError, match="at least 3 batches, not 2"):
        _ = simulate(one_stage(2, 1, "FB"), even(1)).utilization


def test_in_flight_is_counted_over_the_stages_of_a_rank():
    order = [("F", 0), ("F", 2), ("B", 2), ("F", 0), ("B", 0), ("B", 0)]
    run = Run([[Span(Task(kind, stage, 0, 0), 0.0, 0.0) for kind, stage in order]])
    assert run.peak_in_flight([1.0, 0.0, 3.0]) == [4.0]


@given(st.integers(1, 5), st.integers(0, 3), st.floats(0, 2), st.floats(0, 0.9), st.booleans(), st.data())
def test_no_task_starts_before_its_inputs_and_no_rank_runs_two_at_once(
    d, spare, latency, jitter, overlap, data
):
    lookahead = data.draw(st.integers(0, spare))
    programs, least = (overlapped_programs, 2 * d - 1) if overlap else (async_2bw_programs, d)
    run = simulate(programs(d, least + spare, 3, lookahead), even(d, latency=latency, jitter=jitter))
    end = {half: span.end for spans in run.timelines for span in spans for half in span.task.halves}
    assert len(end) == 2 * d * 3 * (least + spare)
    for spans in run.timelines:
        assert all(one.end <= other.start for one, other in zip(spans, spans[1:], strict=False))
        for task, start in ((half, span.start) for span in spans for half in span.task.halves):
            before, after = task._replace(stage=task.stage - 1), task._replace(stage=task.stage + 1)
            needed = end.get(before if task.kind == "F" else after)
            assert needed is None or needed + latency <= start
            assert task.kind == "F" or end[task._replace(kind="F")] <= start
    assert 0 < run.utilization <= 1 + 1e-9
