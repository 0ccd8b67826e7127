"""The launcher's side of `titan-async train --live`: a full-screen view of the run it starts.

The view is `titan-async watch` in a process of its own, which reads the files of the run and owns the
terminal. What the run says meanwhile goes to a file, and its end to the terminal too, once the view is gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from titan_async.errors import UserError

__all__ = ["check_recorded", "has_terminal", "view_command", "watched"]

VIEW_SECONDS = 2.0
"""How long the view may take to end by itself once the run has."""

LAST_LINES = 20
"""How much is shown of a run that has not said how it ended."""

_ENDINGS = (
    rb"^(trained|nothing to do:|the data ended|Ctrl-C:|SIGTERM:) ",
    rb"^Traceback \(most recent call last\)",
)
"""How the last lines of a run begin; the first of these that is found counts."""

_LEAVE_SCREEN = b"\x1b[?1049l\x1b[?25h"  # back from the alternate screen, with a cursor


def check_recorded(config: Any) -> None:
    """Refuses a run of which a view would have nothing to show.

    Raises:
        UserError: it does not record what its ranks do.
    """
    if not config.monitor.events:
        raise UserError(
            "--live shows what a run records, and this one records nothing: set monitor.events to true, or "
            "leave out --live"
        )


def has_terminal() -> bool:
    """Whether stdout is a terminal, and this process in its foreground."""
    try:
        return os.isatty(1) and os.tcgetpgrp(1) == os.getpgrp()
    except OSError:  # the terminal of another session
        return False


def view_command(folder: Path) -> list[str]:
    """The command of a view of the run in `folder`, which ends with that run or with this process."""
    return [sys.executable, "-m", "titan_async.cli", "watch", str(folder), "--following", str(os.getpid())]


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Gives the terminal to a view of the run in `folder`.

    What this process and its children write goes to `folder`/output.log instead. If the view ends before
    the run does, what is appended from then on is printed. At the end the terminal is as it was before, and
    shows the last lines of the run: its summary, or the traceback of an error.

    Raises:
        UserError: the file cannot be written.
    """
    path = folder / "output.log"
    begin = _begin_log(path)
    with _writing_to(path) as terminal:
        modes = termios.tcgetattr(terminal)
        view = subprocess.Popen(view_command(folder), stdout=terminal, stderr=terminal)
        ended = threading.Event()
        after_view = threading.Thread(
            target=_follow, args=(view, path, begin, terminal, modes, ended), daemon=True
        )
        after_view.start()
        try:
            yield
        finally:
            handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal must come back in order
            sys.stdout.flush()
            sys.stderr.flush()
            ended.set()
            _end(view)
            after_view.join()
            signal.signal(signal.SIGINT, handler)


def _begin_log(path: Path) -> int:
    """Writes the line that begins a run, and returns where the run's own lines will begin."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as log:
            log.write(f"--- {datetime.now():%Y-%m-%d %H:%M:%S}\n".encode())
            return log.tell()
    except OSError as error:
        raise UserError(
            f"--live cannot write {path} ({error.strerror}): choose another dump_folder, or leave out --live"
        ) from error


@contextlib.contextmanager
def _writing_to(path: Path) -> Iterator[int]:
    """Sends stdout and stderr of this process and its children to `path`; yields where stdout went before."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    log = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        for number in (1, 2):
            os.dup2(log, number)
        yield saved[0]
    finally:
        for number, before in enumerate(saved, start=1):
            os.dup2(before, number)
        for descriptor in (*saved, log):
            os.close(descriptor)


def _end(view: subprocess.Popen[bytes]) -> None:
    for stop in (view.terminate, view.kill):
        try:
            view.wait(VIEW_SECONDS)
        except subprocess.TimeoutExpired:
            stop()


def _follow(
    view: subprocess.Popen[bytes], path: Path, begin: int, terminal: int, modes: list, ended: threading.Event
) -> None:
    """Waits for the view's end, restores the terminal, and then prints what the run says, to its end."""
    if view.wait() < 0:
        _write(terminal, _LEAVE_SCREEN)
    with contextlib.suppress(termios.error):  # it may be gone
        termios.tcsetattr(terminal, termios.TCSADRAIN, modes)
    with path.open("rb") as log:
        over = ended.is_set()
        log.seek(begin)
        said = log.read()
        log.seek(begin + _where_to_show(said, over))
        while True:
            _write(terminal, log.read())
            if over:
                return
            time.sleep(0.1)
            over = ended.is_set()


def _where_to_show(said: bytes, over: bool) -> int:
    """From where in what a run has `said` to show it once the view is gone; the end, unless it is `over`."""
    for ending in _ENDINGS:
        if match := re.search(ending, said, re.MULTILINE):
            return match.start()
    lines = said.splitlines(keepends=True)
    return len(said) - (sum(map(len, lines[-LAST_LINES:])) if over else 0)


def _write(terminal: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # it may be gone
        while data:
            data = data[os.write(terminal, data) :]
