"""The picture of an overlapped pair, compared with its known duration."""

import sys
from itertools import pairwise
from pathlib import Path

import draw_pair as tool
import pytest


def test_only_a_pair_hides_all_messages() -> None:
    alone, paired = tool.one_after_the_other(), tool.together()
    computation = sum(tool.FORWARD) + sum(tool.BACKWARD)
    assert max(box.end for box in alone) == computation + 8 * tool.MESSAGE
    assert max(box.end for box in paired) == computation
    assert len(alone) == len(paired) == 18
    for boxes in (alone, paired):
        for row in range(len(tool.ROWS)):
            in_row = [box for box in boxes if box.row == row]
            assert all(a.end <= b.start for a, b in pairwise(in_row))


def test_picture_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pair.svg"
    monkeypatch.setattr(sys, "argv", ["draw_pair.py", "--out", str(path)])
    tool.main()
    assert path.read_text().startswith("<?xml")
