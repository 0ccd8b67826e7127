"""The tool that computes docs/when.md: bubbles with a closed form, and marks of the fastest layouts."""

import dataclasses
from pathlib import Path

import pytest
import when_it_pays as tool

from titan_async.planning.memory import Memory
from titan_async.planning.step_time import StepTime

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 4), (4, 16), (8, 16)])
def test_bubbles_are_those_of_the_closed_forms(stages, microbatches):
    empty = stages - 1
    closed = {
        "1F1B": empty / (microbatches + empty),
        "Interleaved1F1B": empty / (2 * microbatches + empty),
        "Async2BW": 0.0,
    }
    for schedule, bubble in closed.items():
        assert tool.bubble(schedule, stages, microbatches) == pytest.approx(bubble, abs=1e-9)


def test_overlapped_pairs_need_more_microbatches():
    assert tool.bubble("Async2BW, overlapped", 4, 6) is None
    assert tool.bubble("Async2BW, overlapped", 4, 7) == pytest.approx(0, abs=1e-9)


def row(seconds):
    values = {field.name: 0 for field in dataclasses.fields(StepTime)}
    time = StepTime(**(values | {"schedule": "1F1B", "step_seconds": seconds, "sent_bytes": {}}))
    return tool.Row("1F1B", 8, "1x1x8, 1, 2", time, Memory({}, "", 0))


def test_layouts_within_the_margin_of_the_fastest_are_marked():
    assert tool.cells([row(1.0), None, row(1.01), row(1.03)]) == [
        "**1.00 s**; 1x1x8, 1, 2",
        "-",
        "**1.01 s**; 1x1x8, 1, 2",
        "1.03 s; 1x1x8, 1, 2",
    ]


def test_every_table_has_its_place_in_the_page():
    page = (ROOT / "docs" / "when.md").read_text(encoding="utf-8")
    for table in tool.TABLES:
        body = page.partition(f"<!-- when {table} -->")[2].partition(f"<!-- end of when {table} -->")[0]
        assert body.startswith("\n| ")


def test_the_page_has_these_bubbles():
    page = (ROOT / "docs" / "when.md").read_text(encoding="utf-8")
    (line,) = (
        line for line in page.splitlines() if line.startswith("| ZBVZeroBubble |") and line.endswith("% |")
    )
    found = [cell.strip() for cell in line.split("|")[2:6]]
    assert found == [f"{tool.bubble('ZBVZeroBubble', 4, times * 4):.0%}" for times in tool.BUBBLE_TIMES]
