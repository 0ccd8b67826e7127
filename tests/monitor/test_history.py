"""The history of a journal, and its curves."""

import math

import pytest

from titan_async.monitor.journal import History, Series
from titan_async.monitor.view.curve_panel import curve


def test_series_is_averaged_in_bounded_memory() -> None:
    series = Series(max_points=64)
    for step in range(1, 10_001):
        series.add(step, float(step))
        assert len(series.points) <= 64
    steps, values = zip(*series.points, strict=True)
    assert steps[-1] == 10_000 and list(steps) == sorted(steps)
    width = steps[1] - steps[0]
    assert len(steps) >= 32
    # The mean of the steps of each point.
    assert values[:-1] == pytest.approx([step - (width - 1) / 2 for step in steps[:-1]])


def test_short_series_is_unchanged() -> None:
    series = Series()
    for step in (10, 20, 30):
        series.add(step, step / 10)
    assert series.points == ((10, 1.0), (20, 2.0), (30, 3.0))


def test_entries_of_the_journal() -> None:
    history = History()
    entries = [
        {"time": 1, "kind": "log", "text": "hello"},
        {"time": 100, "kind": "step", "step": 10, "loss": 4.0, "grad_norm": None, "tokens_per_second": 1000,
         "learning_rate": 1e-3, "skipped": 0, "mfu": 0.4, "utilization": [0.5]},
        {"time": 120, "kind": "step", "step": 20, "loss": None, "learning_rate": 2e-3, "skipped": 2},
        {"time": 130, "kind": "step", "step": 25, "loss": 3.5, "learning_rate": 3e-3, "skipped": 2},
        {"time": 131, "kind": "validation", "step": 25, "loss": 3.6},
        {"time": 132, "kind": "checkpoint", "step": 20, "seconds": 1.0},
        {"time": 133, "kind": "checkpoint", "step": 25, "seconds": 1.0},
        {"time": 134, "kind": "warning", "text": "careful"},
        {"time": 135, "kind": "of a later version", "text": "?"},
        {"time": 136, "kind": "step"},
        {"time": 137, "kind": "checkpoint", "step": None},
        {"time": 138, "kind": "end", "reason": "stopped"},
    ]  # fmt: skip
    for entry in entries:
        history.add(entry)
    of_step = [history.last("step", field) for field in ("loss", "learning_rate", "skipped", "mfu")]
    assert (history.step, of_step) == (25, [3.5, 3e-3, 2, None])
    assert history.loss.points == ((10, 4.0), (25, 3.5))  # a non-finite loss is omitted
    assert history.learning_rate.points == ((10, 1e-3), (20, 2e-3), (25, 3e-3))
    assert [history.last("validation", field) for field in ("step", "loss")] == [25, 3.6]
    assert (history.last("checkpoint", "step"), history.counts["checkpoint"]) == (25, 2)
    assert (history.counts["warning"], history.last_time) == (1, 138)
    assert [(line.text, line.is_warning) for line in history.lines] == [("hello", False), ("careful", True)]
    assert history.end == "stopped"
    assert history.step_seconds == pytest.approx(30 / 15)


def test_old_log_lines_are_dropped() -> None:
    history = History()
    for i in range(10_000):
        history.add({"time": i, "kind": "log", "text": str(i)})
    assert len(history.lines) == 500 and history.lines[-1].text == "9999"


def dots(lines: list[str]) -> set[tuple[int, int]]:
    """Column and row of each dot of a curve in Braille, by the numbers of dots in Unicode's names."""
    places = {1: (0, 0), 2: (0, 1), 3: (0, 2), 4: (1, 0), 5: (1, 1), 6: (1, 2), 7: (0, 3), 8: (1, 3)}
    return {
        (2 * column + places[dot][0], 4 * row + places[dot][1])
        for row, line in enumerate(lines)
        for column, char in enumerate(line)
        for dot in places
        if char != " " and (ord(char) - 0x2800) >> (dot - 1) & 1
    }


def test_a_falling_line() -> None:
    lines = curve(((0, 7.0), (7, 0.0)), 4, 2)
    assert dots(lines) == {(i, i) for i in range(8)}
    assert curve(((0, 3.0), (3, 0.0)), 4, 4, ascii_only=True) == ("*   ", " *  ", "  * ", "   *")


def test_curve_leaves_room_for_remaining_steps() -> None:
    lines = curve(((0, 0.0), (10, 1.0)), 20, 4, last_x=20)
    assert all(line[11:].strip() == "" and len(line) == 20 for line in lines)
    assert lines[0][10] != " "
    assert dots(curve(((0, 1.0), (39, 1.0)), 20, 4, low=0.0)) == {(i, 0) for i in range(40)}


def test_curves_of_few_or_odd_points() -> None:
    blank = (" " * 5,) * 3
    assert curve((), 5, 3) == blank and curve(((1, math.nan), (2, math.inf)), 5, 3) == blank
    assert len(dots(curve(((1, 2.0),), 5, 3))) == 1
    assert curve(((1, 2.0),), 0, 3) == ("",) * 3 and curve(((1, 2.0),), 5, 0) == ()
    assert len(dots(curve(((1, 1.0), (2, math.nan), (3, 1.0)), 5, 3))) == 10
