"""The live view in a pseudo-terminal: keys, sizes, signals and exit."""

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.events import write_run
from tests.support.selection import slow
from tests.support.waiting import MOST_SECONDS, times_waited, until
from tests.support.watching import going_on, write_now
from titan_async.cli.main import main
from titan_async.monitor.journal import Journal
from titan_async.monitor.view.watch import STOPPING
from titan_async.pipelining.recording import Kind

COMMAND = [sys.executable, "-m", "titan_async.cli", "watch"]
PATIENT = """
import sys
from titan_async.cli.main import main
from titan_async.monitor import processes
processes._RESTART_SECONDS = 600
sys.exit(main())
"""
"""The command with an unlimited wait for a restart after a failure."""

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


class Terminal:
    """A command in the foreground of its own pseudo-terminal."""

    def __init__(
        self, *arguments: str, width: int = 80, height: int = 24, command: list[str] = COMMAND, **environ: str
    ) -> None:
        self.written, self.decoder = "", codecs.getincrementaldecoder("utf-8")("replace")
        self.screen_end, terminal = pty.openpty()
        self.resize(width, height)
        self.modes = termios.tcgetattr(terminal)
        known = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}

        def take() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [*command, *arguments], stdin=terminal, stdout=terminal, stderr=terminal, preexec_fn=take,
            env=known | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"} | environ,
        )  # fmt: skip
        os.close(terminal)

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self.screen_end, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self.screen_end, keys.encode())

    def read(self, seconds: float) -> bool:
        """Reads output for at most the given time; returns False once the terminal is closed."""
        if select.select([self.screen_end], [], [], seconds)[0]:
            try:
                self.written += self.decoder.decode(os.read(self.screen_end, 1 << 16))
            except OSError:
                return False
        return True

    def screen(self) -> list[str]:
        """The last complete frame, without colours."""
        frames = self.written.split("\x1b[H")
        text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", frames[-1])
        return text.replace("\r", "").split("\n")

    def wait_for(self, what: str | Callable[[list[str]], bool]) -> list[str]:
        """Waits for a frame that contains a text or satisfies a condition."""
        deadline = time.monotonic() + MOST_SECONDS
        while True:
            lines = self.screen()
            if (what in "\n".join(lines)) if isinstance(what, str) else what(lines):
                return lines
            assert time.monotonic() < deadline, self.written[-4000:]
            assert self.read(0.05), self.written[-4000:]

    def status(self) -> int:
        """Waits until the process exits, and returns its status."""
        deadline = time.monotonic() + MOST_SECONDS
        while self.read(0.05):
            assert time.monotonic() < deadline, self.written[-4000:]
        return self.process.wait(MOST_SECONDS)

    def wait_for_polls(self, times: int) -> None:
        """Waits until the view has polled so many times; an unassigned key makes it poll immediately."""
        for _ in range(times):
            before = times_waited(self.process.pid)
            self.press("x")
            until(
                lambda before=before: self.read(0) and times_waited(self.process.pid) > before,
                "it does not poll",
            )

    def frames(self) -> int:
        """The number of frames drawn."""
        return self.written.count("\x1b[H")

    def assert_left_in_order(self) -> None:
        assert termios.tcgetattr(self.screen_end) == self.modes
        assert self.written.count(ENTER) == self.written.count(LEAVE) == 1
        assert self.written.rindex("\x1b[?25h") > self.written.rindex("\x1b[?25l")
        assert "Traceback" not in self.written


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The folder of a run that never ends."""
    folder = going_on(tmp_path, stages=3, slow_stage=1)
    for rank in range(3):
        write_now(folder, rank, Kind.FORWARD, 0.1)
    return tmp_path


@contextlib.contextmanager
def terminal(*arguments: str | Path, **options: object) -> Iterator[Terminal]:
    view = Terminal(*map(str, arguments), **options)  # type: ignore[arg-type]
    try:
        yield view
    finally:
        view.process.kill()
        view.process.wait()
        os.close(view.screen_end)


def test_q_quits_and_restores_the_terminal(run_dir: Path) -> None:
    with terminal(run_dir) as view:
        lines = view.wait_for("q quit")
        assert len(lines) == 24 and all(len(line) == 80 for line in lines)
        local = termios.tcgetattr(view.screen_end)[3]
        assert not local & termios.ICANON and not local & termios.ECHO and local & termios.ISIG
        view.press("\x1b[Ax\x1a")  # an arrow, an unassigned letter, Ctrl-Z
        view.press("q")
        assert view.status() == 0
        view.assert_left_in_order()


def test_keys(run_dir: Path) -> None:
    def first_stage(lines: list[str]) -> str:
        return next(line for line in lines if re.match(r"[! ]\d ", line))[1]

    with terminal(run_dir) as view:
        assert first_stage(view.wait_for("q quit")) == "0"
        view.press("s")
        view.wait_for(lambda lines: len(lines) == 24 and first_stage(lines) == "1")
        view.press("?")
        view.wait_for("fraction of the last step")
        view.press("?")
        view.wait_for(lambda lines: "learning rate" in "\n".join(lines) and len(lines) == 24)
        view.press("p")
        view.wait_for("paused")
        journal = Journal(next((run_dir / "events").iterdir()))
        journal.write("log", text="logged while paused")
        view.resize(100, 30)
        lines = view.wait_for(lambda lines: len(lines) == 30 and len(lines[-1]) == 100)
        assert "logged while paused" not in "\n".join(lines) and "paused" in lines[-1]
        view.press("p")
        assert "paused" not in view.wait_for("logged while paused")[-1]
        journal.close()
        view.press("q")
        assert view.status() == 0


def test_view_follows_the_size_of_the_terminal(run_dir: Path) -> None:
    with terminal(run_dir) as view:
        view.wait_for("q quit")
        for width, height in ((120, 40), (40, 10), (10, 3), (200, 60)):
            view.resize(width, height)
            view.wait_for(lambda lines, w=width, h=height: len(lines) == h and {len(x) for x in lines} == {w})


def test_unchanged_frames_are_not_drawn(tmp_path: Path) -> None:
    with terminal(write_run(tmp_path).parents[1]) as view:
        lines = view.wait_for(lambda lines: "finished" in lines[0] and "q quit" in lines[-1])
        assert len(lines) == 24
        drawn = view.frames()
        view.wait_for_polls(8)
        view.press("?")
        view.wait_for("fraction of the last step")
        assert view.frames() == drawn + 1


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), slow(signal.SIGHUP, 129), (signal.SIGINT, 0)]
)
def test_signal_restores_the_terminal(run_dir: Path, number: int, status: int) -> None:
    with terminal(run_dir) as view:
        view.wait_for("q quit")
        view.process.send_signal(number)
        assert view.status() == status
        view.assert_left_in_order()


def test_error_restores_the_terminal(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    # A run of a later version of this project, which appears atomically.
    elsewhere = tmp_path_factory.mktemp("later")
    folder = write_run(elsewhere, "29990101-000000-bbbb", closed=False)
    (folder / "run.json").write_text('{"format": 99}')
    with terminal(run_dir, "--following", str(os.getpid())) as view:
        view.wait_for("waiting for the training processes to start")
        folder.rename(run_dir / folder.relative_to(elsewhere))
        assert view.status() == 2
        view.assert_left_in_order()
        assert "its format is 99, but this version reads 1" in view.written.split(LEAVE)[1]


def test_first_ctrl_c_with_a_launcher_is_only_counted(tmp_path: Path) -> None:
    with terminal(tmp_path / "not yet", "--following", str(os.getpid())) as view:
        view.wait_for("waiting for the training processes to start")
        folder = going_on(tmp_path / "not yet", stages=2)
        for rank in range(2):
            write_now(folder, rank, Kind.FORWARD, 0.1)
        view.wait_for("running")
        view.press("\x03")
        view.wait_for(STOPPING)
        view.press("\x03")
        assert view.status() == 130
        view.assert_left_in_order()


def test_view_ends_with_the_run(tmp_path: Path) -> None:
    write_run(tmp_path, "20250101-000000-aaaa")  # a finished run
    with terminal(tmp_path, "--following", str(os.getpid())) as view:
        view.wait_for("waiting for the training processes to start")
        folder = going_on(tmp_path, "20270101-000000-aaaa", stages=2)
        write_now(folder, 0, Kind.FORWARD, 0.1)
        view.wait_for("q quit")
        assert "no heartbeat" not in view.screen()[0]
        journal = Journal(folder)
        journal.write("end", reason="stopped")
        journal.close()
        assert view.status() == 0
        view.assert_left_in_order()
        assert "stopped" in view.written


def test_view_ends_with_the_launcher(tmp_path: Path) -> None:
    with (
        subprocess.Popen(["sleep", "60"]) as launcher,
        terminal(tmp_path, "--following", launcher.pid) as view,
    ):
        view.wait_for("waiting for the training processes to start")
        launcher.kill()  # and is a zombie until the end of the block
        assert view.status() == 0
        view.assert_left_in_order()


def test_restarted_run_is_followed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PATIENT, "watch"]
    with terminal(tmp_path, "--following", str(os.getpid()), command=command) as view:
        view.wait_for("waiting for the training processes to start")
        journal = Journal(going_on(tmp_path, "20270101-000000-aaaa", stages=2))
        journal.write("end", reason="failed")
        journal.close()
        view.wait_for("failed")
        view.wait_for_polls(3)
        going_on(tmp_path, "20270101-000001-aaaa", stages=3)
        view.wait_for("3 stages")
        assert view.process.poll() is None


def plain(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=MOST_SECONDS, check=False,
        env=os.environ | environ,
    )  # fmt: skip


def test_plain_lines_without_a_terminal(tmp_path: Path) -> None:
    folder = write_run(tmp_path, steps=4)
    with open(folder / "journal.jsonl", "a") as file:
        file.write('{"time": 1, "kind": "log", "text": "\\u001b[31mafter the end"}\n')
    result = plain(tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "training llama3 tiny on 4 stages under Async2BW",
        "step 2/4  loss  5.4545",
        "step 4/4  loss  5.0000",
        "after the end",
    ]


def test_lines_of_an_active_run(tmp_path: Path) -> None:
    folder = going_on(tmp_path, steps=4)
    with subprocess.Popen([*COMMAND, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "training llama3 tiny on 4 stages under Async2BW\n"
        journal = Journal(folder)
        journal.write("warning", text="the disk is nearly full")
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines[-1] == "warning: the disk is nearly full\n" and process.poll() is None
        journal.write("end", reason="finished")
        journal.close()
        assert process.wait(MOST_SECONDS) == 0


def handles(pid: int, number: int) -> bool:
    """Whether a process has installed a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) >> (number - 1) & 1)


def test_lines_of_a_run_that_has_not_started(tmp_path: Path) -> None:
    write_run(tmp_path, "20250101-000000-aaaa", stages=2)  # a finished run
    command = [*COMMAND, str(tmp_path), "--following", str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        until(lambda: handles(process.pid, signal.SIGHUP), "it does not handle signals")  # SIGINT before that
        polls = times_waited(process.pid)
        until(lambda: times_waited(process.pid) > polls + 1, "it does not poll")
        assert process.poll() is None
        process.send_signal(signal.SIGINT)  # the training receives it as well
        write_run(tmp_path, "20270101-000000-aaaa", steps=2)
        assert process.stdout is not None
        assert process.stdout.read().splitlines() == [
            "training llama3 tiny on 4 stages under Async2BW",
            "step 2/2  loss  5.4545",
        ]
        assert process.wait(MOST_SECONDS) == 0


def test_plain_lines_on_a_dumb_terminal(run_dir: Path) -> None:
    with terminal(run_dir, TERM="dumb") as view:
        view.wait_for("training llama3 tiny on 3 stages")
        view.press("\x03")
        assert view.status() == 0
        assert "\x1b" not in view.written


def test_once_prints_a_frame(tmp_path: Path) -> None:
    write_run(tmp_path, "20260101-000000-aaaa", stages=2)
    write_run(tmp_path, "20260102-000000-aaaa", stages=3)
    result = plain(tmp_path, "--once", "--width", "90", "--height", "20")
    lines = result.stdout.split("\n")[:-1]
    assert [len(line) for line in lines] == [90] * 20 and "3 stages" in lines[0]
    result = plain(tmp_path, "--once", "--run", "20260101-000000-aaaa", PYTHONIOENCODING="ascii")
    lines = result.stdout.split("\n")[:-1]
    assert [len(line) for line in lines] == [100] * 30 and "2 stages" in lines[0]
    assert all(line.isascii() for line in lines)


def test_svg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, stages=3)
    monkeypatch.setenv("NO_COLOR", "1")
    picture = str(tmp_path / "picture.svg")
    assert main(["watch", str(tmp_path), "--svg", picture, "--width", "80", "--height", "24"]) == 0
    assert capsys.readouterr() == ("", "")
    svg = (tmp_path / "picture.svg").read_text()
    assert "https://" not in re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)  # it needs no network
    assert svg.startswith("<svg") and "titan-async&#160;watch" in svg and "Async2BW" in svg
    assert not list(tmp_path.glob("*.partial")) and not list(tmp_path.glob(".*"))


def test_live_view_does_not_import_torch() -> None:
    """It starts quickly and needs 30 MB instead of 300."""
    program = (
        "import sys, titan_async.cli.watch, titan_async.monitor.view.watch;sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
