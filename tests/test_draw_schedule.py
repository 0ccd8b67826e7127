"""The drawings of schedules, compared with known properties of the schedules."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import draw_schedule as tool
import pytest
from matplotlib.figure import Figure

from tests.support import forks
from tests.support.selection import slow
from titan_async.monitor.gantt import Box
from titan_async.pipelining.recording import COMPUTE_KINDS, Kind

ROOT = Path(__file__).parents[1]

RANKS, MICROBATCHES = 4, 8


def charts_of(*argv: str) -> Figure:
    arguments = tool.parse([*argv, "--pp", str(RANKS), "--microbatches", str(MICROBATCHES)])
    figure = Figure((30, 10), layout="constrained")
    with tool.style():
        tool.draw(figure, arguments.schedules, arguments)
    return figure


def boxes_of(schedule: str, batches: int) -> list[Box]:
    arguments = tool.parse([schedule, "--pp", str(RANKS), "--microbatches", str(MICROBATCHES)])
    return tool.boxes_of(tool.simulated(schedule, arguments, batches))


def is_busy(boxes: list[Box], row: int, begin: float, end: float) -> bool:
    """Whether a row has no gap in that time."""
    for box in sorted((box for box in boxes if box.row == row), key=lambda box: box.start):
        if box.start > begin + 1e-9:
            break
        begin = max(begin, box.end)
    return begin >= end


@pytest.mark.parametrize("schedule", tool.SCHEDULES)
def test_every_rank_computes_each_task_once_without_overlap(schedule: str) -> None:
    boxes = boxes_of(schedule, 2)
    for rank in range(RANKS):
        row = sorted((box for box in boxes if box.row == rank), key=lambda box: box.start)
        assert all(a.end <= b.start + 1e-9 for a, b in zip(row, row[1:], strict=False))
        # A forward through all layers of a rank takes 1, and a backward 2, for any division into stages.
        assert sum(box.end - box.start for box in row) == pytest.approx(2 * MICROBATCHES * 3)
        forwards = [box.label for box in row if box.kind == Kind.FORWARD]
        stages = 1 if schedule in tool.ONE_STAGE else 2
        assert sorted(forwards) == sorted(str(m) for m in range(MICROBATCHES) for _ in range(2 * stages))
        # Each stage and batch has a different shade.
        assert len({box.tint for box in row}) == 2 * stages
    assert {box.kind for box in boxes} <= set(COMPUTE_KINDS)


def test_async_2bw_never_drains() -> None:
    boxes = boxes_of("Async2BW", 6)
    steady, last_batch = 33.0, 6 * 24.0
    for rank in range(RANKS):
        assert is_busy(boxes, rank, steady, last_batch - RANKS)
        assert not is_busy(boxes_of("1F1B", 6), rank, steady, 2 * steady)


def test_overlapped_pairs_are_split_boxes() -> None:
    arguments = tool.parse(["Async2BW", "--overlap", "--pp", str(RANKS), "--microbatches", str(MICROBATCHES)])
    boxes = tool.boxes_of(tool.simulated("Async2BW", arguments, 6))
    above, below = ([box for box in boxes if box.half == half] for half in (1, 2))
    assert {box.kind for box in above} == {Kind.FORWARD} and {box.kind for box in below} == {Kind.BACKWARD}
    assert [(b.row, b.start, b.end) for b in above] == [(b.row, b.start, b.end) for b in below]
    for rank in range(RANKS):  # all but the first and the last 2 (d - 1 - r) + 1
        in_pairs = [int(box.label) for box in below if box.row == rank]
        w = 2 * (RANKS - 1 - rank) + 1
        assert in_pairs == [k % MICROBATCHES for k in range(6 * MICROBATCHES - w)]
        assert is_busy([box for box in boxes if box.half != 2], rank, 33.0, 4 * 24.0)
    title = charts_of("Async2BW", "1F1B", "--overlap").axes[0].get_title(loc="left")
    assert title == "Async2BW, 8 microbatches, overlapped pairs: busy 100.0% of the time"


def test_schedules_continue_until_the_slowest_is_done() -> None:
    figure = charts_of("1F1B", "Async2BW")
    synchronous, asynchronous = figure.axes
    # 1F1B takes 3 (m + d - 1) per batch.
    assert synchronous.get_xlim() == asynchronous.get_xlim() == (0, 3 * 3 * (MICROBATCHES + RANKS - 1))
    # Each rank of Async2BW is busy from 33, when the pipeline has filled, to the end.
    arguments = tool.parse(["Async2BW"])
    run = tool._extended("Async2BW", arguments, tool.simulated("Async2BW", arguments, 3), 99.0)
    for rank in range(RANKS):
        assert is_busy(tool.boxes_of(run), rank, 33.0, 99.0)
    texts = [text.get_text() for text in asynchronous.texts]
    assert len(texts) > len(synchronous.texts) == 3 * 2 * MICROBATCHES * RANKS
    for patch in asynchronous.patches:  # no box is beyond the axis
        assert patch.get_path().vertices.reshape(-1, 5, 2)[:, 0, 0].max() < 99


def test_titles_contain_the_utilization() -> None:
    figure = charts_of("1F1B", "GPipe", "Async2BW", "ZBVZeroBubble", "Interleaved1F1B")
    # m / (m + d - 1); interleaving v stages divides the bubble by v: m / (m + (d - 1) / v).
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "1F1B, 8 microbatches: busy 72.7% of the time",
        "GPipe, 8 microbatches: busy 72.7% of the time",
        "Async2BW, 8 microbatches: busy 100.0% of the time",
        "ZBVZeroBubble, 8 microbatches, two stages per rank, the second darker: busy 94.1% of the time",
        "Interleaved1F1B, 8 microbatches, two stages per rank, the second darker: busy 84.2% of the time",
    ]


def test_latency_backward_and_lookahead_are_used() -> None:
    def busy(*argv: str) -> str:
        return charts_of("Async2BW", *argv).axes[0].get_title(loc="left").split("busy ")[1]

    assert busy("--latency", "0.5") != "100.0% of the time"
    assert busy("--latency", "0.5", "--lookahead", "3") == "100.0% of the time"
    one = charts_of("1F1B", "--batches", "1", "--backward", "1").axes[0]
    assert one.get_xlim() == (0, 2 * (MICROBATCHES + RANKS - 1))


@pytest.mark.parametrize("form", [slow("png"), "svg"])
def test_the_command_writes_a_file(form: str, tmp_path: Path) -> None:
    out = tmp_path / f"drawn.{form}"
    command = [sys.executable, ROOT / "tools" / "draw_schedule.py", "1F1B", "Async2BW", "--out", out]
    result = forks.run(command)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    if form == "png":
        assert out.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    else:
        assert ElementTree.parse(out).getroot().tag == "{http://www.w3.org/2000/svg}svg"


MISTAKES = [
    (["1F1C"], 'the schedule is "1F1C", which is none of {all}; did you mean 1F1B?'),
    (
        ["Async2BW", "--pp", "4", "--microbatches", "3"],
        "Async2BW on 4 stages needs at least 4 microbatches, not 3: raise --microbatches",
    ),
    (
        ["Async2BW", "--pp", "4", "--microbatches", "5", "--lookahead", "2"],
        "Async2BW on 4 stages and a lookahead of 2 needs at least 6 microbatches, not 5: "
        "raise --microbatches",
    ),
    (
        ["Async2BW", "--pp", "4", "--microbatches", "6", "--overlap"],
        "Async2BW on 4 stages with overlapped pairs needs at least 7 microbatches, not 6: "
        "raise --microbatches",
    ),
    (
        ["1F1B", "--microbatches", "3"],
        "1F1B does not support these numbers: 1F1B needs at least as many microbatches (3) as stages (4)",
    ),
    (
        ["1F1B", "--out", "{tmp}/file/x.svg"],
        "cannot write {tmp}/file/x.svg ({tmp}/file is not a folder): choose another path with --out",
    ),
]


@pytest.mark.parametrize(("argv", "message"), MISTAKES)
def test_mistakes(argv, message, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    names = {"all": ", ".join(tool.SCHEDULES), "tmp": tmp_path}
    assert tool.main([word.format(**names) for word in argv]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", message.format(**names) + "\n")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "flags",
    [["--pp", "0"], ["--lookahead", "-1"], ["--backward", "nan"], ["--latency", "-1"], ["--out", "x.pdf"]],
)
def test_wrong_numbers(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        tool.main(["1F1B", *flags])
    assert stopped.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_the_picture_of_the_documentation() -> None:
    path = ROOT / "docs" / "images" / "schedules.svg"
    assert path.stat().st_size < 300_000
    texts = ["".join(e.itertext()) for e in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    figure = charts_of("1F1B", "ZBVZeroBubble", "Async2BW")
    assert {axes.get_title(loc="left") for axes in figure.axes} <= set(texts)
