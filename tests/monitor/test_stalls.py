"""Detection of stalls and stragglers, from spans written by hand."""

import time

import numpy as np
import pytest

from titan_async.monitor.events import RECORD, RankState
from titan_async.monitor.formatting import approximate_duration
from titan_async.monitor.stage_stats import RankStats
from titan_async.monitor.stalls import RankStatus, describe, find_stalls, find_stragglers
from titan_async.pipelining.recording import Kind

START = int(time.mktime((2026, 1, 2, 14, 3, 12, 0, 0, -1))) * 10**9
"""14:03:12 in the local time zone."""


def rank(
    number: int,
    kind: Kind | None,
    seconds: float,
    *,
    batch: int = 40,
    microbatch: int = 3,
    stage: int | None = None,
    held: bool = False,
    step_seconds: float | None = 0.5,
    heartbeat_age: float = 0.1,
) -> RankStatus:
    """A rank whose current span took `seconds`; `held`: the microbatch is in flight there."""
    stage = number if stage is None else stage
    stats = RankStats((stage,))
    rows = []
    if step_seconds is not None:
        rows.append((START - int(step_seconds * 1e9), START, 39, -1, -1, stage, Kind.STEP, 0))
    if held:
        rows.append((START, START + 1, batch, microbatch, 38, stage, Kind.FORWARD, 1))
    stats.add(np.array(rows, RECORD))
    current = np.zeros(1, RECORD)
    if kind is not None:
        current[0] = (START, 0, batch, microbatch, 38, stage, kind, 1)
    beat = START + int(seconds * 1e9)
    return RankStatus(number, RankState(1, beat, 0, 0, 0, 0, current[0]), stats, heartbeat_age)


def texts(*ranks: RankStatus, stages: int = 3) -> list[str]:
    return [stall.text for stall in find_stalls(ranks, stages)]


def test_wait_is_described() -> None:
    stalls = find_stalls(
        [
            rank(0, Kind.RECEIVE, 12, held=True),
            rank(1, Kind.RECEIVE, 11, microbatch=5, held=True),
            rank(2, Kind.BACKWARD, 10, microbatch=5),
        ],
        3,
    )
    assert [(stall.stages, stall.text) for stall in stalls] == [
        ((2,), "stage 2 computes the backward of microbatch 5 of step 40, since 14:03:12 (10 s)"),
        (
            (0,),
            "stage 0 waits for the gradient of microbatch 3 of step 40 from stage 1, since 14:03:12 (12 s)",
        ),
        (
            (1,),
            "stage 1 waits for the gradient of microbatch 5 of step 40 from stage 2, since 14:03:12 (11 s)",
        ),
    ]


def test_input_comes_from_the_previous_stage() -> None:
    assert describe(rank(1, Kind.RECEIVE, 6), 3) == (
        "waits for the input of microbatch 3 of step 40 from stage 0"
    )
    assert describe(rank(2, Kind.SEND, 6), 3) == "waits to send microbatch 3 of step 40 to stage 1"
    assert describe(rank(1, Kind.SEND, 6, held=True), 3) == (
        "waits to send microbatch 3 of step 40 to stage 2"
    )
    assert describe(rank(1, None, 6), 3) == "is between two steps"


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_is_described(kind: Kind) -> None:
    words = describe(rank(1, kind, 6), 3)
    assert words and "{" not in words and "Kind" not in words


@pytest.mark.parametrize(
    ("seconds", "step_seconds", "stalled"),
    [
        (4.9, 0.5, False),
        (5.1, 0.5, True),
        (9.9, 2.0, False),
        (10.1, 2.0, True),
        (290, None, False),
        (301, None, True),
    ],
)
def test_late_is_five_seconds_and_five_steps(
    seconds: float, step_seconds: float | None, stalled: bool
) -> None:
    found = texts(
        rank(0, Kind.RECEIVE, seconds, held=True, step_seconds=step_seconds),
        rank(1, Kind.FORWARD, 0.1, step_seconds=step_seconds),
        stages=2,
    )
    assert bool(found) == stalled


def test_no_stall_during_validation_and_save() -> None:
    for kind in (Kind.SAVE, Kind.VALIDATE):
        assert texts(rank(0, kind, 60), rank(1, Kind.RECEIVE, 60), rank(2, Kind.RECEIVE, 60)) == []


def test_endless_computation() -> None:
    """For example, a gather in a forward waits for a dead rank."""
    [found] = texts(rank(0, Kind.FORWARD, 60), stages=1)
    assert found == "stage 0 computes the forward of microbatch 3 of step 40, since 14:03:12 (60 s)"
    assert texts(rank(0, Kind.FORWARD, 60, step_seconds=20), rank(1, Kind.RECEIVE, 60, step_seconds=20)) == []


def test_rank_without_heartbeat_is_named_first() -> None:
    found = texts(
        rank(0, Kind.RECEIVE, 20, held=True), rank(1, Kind.FORWARD, 0.2, heartbeat_age=20), stages=2
    )
    assert found[0] == "rank 1 (stage 1) has sent no heartbeat for 20 s"
    assert found[1].startswith("stage 0 waits for the gradient") and len(found) == 2
    assert texts(rank(0, Kind.FORWARD, 0.1), rank(1, Kind.FORWARD, 0.2, heartbeat_age=9.9), stages=2) == []


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Kind.DATA, "stage 0 waits for the data of step 40, since 14:03:12 (8 s)"),
        (Kind.GARBAGE_COLLECTION, "stage 0 collects garbage before step 40, since 14:03:12 (8 s)"),
        (None, "stage 0 is between two steps"),
    ],
)
def test_cause_without_a_computation(kind: Kind | None, text: str) -> None:
    cause = rank(0, kind, 8, microbatch=-1)
    wait = "stage 1 waits for the input of microbatch 3 of step 40 from stage 0, since 14:03:12 (7 s)"
    assert texts(cause, rank(1, Kind.RECEIVE, 7), stages=2) == [text, wait]
    assert len(texts(cause, stages=1)) == (kind is not None)


def test_deadlock() -> None:
    stalls = find_stalls([rank(0, Kind.RECEIVE, 8, held=True), rank(1, Kind.RECEIVE, 8)], 2)
    assert (stalls[0].stages, stalls[0].text) == ((0, 1), "all stages wait for each other")
    assert [stall.stages for stall in stalls[1:]] == [(0,), (1,)]


def test_ranks_of_replicated_stages_are_named() -> None:
    found = texts(
        rank(4, Kind.REDUCE, 8, microbatch=-1, stage=1), rank(5, Kind.BACKWARD, 8, stage=1), stages=2
    )
    assert found == [
        "stage 1 on rank 5 computes the backward of microbatch 3 of step 40, since 14:03:12 (8 s)",
        "stage 1 on rank 4 waits for the other replicas' gradients of step 40, since 14:03:12 (8 s)",
    ]


def test_approximate_duration() -> None:
    assert [approximate_duration(s) for s in (0.4, 99, 125, 5400, 7500, 200_000)] == [
        "0 s", "99 s", "2 min", "90 min", "2 h 5 min", "2 d 7 h",
    ]  # fmt: skip


def test_straggler_without_heartbeat() -> None:
    late = rank(0, Kind.RECEIVE, 15), rank(1, Kind.OPTIMIZER, 2, heartbeat_age=15), rank(2, Kind.FORWARD, 14)
    assert find_stragglers(late, 3, 10) == ["rank 1 (stage 1) has sent no heartbeat for 15 s"]


def test_waiting_ranks_are_not_stragglers() -> None:
    ranks = rank(0, Kind.RECEIVE, 15), rank(1, Kind.CLIP, 14), rank(2, Kind.BACKWARD, 15)
    assert find_stragglers(ranks, 3, 10) == [
        "rank 2 (stage 2) computes the backward of microbatch 3 of step 40, since 14:03:12 (15 s)"
    ]
    between = rank(0, None, 15)
    assert find_stragglers((between, rank(1, Kind.FORWARD, 2)), 2, 10) == [
        "rank 0 (stage 0) is between two steps"
    ]
    assert len(find_stragglers((between, *ranks[1:]), 3, 10)) == 1
