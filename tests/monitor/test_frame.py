"""The live view's frame: it fits terminals of any size and shows the state of a run."""

import functools
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.events import write_run
from tests.support.watching import going_on, polled, with_copies, write_now
from titan_async.monitor.journal import History, Journal
from titan_async.monitor.snapshot import Snapshot
from titan_async.monitor.view.frame import ViewOptions, clean, render_frame
from titan_async.pipelining.recording import Kind

SIZES = [(80, 24), (100, 30), (200, 60), (40, 10), (120, 40), (80, 12), (20, 5), (10, 3), (5, 2), (1, 1)]


def look(folder: Path) -> tuple[Snapshot, History]:
    watch = polled(folder)
    return watch.snapshot(), watch.history


def draw(
    seen: tuple[Snapshot, History],
    width: int,
    height: int,
    shown: ViewOptions | None = None,
    environ: Mapping[str, str] | None = None,
    encoding: str = "utf-8",
) -> str:
    """The output to a terminal."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    environ = {"TERM": "xterm-256color"} if environ is None else environ
    console = Console(file=file, width=width, height=height, force_terminal=True, _environ=environ)
    console.print(render_frame(console, *seen, shown or ViewOptions(), width, height))
    file.flush()
    return file.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


def plain(written: str) -> list[str]:
    """The lines without escape sequences of colours."""
    text = re.sub(r"\x1b\[[\d;]*m", "", written)
    assert "\x1b" not in text
    assert text.endswith("\n")
    return text[:-1].split("\n")


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Snapshot, History]:
    return look(write_run(tmp_path_factory.mktemp("run"), stages=8, microbatches=8, steps=6))


@pytest.fixture(scope="module")
def seen_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Snapshot, History]]:
    """Snapshot and history of a run in a given state, written once."""

    @functools.cache
    def seen_in(state: str) -> tuple[Snapshot, History]:
        folder = tmp_path_factory.mktemp("run")
        if state == "stalled":
            folder = going_on(folder, stages=4)
            for rank in range(4):
                write_now(folder, rank, Kind.RECEIVE, 20)
        else:
            folder = write_run(folder, stages=32 if state == "many stages" else 3, microbatches=32, steps=4)
        if state == "nothing yet":
            for path in folder.glob("rank-*"):
                path.unlink()
            (folder / "journal.jsonl").unlink()
        return look(folder)

    return seen_in


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("state", ["finished", "help", "many stages", "nothing yet", "stalled"])
def test_frame_has_the_size_of_the_terminal(
    seen_in: Callable[[str], tuple[Snapshot, History]], width: int, height: int, state: str
) -> None:
    shown = ViewOptions(
        help=state == "help", paused=True, note="a note that is too long for narrow terminals"
    )
    lines = plain(draw(seen_in(state), width, height, shown))
    assert [len(line) for line in lines] == [width] * height
    if width > 40:
        assert "q quit" in lines[-1]


@pytest.mark.parametrize("height", range(1, 24))
def test_keys_are_on_the_last_line(eight: tuple[Snapshot, History], height: int) -> None:
    lines = plain(draw(eight, 80, height))
    assert len(lines) == height and "q quit" in lines[-1]
    assert height < 2 or "llama3 tiny" in lines[0]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 60)])
def test_contents_of_a_frame(tmp_path: Path, width: int, height: int) -> None:
    folder = write_run(tmp_path, stages=4, microbatches=8, steps=12)
    journal = Journal(folder)
    journal.write("validation", step=12, loss=3.25)
    journal.write("warning", text="the disk is nearly full")
    journal.write(
        "step", step=12, loss=3.75, tokens_per_second=864184.2, learning_rate=5e-4, skipped=3, mfu=0.295
    )
    journal.close()
    seen = look(folder)
    lines = plain(draw(seen, width, height))
    text = "\n".join(lines)
    for words in (
        "llama3 tiny", "Async2BW, 4 stages, 8 microbatches, cpu", "finished", "step 12 of 12", "100%",
        "864,184 tokens/s", "MFU 29.5%", f"bubble {seen[0].bubble:.1%} (simulated: ",
        f"{seen[0].simulated_bubble:.1%}, 1F1B {seen[0].simulated_bubble_of_1f1b:.1%})",
        "1 checkpoint, last 12", "3 updates skipped", "1 warning", "loss 3.7500, validation 3.2500 at 12",
        "learning rate 5.00e-04", "step 12/12  loss  3.7500", "warning: the disk is nearly full", "q quit",
    ):  # fmt: skip
        assert words in text, words
    assert "0 left" not in text
    for row in seen[0].rows:
        [line] = [line for line in lines if line.startswith(f" {row.stage} ")]
        assert row.utilization is not None and row.average_utilization is not None
        assert line.split()[:3] == [
            str(row.stage),
            f"{row.utilization:.0%}",
            f"{row.average_utilization:.0%}",
        ]
        assert f"{row.in_flight} of {row.most_in_flight}  " in line and "0.20 GiB" in line
        assert ("v10" in line) == (width > 80)
    assert any(0x2800 < ord(char) < 0x2900 for char in text)


def test_synchronous_start_is_shown(tmp_path: Path) -> None:
    for steps, words in ((20, "Async2BW (synchronous up to step 20), 4 stages"), (12, "Async2BW, 4 stages")):
        seen = look(write_run(tmp_path / str(steps), steps=12, synchronous_steps=steps))
        assert words in plain(draw(seen, 80, 24))[0]
        # Synchronous steps drain, as those of 1F1B do; afterwards the simulation is that of delayed ones.
        simulated, of_1f1b = seen[0].simulated_bubble, seen[0].simulated_bubble_of_1f1b
        assert simulated == pytest.approx(of_1f1b, abs=1e-3) if steps > 12 else simulated < of_1f1b / 2


def test_remaining_time_of_an_active_run(tmp_path: Path) -> None:
    folder = going_on(tmp_path)
    write_now(folder, 0, Kind.FORWARD, 0.1, microbatch=5)
    run, history = look(folder)
    lines = plain(draw((replace(run, remaining=3725, step=6), history), 100, 30))
    assert "step 6 of 12" in lines[1] and "50%" in lines[1] and "1:02:05 left" in lines[1]
    assert lines[0].rstrip().endswith(f"running  0:{run.elapsed:02}")
    assert "forward 5" in next(line for line in lines if line.startswith(" 0 "))


def test_small_terminal(eight: tuple[Snapshot, History]) -> None:
    lines = plain(draw(eight, 40, 10))
    assert "llama3 tiny" in lines[0] and "finished" in lines[0] and "step 6 of 6" in lines[1]
    assert "stage last mean" in lines[4] and "q quit" in lines[-1]
    assert lines[5].startswith(" 0 ") and "more stages" in lines[8]


def test_stages_that_do_not_fit_are_summarized(tmp_path: Path) -> None:
    seen = look(write_run(tmp_path, stages=32, microbatches=32, steps=4, slow_stage=30))
    lines = plain(draw(seen, 80, 24))
    shown = [int(line.split()[0]) for line in lines if re.match(r" \d+ +\d+%", line)]
    assert shown == list(range(len(shown))) and 6 <= len(shown) < 32
    [rest] = [line for line in lines if "more stages" in line]
    mean = sum(row.average_utilization for row in seen[0].rows[len(shown) :]) / (32 - len(shown))
    assert rest.rstrip() == f" {32 - len(shown)} more stages, {mean:.0%} busy; s sorts by slowest"
    lines = plain(draw(seen, 80, 24, ViewOptions(by_slowest=True)))
    assert next(line for line in lines if re.match(r" \d+ ", line)).startswith(" 30 ")
    # A screen of sufficient height shows all.
    assert sum(bool(re.match(r" \d+ ", line)) for line in plain(draw(seen, 80, 60))) == 32


def test_stalled_stage_is_red_and_explained(tmp_path: Path) -> None:
    folder = going_on(tmp_path, stages=3)
    write_now(folder, 0, Kind.FORWARD, 0.1)
    write_now(folder, 1, Kind.RECEIVE, 12)
    write_now(folder, 2, Kind.FORWARD, 0.1)
    written = draw(look(folder), 80, 24)
    lines = plain(written)
    text = " ".join(line.strip() for line in lines)
    assert "! stage 1 waits for the input of microbatch 3 of step 13 from stage 0, since" in text
    assert "(12 s)" in text and "stalled" in lines[0]
    [row] = [line for line in written.split("\n") if "!1 " in line]
    assert re.search(r"\x1b\[1;31m!1 ", row)
    # The stage that it waits for is also in its row.
    assert "waits for 0" in row
    [other] = [line for line in written.split("\n") if re.match(r"(\x1b\[[\d;]*m)* 0 ", line)]
    assert "31m" not in other
    # Sorting by slowest puts stalled stages first.
    sorted_lines = plain(draw(look(folder), 80, 24, ViewOptions(by_slowest=True)))
    assert next(line for line in sorted_lines if re.match(r"[! ]\d ", line)).startswith("!1 ")


def test_slowest_rank_of_replicated_stages(tmp_path: Path) -> None:
    folder = going_on(tmp_path, stages=2, microbatches=4)
    assert "slowest" not in plain(draw(look(folder), 100, 24))[4]
    with_copies(folder, slow=3)
    lines = plain(draw(look(folder), 100, 24))
    assert "2 stages, 2 replicas, 4 microbatches" in lines[0]
    assert "rank 3" in next(line for line in lines if line.startswith(" 1 "))
    assert "3.0/80G" in next(line for line in lines if line.startswith(" 1 "))


def test_no_color(eight: tuple[Snapshot, History]) -> None:
    colored = draw(eight, 100, 30)
    assert "38;5;" in colored and "▌" in colored
    written = draw(eight, 100, 30, environ={"TERM": "xterm-256color", "NO_COLOR": "1"})
    for codes in re.findall(r"\x1b\[([\d;]*)m", written):
        assert set(codes.split(";")) <= {"0", "", "1", "2"}  # bold and dim are not colours
    strips = "".join(line.split()[3] for line in plain(written) if re.match(r" \d ", line))
    assert {"F", "B"} <= set(strips) <= set("FBU.")
    assert "Forward Backward Update .wait" in "\n".join(plain(written))


def test_ascii_terminal(eight: tuple[Snapshot, History]) -> None:
    for shown in (ViewOptions(), ViewOptions(help=True, paused=True)):
        lines = plain(draw(eight, 80, 24, shown, encoding="ascii"))  # strict: it would raise
        assert [len(line) for line in lines] == [80] * 24
    text = "\n".join(plain(draw(eight, 80, 24, encoding="ascii")))
    assert "*" in text and re.search(r"[FB]{8}", text)


def test_help(eight: tuple[Snapshot, History]) -> None:
    text = "\n".join(plain(draw(eight, 80, 24, ViewOptions(help=True))))
    for word in (
        "quit",
        "pause",
        "last, mean",
        "strip",
        "in flight",
        "weights",
        "bubble",
        "red, !",
        "Ctrl-C",
    ):
        assert word in text
    # The last line, too.
    assert "Elsewhere" in text


def test_control_characters_of_the_log_are_removed(tmp_path: Path) -> None:
    folder = write_run(tmp_path, stages=2, microbatches=4)
    journal = Journal(folder)
    journal.write("log", text="\x1b[31mred\x1b[0m and\tsome\x1b[2J more \x07\x9b" + "x" * 200)
    journal.write("warning", text="a warning " * 15 + "is shown in full")
    journal.close()
    assert "a warning is shown in full" in " ".join(map(str.strip, plain(draw(look(folder), 80, 18))))
    lines = plain(draw(look(folder), 80, 30))
    assert any(re.match("red and +some more xxx", line) for line in lines)
    whole = " ".join(map(str.strip, lines))
    assert whole.count("a warning") == 15 and "a warning is shown in full" in whole
    assert clean("a\x1b[1;2Hb\rc\x08\x9bd") == clean(clean("a\x1b[1;2Hb\rc\x08\x9bd"))
    assert "\x1b" not in clean("a\x1b[1;2Hb\x1b7c\x1b(0") and "\x9b" not in clean("\x9b2J")


def test_changes_are_drawn(tmp_path: Path) -> None:
    """Cached timelines and curves are updated."""
    folder = going_on(tmp_path, stages=2, microbatches=4)
    watch = polled(folder)
    first = draw((watch.snapshot(), watch.history), 80, 24)
    journal = Journal(folder)
    journal.write("log", text="something new")
    journal.write("step", step=12, loss=1.0, learning_rate=1e-5)
    journal.close()
    watch.poll()
    second = draw((watch.snapshot(), watch.history), 80, 24)
    assert "something new" in second and "something new" not in first
    assert "learning rate 1.00e-05" in second
    third = draw((watch.snapshot(), watch.history), 80, 30)
    assert "something new" in third and third.count("⠉") != second.count("⠉")
