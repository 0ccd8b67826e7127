"""The simulation where messages occupy ranks: by hand, in small time steps, and from its own spans."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.selection import slow
from titan_async.pipelining.programs import schedule_programs
from titan_async.pipelining.simulation import Task, Timing, simulate


def spans_of(run):
    return [[(span.start, span.end) for span in spans] for spans in run.timelines]


@pytest.mark.parametrize(
    ("ahead", "share", "first", "second"),
    [
        # The first stage never waits. The second one's F0 begins when the first message, sent at 4, has taken
        # its second.
        (None, 0.25, [4, 8, 12], [(5, 15), (15, 25), (25, 35)]),
        # F1 runs at three quarters until its first send is taken, at 5, so that it ends at 4 + 1 + 3.25. Its
        # message waits until the second stage is free, at 15, and all of F2 meanwhile runs at three quarters.
        ((0, 9), 0.25, [4, 8.25, 8.25 + 16 / 3], [(5, 15), (16, 26), (27, 37)]),
        ((0, 9), 0.0, [4, 8, 12], [(5, 15), (16, 26), (27, 37)]),
        # Posted at 5, the second receive waits 3.25 for F1 and takes its second, which costs F0 4.25 / 4; F2
        # has left at 12.5 and is received a second after the start of F1, which costs 1 / 4.
        ((1, 9), 0.25, [4, 8.25, 12.5], [(5, 16.0625), (16.0625, 26.3125), (26.3125, 36.3125)]),
        ((1, 9), 0.0, [4, 8, 12], [(5, 15), (15, 25), (25, 35)]),
    ],
)
def test_two_stages_by_hand(ahead, share, first, second):
    programs = [[Task("F", stage, 0, i) for i in range(3)] for stage in (0, 1)]
    timing = Timing([4, 10], [0, 0], latency=1, receives_ahead=[ahead], message_share=share)
    upstream, downstream = spans_of(simulate(programs, timing))
    assert [end for _, end in upstream] == pytest.approx(first)
    assert downstream == [pytest.approx(span) for span in second]


@pytest.mark.parametrize("kind", ["G", "R"])
def test_directions_add_up_and_messages_of_one_count_once(kind):
    """The last stage gathers or reduces for 100 seconds, while those before it continue."""
    programs = [[Task("F", stage, 0, i) for i in range(3)] for stage in range(3)]
    programs[2].insert(0, Task(kind, 2, 0, 0))
    seconds = [0, 0, 100]
    timing = Timing(
        [20, 8, 1],
        [0, 0, 0],
        gather=seconds,
        reduction=seconds,
        receives_ahead=[(1, 0), (0, 1)],
        message_share=[0.25, 0.125],
    )
    _, middle, last = spans_of(simulate(programs, timing))
    # F1 is received from the start of F0 to 40, F2 from that of F1 to 60. The sends of F0 and F1 wait for the
    # last stage until 100; but if its batch begins with a "G", the receive of F0 is posted from the start.
    first, second, third = 8 / 0.75, 8 / (0.75 if kind == "G" else 0.625), 8 / 0.875
    assert middle == [pytest.approx(span) for span in ((20, 20 + first), (40, 40 + second), (60, 60 + third))]
    assert last[:2] == [(0, 100), (100, 101)]


def test_more_than_all_processors_is_refused():
    programs = [[Task("F", stage, 0, i) for i in range(3)] for stage in (0, 1)]
    with pytest.raises(ValueError, match="all processors .* lower their share"):
        simulate(programs, Timing([4, 10], [0, 0], latency=1, receives_ahead=[(0, 0)], message_share=1.0))


def test_the_waits_of_async_2bw_without_slowdown():
    d, m, latency = 4, 8, 0.05
    programs = schedule_programs("Async2BW", d, m, 8, d - 1)
    seconds = {
        ahead: simulate(
            programs, Timing([1.0] * d, [2.0] * d, latency=latency, receives_ahead=[ahead] * (d - 1))
        ).step_seconds
        for ahead in (None, (2, 2), (1, 1), (1, 0), (0, 1), (0, 0))
    }
    assert seconds[None] == pytest.approx(m * 3)
    # Only the first message of a step is not received before it is waited for; late, all are.
    assert seconds[2, 2] == pytest.approx(seconds[1, 1]) == pytest.approx(m * 3 + latency)
    assert seconds[1, 0] == pytest.approx(m * (3 + latency) + latency)
    assert seconds[0, 1] == pytest.approx(m * (3 + latency))
    assert seconds[0, 0] == pytest.approx(m * (3 + 2 * latency))


SHAPES = [
    ("Async2BW", 3, 5, 2),
    ("Interleaved1F1B", 2, 4, 0),
    ("overlapped", 3, 6, 1),
    ("Async2BW", 2, 2, 0),
    ("1F1B", 3, 4, 0),
    ("overlapped", 2, 3, 0),
]
shapes = st.sampled_from([*SHAPES, ("Async2BW", 4, 7, 3), ("ZBVZeroBubble", 2, 4, 0)])


def programs_of(schedule, d, m, batches, lookahead):
    if schedule == "overlapped":
        return schedule_programs("Async2BW", d, m, batches, lookahead, overlap=True)
    return schedule_programs(schedule, d, m, batches, lookahead)


some_ahead = st.integers(0, 2)


def timing_of(stages, draw):
    """Of random stages and edges, in multiples of an eighth."""

    def some(least, most, count=stages):
        return [draw(st.integers(8 * least, 8 * most)) / 8 for _ in range(count)]

    return Timing(
        some(1, 4),
        some(1, 8),
        pair=some(1, 8),
        latency=some(0, 1, stages - 1),
        receives_ahead=[draw(st.none() | st.tuples(some_ahead, some_ahead)) for _ in range(stages - 1)],
        message_share=[draw(st.sampled_from([0.0, 0.03, 0.12])) for _ in range(stages - 1)],
        gather=some(0, 1),
        reduction=some(0, 1),
        update=some(0, 2),
        norm=draw(st.sampled_from([0.0, 0.5])),
    )


class Messages:
    """Sources and destinations of messages, and where a program posts their receives."""

    def __init__(self, programs, timing):
        self.edge, self.source, self.destination, self.posted_at = {}, {}, {}, {}
        place = {
            half: (rank, i)
            for rank, program in enumerate(programs)
            for i, task in enumerate(program)
            for half in task.halves
        }
        for (kind, stage, batch, i, _), (rank, position) in place.items():
            step = {"F": -1, "B": 1, "I": 1}.get(kind, 0)
            names = [Task(name, stage + step, batch, i) for name in ("FF" if kind == "F" else "BI")]
            sender = next((name for name in names if name in place), None)
            if not step or sender is None or place[sender][0] == rank:
                continue
            edge = min(stage, stage + step)
            ahead = timing.receives_ahead[edge]
            if ahead is None:
                continue
            ahead = ahead[kind != "F"]
            self.edge[sender], self.source[sender] = edge, place[sender]
            self.destination[sender] = rank, position
            own = [n for n in range(position) if programs[rank][n][1] == stage]
            alike = [
                n
                for n in own
                if any(half.kind in ("F" if kind == "F" else "BI") for half in programs[rank][n].halves)
            ]
            begins = [n for n in own if programs[rank][n][0] == "G"][-1:] if kind == "F" else []
            alike = [n for n in alike if not begins or n > begins[0]]
            if len(alike) >= ahead > 0:
                at = alike[-ahead]
            elif begins and (ahead or not alike):
                at = begins[0]
            else:
                at = alike[0] if ahead and alike else position
            self.posted_at[sender] = at, at < position


@settings(max_examples=30)
@given(shapes, st.data())
def test_the_speed_of_a_task_over_its_span_adds_up_to_its_work(shape, data):
    """Starts and ends determine when messages are sent, posted and arrive, and so the speed of each task at
    any time. It must add up to the task's work, and no task may start before its input has arrived."""
    schedule, d, m, lookahead = shape
    programs = programs_of(schedule, d, m, 3, lookahead)
    timing = timing_of(max(task.stage for program in programs for task in program) + 1, data.draw)
    run = simulate(programs, timing)
    spans = [[(span.start, span.end) for span in own] for own in run.timelines]
    messages = Messages(programs, timing)
    costs = [[] for _ in programs]  # what occupies a rank: channel, share, from, until
    there, channels = {}, {}
    in_order = sorted(messages.edge.items(), key=lambda entry: messages.destination[entry[0]])
    for sender, edge in in_order:
        (source, sent), (rank, wanted) = messages.source[sender], messages.destination[sender]
        at, early = messages.posted_at[sender]
        free = spans[rank][at - 1][1] if at else 0.0
        posted, sent_at = spans[rank][at][0] if early else free, spans[source][sent][1]
        channel = sender.kind == "F", sender.stage
        arrival = max(posted, sent_at, channels.get(channel, 0.0)) + timing.latency[edge]
        there[rank, wanted] = channels[channel] = arrival
        costs[source].append((("out", *channel), timing.message_share[edge], sent_at, arrival))
        costs[rank].append((("in", *channel), timing.message_share[edge], posted, arrival))
    for rank, program in enumerate(programs):
        for position, (task, (start, end)) in enumerate(zip(program, spans[rank], strict=True)):
            assert start >= there.get((rank, position), 0.0) - 1e-9
            own = costs[rank] if task.kind not in "GR" else []
            cuts = sorted({start, end, *(t for c in own for t in c[2:] if start < t < end)})
            work = 0.0
            for begin, until in itertools.pairwise(cuts):
                middle = (begin + until) / 2
                active = {channel: share for channel, share, first, last in own if first < middle < last}
                work += (until - begin) * (1 - sum(active.values()))
            assert work == pytest.approx(timing.seconds(task), abs=1e-7)


def stepped(programs, timing, tick):
    """The same simulation in fixed time steps."""
    messages = Messages(programs, timing)
    left = {sender: timing.latency[edge] for sender, edge in messages.edge.items()}
    sent, posted, done = set(), set(), {}
    position, work, starts = [0] * len(programs), [None] * len(programs), [[] for _ in programs]
    ranks_of = {task.stage: rank for rank, program in enumerate(programs) for task in program}
    last = max(ranks_of)
    now = 0

    def there(rank, task):
        kind, stage, batch, i, overlapped = task
        if overlapped:
            return all(there(rank, half) for half in task.halves)
        if kind == "U":
            return all(done.get(Task("R", s, batch, 0), 1e9) + timing.norm <= now for s in ranks_of)
        needed = {"F": [("F", stage - 1)], "W": [("B", stage)]}.get(kind, [("F", stage), ("B", stage + 1)])
        for name, of in needed if kind in "FBIW" else ():
            if not 0 <= of <= last:
                continue
            message = Task(name, of, batch, i)
            if message in left:
                if message not in sent or left[message] > 0:
                    return False
                continue
            extra = timing.latency[min(of, stage)] if ranks_of[of] != rank else 0.0
            if done.get(message, 1e9) + extra > now:
                return False
        return True

    while any(n < len(program) for n, program in zip(position, programs, strict=True)):
        for rank, program in enumerate(programs):
            while position[rank] < len(program):
                here = position[rank]
                if work[rank] is None:
                    late = [s for s, to in messages.destination.items() if to == (rank, here)]
                    posted.update(s for s in late if not messages.posted_at[s][1])
                    if not there(rank, program[here]):
                        break
                    for s, (at, early) in messages.posted_at.items():
                        if early and at == here and messages.destination[s][0] == rank:
                            posted.add(s)
                    work[rank] = timing.seconds(program[here])
                    starts[rank].append(now)
                if work[rank] > tick / 2:
                    break
                for half in program[here].halves:
                    task = half._replace(kind="B") if half.kind == "I" else half
                    done[task] = now
                    sent |= {task} & set(left)
                position[rank], work[rank] = here + 1, None
        moving = {message for message in sent & posted if left[message] > 0}
        for rank, program in enumerate(programs):
            if work[rank] is None:
                continue
            channels = {
                ("in", s[:2]): s for s in posted if left[s] > 0 and messages.destination[s][0] == rank
            }
            channels |= {("out", s[:2]): s for s in sent if left[s] > 0 and messages.source[s][0] == rank}
            slow = sum(timing.message_share[messages.edge[s]] for s in channels.values())
            work[rank] -= tick * (1 if program[position[rank]].kind in "GR" else 1 - slow)
        for message in moving:
            left[message] -= tick
        now += tick
    return starts


@pytest.mark.parametrize("ahead", [(1, 0), (0, 1)])
@pytest.mark.parametrize(
    ("schedule", "d", "m", "lookahead"), [*SHAPES[:3], *(slow(*shape) for shape in SHAPES[3:])]
)
def test_small_steps_of_time_agree(schedule, d, m, lookahead, ahead):
    programs = programs_of(schedule, d, m, 2, lookahead)
    stages = max(task.stage for program in programs for task in program) + 1
    timing = Timing(
        [1 + 0.25 * (stage % 2) for stage in range(stages)],
        [2 - 0.125 * stage for stage in range(stages)],
        pair=[2.25 + 0.125 * stage for stage in range(stages)],
        latency=[0.25] * (stages - 1),
        receives_ahead=[ahead] * (stages - 1),
        message_share=[0.125 / (1 + stage) for stage in range(stages - 1)],
        update=[0.5] * stages,
    )
    run = simulate(programs, timing)
    tick = 2**-7
    for spans, starts in zip(run.timelines, stepped(programs, timing, tick), strict=True):
        # Each task on the way to another can end a tick late.
        assert [span.start for span in spans] == pytest.approx(starts, abs=tick * len(spans) * 2)
