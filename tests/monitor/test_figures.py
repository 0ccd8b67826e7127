"""Plots of runs: matplotlib's artists are compared with records, journals and simulations."""

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch

from tests.support.events import write_run
from tests.support.watching import change_info
from titan_async.cli.main import main
from titan_async.monitor.curves import Curve, gap, read_losses, read_utilization, smoothed
from titan_async.monitor.events import RankReader, ring_path, summary_path
from titan_async.monitor.figures import draw_losses, draw_timelines, draw_utilizations, style
from titan_async.monitor.gantt import tint_of
from titan_async.monitor.journal import journal_path
from titan_async.monitor.kinds import KINDS
from titan_async.monitor.spans import RunSpans, load_spans, select_steps
from titan_async.pipelining.programs import schedule_programs
from titan_async.pipelining.recording import COMPUTE_KINDS, Kind
from titan_async.pipelining.simulation import Timing, simulate

OLDER, NEWER = "20260101-000000-aaaa", "20260102-000000-bbbb"


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Warnings of matplotlib, such as of text that does not fit, are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def curve_of(*points: tuple[int, float]) -> Curve:
    return Curve(np.array([s for s, _ in points], np.int64), np.array([v for _, v in points], np.float64))


def points_of(curve: Curve) -> list[tuple[int, float]]:
    return list(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))


def rewrite_journal(folder: Path, *entries: dict) -> None:
    lines = [json.dumps({"time": 0.0} | entry) + "\n" for entry in entries]
    journal_path(folder).write_text("".join(lines))


def step(number: int, loss: float | None) -> dict:
    return {"kind": "step", "step": number, "loss": loss}


def validation(number: int, loss: float) -> dict:
    return {"kind": "validation", "step": number, "loss": loss}


def small_run(run_dir: Path, run_id: str = OLDER, **options) -> Path:
    options = {"stages": 2, "microbatches": 2, "steps": 4} | options
    return write_run(run_dir, run_id, **options)


# Curves


def test_resumed_run_replaces_later_steps(tmp_path: Path) -> None:
    first, second = small_run(tmp_path), small_run(tmp_path, NEWER, first_step=20)
    rewrite_journal(
        first, *(step(n, n / 10) for n in (10, 20, 30, 40)), validation(20, 7.0), validation(40, 8.0)
    )
    rewrite_journal(
        second, step(25, 1.0), {"kind": "log", "text": "loss"}, step(35, None), validation(30, 6.0)
    )
    training, validated = read_losses(tmp_path)
    assert points_of(training)[:3] == [(10, 1.0), (20, 2.0), (25, 1.0)]
    assert training.steps.tolist() == [10, 20, 25, 35] and np.isnan(training.values[3])
    assert points_of(validated) == [(20, 7.0), (30, 6.0)]


def test_run_without_entries_replaces_nothing(tmp_path: Path) -> None:
    first, second = small_run(tmp_path), small_run(tmp_path, NEWER, first_step=20)
    rewrite_journal(first, step(20, 2.0), step(30, 3.0))
    rewrite_journal(second, {"kind": "log", "text": "training"})
    assert points_of(read_losses(tmp_path)[0]) == [(20, 2.0), (30, 3.0)]


def test_gap_is_computed_at_common_steps() -> None:
    base = curve_of((10, 5.0), (20, 3.0), (40, 2.0))
    other = curve_of((5, 9.0), (10, 5.5), (15, 4.5), (30, 2.25), (50, 0.0))
    # At 15 the base is half way from 5 to 3, at 30 from 3 to 2; 5 and 50 are not in it.
    assert points_of(gap(other, base)) == [(10, 0.5), (15, 0.5), (30, -0.25)]
    assert len(gap(other, curve_of())) == 0


def test_smoothing() -> None:
    assert points_of(smoothed(curve_of((1, 0.0), (2, 3.0), (4, 0.0), (5, 6.0)), 3)) == [(2, 1.0), (4, 3.0)]
    holed = curve_of((0, 1.0), (1, float("nan")), (2, 3.0), (3, 5.0), (4, 7.0))
    assert points_of(smoothed(holed, 3)) == [(1, 2.0), (2, 4.0), (3, 5.0)]
    assert np.isnan(smoothed(curve_of((0, float("nan"))), 1).values).all()


@pytest.mark.parametrize("schedule", ["Async2BW", "1F1B", "ZBVZeroBubble"])
def test_read_utilization_equals_the_simulation(schedule: str, tmp_path: Path) -> None:
    ranks, microbatches, steps = 3, 6, 6
    shape = {"schedule": schedule, "stages": ranks, "microbatches": microbatches, "steps": steps}
    write_run(tmp_path, **shape, forward=1.0, started=0.0)
    found = read_utilization(tmp_path)
    assert found is not None
    assert list(zip(found.first_steps, found.last_steps, strict=True)) == [(1, 2), (3, 4), (5, 6)]

    programs = schedule_programs(schedule, ranks, microbatches, steps)
    total = len({task.stage for program in programs for task in program})
    timing = Timing(
        [1.0] * total, [2.0] * total, latency=0.05,
        update=[0.5] * total, reduction=[0.1] * total, gather=[0.05] * total,
    )  # fmt: skip
    order = [tuple(sorted({task.stage for task in program})) for program in programs]
    assert found.stages == sorted(order)
    for rank, spans in enumerate(simulate(programs, timing).timelines):
        updates = [span.end for span in spans if span.task.kind == "U" and span.task.stage == order[rank][-1]]
        borders = [0.0, *updates[1::2]]
        for interval, (begin, end) in enumerate(zip(borders, borders[1:], strict=False)):
            busy = sum(
                span.end - span.start
                for span in spans
                if span.task.kind in "FBIW" and begin <= span.start and span.end <= end
            )
            assert found.busy[found.stages.index(order[rank]), interval] == pytest.approx(
                busy / (end - begin), rel=1e-3
            )


def test_utilization_joins_runs_and_averages_replicas(tmp_path: Path) -> None:
    small_run(tmp_path, steps=6)
    first = read_utilization(tmp_path)
    assert first is not None and first.last_steps.tolist() == [2, 4, 6]
    small_run(tmp_path, NEWER, first_step=3, steps=4, slow_stage=1)
    both = read_utilization(tmp_path)
    assert both is not None
    # Steps 3 and 4 of the first run are one interval, half of which was repeated.
    assert list(zip(both.first_steps, both.last_steps, strict=True)) == [(1, 2), (4, 5), (6, 7)]
    np.testing.assert_array_equal(both.busy[:, 0], first.busy[:, 0])

    copies = tmp_path / "copies"
    folder = small_run(copies)
    other = small_run(tmp_path / "other", slow_stage=0)
    change_info(folder, ranks=[[0], [0], [1], [1]])
    slow = read_utilization(tmp_path / "other")
    for rank, source in ((3, other / "rank-00001.summary"), (2, folder / "rank-00001.summary")):
        summary_path(folder, rank).write_bytes(source.read_bytes())
    summary_path(folder, 1).write_bytes((other / "rank-00000.summary").read_bytes())
    small_run(tmp_path / "even")
    even, mean = read_utilization(tmp_path / "even"), read_utilization(copies)
    assert slow is not None and even is not None and mean is not None
    assert mean.stages == [(0,), (1,)]
    np.testing.assert_allclose(mean.busy, (slow.busy + even.busy) / 2, rtol=1e-5)


# Plots


def test_losses_are_drawn_with_the_gap_to_the_first() -> None:
    runs = [
        ("one", curve_of((10, 5.0), (20, 3.0)), curve_of((20, 3.5))),
        ("two $^$", curve_of((10, 5.5), (20, 2.75)), curve_of((20, 3.75))),
    ]
    with style():
        figure = Figure(layout="constrained")
        draw_losses(figure, runs)
        figure.draw_without_rendering()
    [axes] = figure.axes
    drawn = [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axes.lines[:4]]
    assert drawn == [([10, 20], [5.0, 3.0]), ([20], [3.5]), ([10, 20], [5.5, 2.75]), ([20], [3.75])]
    assert axes.lines[0].get_color() == axes.lines[1].get_color() != axes.lines[2].get_color()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one", "two $^$", "validation"]
    [inset] = axes.child_axes
    zero, curve, point = inset.lines
    assert (list(zero.get_ydata()), curve.get_ydata().tolist()) == ([0, 0], [0.5, -0.25])
    assert (point.get_xdata().tolist(), point.get_ydata().tolist()) == ([20], [0.25])
    assert curve.get_color() == axes.lines[2].get_color()


def test_one_run_has_no_inset_and_many_points_are_smoothed() -> None:
    many = curve_of(*((n, 5.0 + n % 2) for n in range(1000)))
    figure = Figure()
    draw_losses(figure, [("one", many, curve_of())])
    [axes] = figure.axes
    assert axes.child_axes == []
    thin, thick = axes.lines
    assert thin.get_ydata().tolist() == many.values.tolist()
    assert thin.get_linewidth() < thick.get_linewidth()
    assert np.ptp(thick.get_ydata()) < 0.1
    assert (thick.get_xdata()[0], thick.get_xdata()[-1]) == (12, 987)  # means of 25 points


def boxes_drawn(axes) -> dict[str, set[tuple[float, float, float]]]:
    """Row, start and end of every box, by colour."""
    found = {}
    for patch in axes.patches:
        assert isinstance(patch, PathPatch)
        corners = patch.get_path().vertices.reshape(-1, 5, 2)
        colour = to_hex(patch.get_facecolor())
        assert colour not in found
        found[colour] = {
            (round((box[:, 1].min() + box[:, 1].max()) / 2), box[:, 0].min(), box[:, 0].max())
            for box in corners
        }
    return found


def timelines(size: tuple[float, float], runs: list[tuple[str, RunSpans]]) -> Figure:
    with style():
        figure = Figure(size, layout="constrained")
        draw_timelines(figure, runs)
    return figure


def tinted(colour: str, tint: float) -> str:
    """A colour mixed with white, or with black for a negative tint."""
    share, target = abs(tint), 255 if tint > 0 else 0
    return "#" + "".join(
        f"{round((1 - share) * int(colour[i : i + 2], 16) + share * target):02x}" for i in (1, 3, 5)
    )


@pytest.mark.parametrize("schedule", ["Async2BW", "ZBVZeroBubble"])
def test_timeline_shows_every_record(schedule: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path, schedule=schedule, stages=3, microbatches=6, steps=5)
    run = select_steps(load_spans(folder), range(3, 5))
    figure = timelines((40, 4), [("one", run)])  # wide enough for all numbers
    [axes] = figure.axes

    records = [RankReader(folder, rank).new_records() for rank in range(3)]
    windows = []
    for each in records:
        of_steps = each[each["kind"] == Kind.STEP]
        windows.append(
            (of_steps["start"][of_steps["batch"] == 3][0], of_steps["end"][of_steps["batch"] == 4][0])
        )
    origin = min(begin for begin, _ in windows)
    wanted: dict[str, set] = {}
    numbers = []
    for rank, (each, (begin, end)) in enumerate(zip(records, windows, strict=True)):
        for record in each:
            kind = Kind(record["kind"])
            if kind == Kind.STEP or record["start"] < begin or record["end"] > end:
                continue
            colour = KINDS[kind].colour
            if kind in COMPUTE_KINDS:
                tint = tint_of(int(record["batch"]), int(record["stage"] >= 3))
                colour = tinted(colour, tint)
                numbers.append(str(record["microbatch"]))
            box = (rank, (record["start"] - origin) / 1e9, (record["end"] - origin) / 1e9)
            wanted.setdefault(colour, set()).add(box)
    assert boxes_drawn(axes) == wanted
    assert sorted(text.get_text() for text in axes.texts if text.get_text().isdecimal()) == sorted(numbers)
    names = [label.get_text() for label in axes.get_yticklabels()]
    if schedule == "Async2BW":
        assert names == ["stage 0", "stage 1", "stage 2"]
    else:
        assert names == ["stages 0 and 5", "stages 1 and 4", "stages 2 and 3"]
    # A line for every step of every rank, with the number above the first.
    assert len(axes.lines) == 2 * 3
    assert [text.get_text() for text in axes.texts if text.get_text()[:4] == "step"] == ["step 3", "step 4"]


def test_pipeline_without_records_is_skipped(tmp_path: Path) -> None:
    folder = small_run(tmp_path)
    change_info(folder, ranks=[[0], [0], [1], [1]])
    ring_path(folder, 1).rename(ring_path(folder, 3))
    ring_path(folder, 0).rename(ring_path(folder, 1))
    run = load_spans(folder)
    assert run.missing == [0, 2]
    figure = timelines((7, 3), [("one", run)])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["stage 0", "stage 1"]


def test_narrow_boxes_have_no_label(tmp_path: Path) -> None:
    run = load_spans(write_run(tmp_path, steps=12))
    figure = timelines((3, 2), [("one", run)])
    assert [text for text in figure.axes[0].texts if text.get_text().isdecimal()] == []


def test_legend_has_the_kinds_that_occur(tmp_path: Path) -> None:
    run = load_spans(write_run(tmp_path, schedule="ZBVZeroBubble", stages=2, microbatches=4, steps=3))
    figure = timelines((7, 3), [("one", run)])
    figure.draw_without_rendering()
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "forward", "backward, input half", "backward, weight half", "wait for a message",
        "gather weights", "reduce gradient", "optimizer",
    ]  # fmt: skip
    box = legend.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width


def test_runs_share_one_scale(tmp_path: Path) -> None:
    runs = []
    for name, forward in (("fast", 0.01), ("slow", 0.05)):
        folder = small_run(tmp_path / name, forward=forward)
        runs.append((name, select_steps(load_spans(folder), range(2, 4))))
    figure = timelines((7, 3), runs)
    fast, slow = figure.axes
    assert fast.get_xlim() == slow.get_xlim()
    ends = [max(end for boxes in boxes_drawn(axes).values() for *_, end in boxes) for axes in figure.axes]
    assert ends[1] == slow.get_xlim()[1]
    assert ends[1] / ends[0] == pytest.approx(5, rel=1e-3)


def test_utilization_has_a_line_for_each_rank_and_the_mean(tmp_path: Path) -> None:
    write_run(tmp_path, schedule="1F1B", stages=2, microbatches=4, steps=4)
    found = read_utilization(tmp_path)
    assert found is not None
    figure = Figure()
    draw_utilizations(figure, [("one", found)])
    [axes] = figure.axes
    first, second, mean = axes.lines
    assert [line.get_label() for line in axes.lines] == ["stage 0", "stage 1", "mean"]
    for line, busy in ((first, found.busy[0]), (second, found.busy[1]), (mean, found.busy.mean(axis=0))):
        # Each interval from the end of the step before it to the end of its last step.
        assert line.get_xdata().tolist() == [0, 2, 2, 4]
        assert line.get_ydata().tolist() == [busy[0], busy[0], busy[1], busy[1]]
    # 4 microbatches on 2 stages: at most 4/5.
    assert 0.7 < found.mean < 0.8
    assert axes.get_title() == f"one: {found.mean:.1%}"


# Colours

# Linear RGB as seen with each form of dichromacy (Machado, Oliveira and Fernandes 2009).
DICHROMACY = {
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def lab(colour: str, matrix: np.ndarray) -> np.ndarray:
    """CIELAB coordinates under D65."""
    srgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(np.clip(to_xyz @ np.clip(matrix @ linear, 0, 1), 0.009, None) / to_xyz.sum(axis=1))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("form", DICHROMACY)
def test_colours_are_distinct_under_colour_blindness(form: str) -> None:
    matrix = np.array(DICHROMACY[form])
    seen = [lab(KINDS[kind].colour, matrix) for kind in (*COMPUTE_KINDS, Kind.RECEIVE, Kind.IDLE)]
    for i, one in enumerate(seen):
        for other in seen[:i]:
            assert np.linalg.norm(one - other) > 15


# The command


def kind_of_file(path: Path) -> str:
    data = path.read_bytes()
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    assert ElementTree.fromstring(data).tag == "{http://www.w3.org/2000/svg}svg"
    return "svg"


def texts_of(path: Path) -> list[str]:
    return [
        "".join(element.itertext())
        for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    ]


def without_clip_ids(path: Path) -> str:
    """matplotlib hashes all digits of a clip rectangle, of which its layout solver may round the last."""
    return re.sub(r"\bp[0-9a-f]{10}\b", "", path.read_text())


def test_plot_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    small_run(one)
    small_run(two, schedule="1F1B")
    assert main(["plot", str(one)]) == 0
    names = ("loss", "timeline", "utilization")
    files = [one / "plots" / f"{name}.png" for name in names]
    assert capsys.readouterr().out.splitlines() == list(map(str, files))
    assert sorted((one / "plots").iterdir()) == files
    assert [kind_of_file(path) for path in files] == ["png"] * 3

    out = tmp_path / "new" / "figures"
    assert main(["plot", str(one), str(two), "--out", str(out), "--format", "svg"]) == 0
    assert sorted(path.name for path in out.iterdir()) == [f"{name}.svg" for name in names]
    loss = texts_of(out / "loss.svg")
    assert {"one (Async2BW)", "two (1F1B)", "loss above one (Async2BW)"} <= set(loss)
    assert {"one (Async2BW): steps 2 to 4", "two (1F1B): steps 2 to 4"} <= set(texts_of(out / "timeline.svg"))

    both = tmp_path / "both.svg"
    argv = ["plot", str(one), str(two), "--labels", "A,B", "--steps", "3", "--out", str(both)]
    assert main(argv) == 0
    assert {"A", "B", "A: step 3", "B: step 3", "mean", "loss above A"} <= set(texts_of(both))
    before = without_clip_ids(both)
    assert main(argv) == 0
    assert without_clip_ids(both) == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_run_without_spans_has_a_loss_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = small_run(tmp_path / "one")
    for rank in range(2):
        ring_path(folder, rank).unlink()
        summary_path(folder, rank).unlink()
    assert main(["plot", str(tmp_path / "one")]) == 0
    assert [path.name for path in (tmp_path / "one" / "plots").iterdir()] == ["loss.png"]
    assert capsys.readouterr().err.splitlines() == [
        "no timeline of one: it is not recorded",
        "no utilization of one: it is not recorded",
    ]
    journal_path(folder).write_text("")
    assert main(["plot", str(tmp_path / "one"), "--out", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"no records yet in {tmp_path / 'one'}: wait for the first steps"
    )
    assert not (tmp_path / "none").exists()


def test_loss_that_is_never_finite(tmp_path: Path) -> None:
    small_run(tmp_path, losses=False)
    small_run(tmp_path / "two", losses=False)
    assert main(["plot", str(tmp_path), str(tmp_path / "two"), "--out", str(tmp_path / "x.png")]) == 0
    assert kind_of_file(tmp_path / "x.png") == "png"
