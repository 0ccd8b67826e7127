"""`--live`: the terminal, the log file, and the state of both afterwards.

The processes are small scripts in a separate terminal: two workers, and a fake view that uses the alternate
screen and single keys like the real one. The launcher is a fork of a process that has imported torch.
"""

from __future__ import annotations

import os
import pty
import re
import select
import sys
import termios
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import forks
from tests.support.launchers import wait_for_looks
from tests.support.training import RECIPE, environment
from tests.support.waiting import MOST_SECONDS, until
from titan_async.cli import launch, live
from titan_async.config.flags import parse_arguments
from titan_async.errors import UserError

WORKER = """
    import os, signal, sys, time
    from titan_async.training.process import failures
    failures.end_with_launcher()
    folder, rank = sys.argv[1], int(os.environ["RANK"])
    requests = []
    signal.signal(signal.SIGINT, lambda *_: requests.append(rank))
    open(f"{os.environ[failures.ERROR_DIR]}/stops-cleanly-{rank}", "w").close()
    sys.stderr.write("worker is ready\\n")  # one write: `print` may be interleaved with the other worker
    sys.stderr.flush()
    while not os.path.exists(f"{folder}/finish"):
        time.sleep(0.01)
    if rank:
        sys.exit(0)
    if os.path.exists(f"{folder}/fail"):
        failures.report_failure("error", "RuntimeError: boom")
        raise RuntimeError("boom")
    print("step 9/9", flush=True)
    print("Ctrl-C: saved step 9" if requests else "trained 9 steps", flush=True)
    print("files of the run: here", flush=True)
"""

VIEW = """
    import os, select, signal, sys, termios, time, tty
    folder, launcher = sys.argv[1], int(sys.argv[2])
    def alive():
        return os.getppid() == launcher
    stays = os.path.exists(f"{folder}/stubborn")
    modes = termios.tcgetattr(0)
    signal.signal(signal.SIGINT, lambda *_: print("view: stopping", flush=True))
    if stays:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tty.setcbreak(0)
    print("\\x1b[?1049h\\x1b[?25lview: up", flush=True)
    while alive() and (stays or not os.path.exists(f"{folder}/view-ends")):
        if select.select([0], [], [], 0.05)[0] and os.read(0, 1) == b"q":
            break
    print("\\x1b[?1049l\\x1b[?25hview: gone", flush=True)
    termios.tcsetattr(0, termios.TCSADRAIN, modes)
"""

LAUNCHER = """
    import os, sys
    from pathlib import Path
    from tests.support.launchers import begin_launcher
    from titan_async.cli import launch, live, main
    folder = Path(sys.argv[1])
    if os.isatty(1):
        os.dup2(1, 0)
    begin_launcher(folder)
    live.view_command = lambda _: [sys.executable, f"{folder}/view.py", str(folder), str(os.getpid())]
    live.VIEW_SECONDS = 0.1 if (folder / "stubborn").exists() else 60
    command = [sys.executable, str(folder / "worker.py"), str(folder)]
    main._run = lambda argv: launch.launch(2, command, watch=folder)
    sys.exit(main.main([]))
"""


def write_scripts(folder: Path) -> None:
    for name, text in (("worker", WORKER), ("view", VIEW), ("launcher", LAUNCHER)):
        (folder / f"{name}.py").write_text(textwrap.dedent(text))


class Terminal:
    """A launcher in a separate terminal."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.shown = folder, ""
        write_scripts(folder)
        self.terminal, end = pty.openpty()
        self.modes = termios.tcgetattr(self.terminal)
        command = [sys.executable, folder / "launcher.py", folder]
        self.launcher = forks.Forked(command, cwd=folder, env=environment(), terminal=end)

    def press(self, key: str) -> None:
        os.write(self.terminal, key.encode())

    def read(self) -> bool:
        """Reads the output so far; returns False once the terminal is closed."""
        if select.select([self.terminal], [], [], 0.05)[0]:
            try:
                self.shown += os.read(self.terminal, 4096).decode().replace("\r\n", "\n")
            except OSError:  # on Linux, once it is closed
                return False
        return True

    def wait_for(self, text: str) -> None:
        """Waits until the terminal has shown `text`."""
        until(lambda: text in self.shown or not self.read(), f"{text!r} is not shown")
        assert text in self.shown

    def wait_for_log(self, text: str) -> None:
        until(lambda: text in self.log(), f"{text!r} is not in the log")

    def wait_for_ready_workers(self) -> None:
        until(lambda: self.log().count("worker is ready") == 2, "two workers are not ready")
        wait_for_looks(self.folder)

    def log(self) -> str:
        path = self.folder / "output.log"
        return path.read_text() if path.exists() else ""

    def write_log(self, text: str) -> None:
        with (self.folder / "output.log").open("a") as log:
            log.write(text)

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def status(self) -> int:
        """Waits until the launcher exits and its output is read; returns its exit status."""
        until(lambda: not self.read(), "the launcher does not end")
        return self.launcher.wait(MOST_SECONDS)


Start = Callable[[], Terminal]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started = []

    def start() -> Terminal:
        started.append(Terminal(tmp_path))
        return started[-1]

    yield start
    for run in started:
        run.launcher.kill()
        os.close(run.terminal)


ENDING = "trained 9 steps\nfiles of the run: here\n"


def test_the_view_is_on_the_terminal_and_the_output_in_the_file(start: Start, tmp_path: Path) -> None:
    (tmp_path / "output.log").write_text("of an earlier run\ntrained 1 steps\n")
    run = start()
    run.wait_for("view: up")
    run.wait_for_ready_workers()
    run.touch("finish")
    run.wait_for_log("files of the run")
    run.touch("view-ends")
    assert run.status() == 0
    before, after = run.shown.split("view: gone\n")
    assert before == "\x1b[?1049h\x1b[?25lview: up\n\x1b[?1049l\x1b[?25h"
    assert after == ENDING
    lines = run.log().splitlines()
    assert lines[:2] == ["of an earlier run", "trained 1 steps"]
    assert re.fullmatch(r"--- \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", lines[2])
    assert lines[3:] == ["worker is ready"] * 2 + ["step 9/9", *ENDING.splitlines()]


def test_a_view_that_does_not_exit_is_killed_and_the_terminal_restored(start: Start, tmp_path: Path) -> None:
    (tmp_path / "stubborn").touch()
    run = start()
    run.wait_for("view: up")
    assert termios.tcgetattr(run.terminal) != run.modes
    run.wait_for_ready_workers()
    run.touch("finish")
    run.wait_for(ENDING)
    assert termios.tcgetattr(run.terminal) == run.modes
    assert run.status() == 0
    assert run.shown.endswith(f"view: up\n\x1b[?1049l\x1b[?25h{ENDING}")


def test_after_q_the_run_continues_as_without_a_view(start: Start, tmp_path: Path) -> None:
    run = start()
    run.wait_for("view: up")
    run.wait_for_ready_workers()
    run.press("q")
    run.wait_for("view: gone")

    def shows_lines() -> bool:
        run.write_log("later\n")
        return run.read() and "later" in run.shown

    until(shows_lines, "lines are not shown after the view")
    assert termios.tcgetattr(run.terminal) == run.modes
    run.touch("finish")
    assert run.status() == 0
    assert re.search(rf"view: gone\n(later\n)+step 9/9\n{ENDING}$", run.shown)
    assert run.shown.count("trained 9 steps") == 1 and "worker is ready" not in run.shown


def test_ctrl_c_closes_the_view_and_the_run_saves(start: Start, tmp_path: Path) -> None:
    run = start()
    run.wait_for("view: up")
    run.wait_for_ready_workers()
    run.press("\x03")
    run.wait_for("view: stopping")
    run.wait_for_log("stopping after this step and saving; press Ctrl-C again to stop at once\n")
    run.touch("finish")
    run.wait_for_log("Ctrl-C: saved")
    run.touch("view-ends")
    assert run.status() == 130
    assert run.shown.endswith("view: gone\nCtrl-C: saved step 9\nfiles of the run: here\n")


def test_an_error_is_shown_with_its_traceback_and_the_launchers_sentence(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "fail").touch()
    run = start()
    run.wait_for("view: up")
    run.wait_for_ready_workers()
    run.touch("finish")
    run.touch("view-ends")
    assert run.status() == 1
    shown = run.shown.split("view: gone\n")[1]
    assert shown.startswith("Traceback (most recent call last):\n")
    assert "\nRuntimeError: boom\n" in shown
    assert shown.endswith("rank 0 failed (exit status 1): RuntimeError: boom\n")


def test_output_that_cannot_be_written_is_one_sentence_and_nothing_starts(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "output.log").mkdir()
    run = start()
    assert run.status() == 2
    assert run.shown == (
        f"--live cannot write {tmp_path}/output.log (Is a directory): choose another dump_folder, or omit "
        "--live\n"
    )


def test_without_a_terminal_lines_are_plain(tmp_path: Path) -> None:
    write_scripts(tmp_path)
    (tmp_path / "finish").touch()
    command = [sys.executable, tmp_path / "launcher.py", tmp_path]
    run = forks.run(command, cwd=tmp_path, env=environment(), timeout=MOST_SECONDS)
    assert (run.returncode, run.stderr) == (0, "worker is ready\n" * 2)
    assert run.stdout == f"step 9/9\n{ENDING}"
    assert not (tmp_path / "output.log").exists()


@pytest.mark.parametrize("flag", ["--live", "--live=yes"])
def test_the_flag_is_refused_without_a_launcher(flag: str) -> None:
    with pytest.raises(
        UserError, match=r"^--live takes no value, .* otherwise use titan-async watch RUN_DIR"
    ):
        parse_arguments(["x.toml", flag])


def test_the_flag_names_the_folder_to_watch_and_does_not_reach_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    monkeypatch.setattr(launch, "launch", lambda *args, watch, **kwargs: calls.append((*args, watch)) or 0)
    argv = [str(RECIPE), "--dump_folder", "outputs/x"]
    assert launch.train([*argv, "--live"]) == 0
    assert launch.train(argv) == 0
    command = [sys.executable, "-m", "titan_async.training.worker", *argv]
    assert calls == [(2, command, Path("outputs/x")), (2, command, None)]


def test_a_run_without_events_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="set monitor.events to true, or omit --live"):
        launch.train([str(RECIPE), "--monitor.no-events", "--live"])


def test_the_view_is_the_verb_watch() -> None:
    expected = ["-m", "titan_async.cli", "watch", "outputs/x", "--following", str(os.getpid())]
    assert live.view_command(Path("outputs/x")) == [sys.executable, *expected]
