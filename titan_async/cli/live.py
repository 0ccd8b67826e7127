"""`titan-async train --live`: a full-screen view of the run that the launcher starts.

The view is `titan-async watch` in a separate process, which reads the files of the run and controls the
terminal. The output of the run is written to a file; its last lines are printed when the view is closed.
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
"""Time-out for the view to exit by itself after the run."""

LAST_LINES = 20
"""Number of last lines to print if none matches `_ENDINGS`."""

_ENDINGS = (
    rb"^(trained|nothing to do:|the data ended|Ctrl-C:|SIGTERM:) ",
    rb"^Traceback \(most recent call last\)",
)
"""Patterns of the first of a run's last lines, in order of precedence."""

_LEAVE_SCREEN = b"\x1b[?1049l\x1b[?25h"  # leave the alternate screen, show the cursor


def check_recorded(config: Any) -> None:
    """Checks that a run records events, which the view reads.

    Raises:
        UserError: it does not.
    """
    if not config.monitor.events:
        raise UserError(
            "--live shows the events of a run, but this run records none: set monitor.events to true, or "
            "omit --live"
        )


def has_terminal() -> bool:
    """Returns whether stdout is a terminal with this process in the foreground."""
    try:
        return os.isatty(1) and os.tcgetpgrp(1) == os.getpgrp()
    except OSError:  # the terminal of another session
        return False


def view_command(folder: Path) -> list[str]:
    """Returns the command of a view of the run in `folder`, which exits with the run or with this process."""
    return [sys.executable, "-m", "titan_async.cli", "watch", str(folder), "--following", str(os.getpid())]


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Shows a view of the run in `folder` on the terminal.

    The output of this process and its children goes to `folder`/output.log. If the view is closed before the
    run ends, further output is printed. At the end the modes of the terminal are restored, and the last lines
    of the run are printed: its summary, or the traceback of an error.

    Raises:
        UserError: the file cannot be written.
    """
    path = folder / "output.log"
    begin = _start_log(path)
    with _redirected_to(path) as terminal:
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
            handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal must be restored
            sys.stdout.flush()
            sys.stderr.flush()
            ended.set()
            _end(view)
            after_view.join()
            signal.signal(signal.SIGINT, handler)


def _start_log(path: Path) -> int:
    """Appends a line with the time, and returns the offset of the output that follows."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as log:
            log.write(f"--- {datetime.now():%Y-%m-%d %H:%M:%S}\n".encode())
            return log.tell()
    except OSError as error:
        raise UserError(
            f"--live cannot write {path} ({error.strerror}): choose another dump_folder, or omit --live"
        ) from error


@contextlib.contextmanager
def _redirected_to(path: Path) -> Iterator[int]:
    """Redirects stdout and stderr of this process and its children to `path`; yields the former stdout."""
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
    """Waits until the view exits, restores the terminal, then prints the output of the run until it ends."""
    if view.wait() < 0:
        _write(terminal, _LEAVE_SCREEN)
    with contextlib.suppress(termios.error):  # it may be closed
        termios.tcsetattr(terminal, termios.TCSADRAIN, modes)
    with path.open("rb") as log:
        over = ended.is_set()
        log.seek(begin)
        output = log.read()
        log.seek(begin + _offset_to_print(output, over))
        while True:
            _write(terminal, log.read())
            if over:
                return
            time.sleep(0.1)
            over = ended.is_set()


def _offset_to_print(output: bytes, over: bool) -> int:
    """Returns the offset of a run's last lines; that of the end if there are none and it is not `over`."""
    for ending in _ENDINGS:
        if match := re.search(ending, output, re.MULTILINE):
            return match.start()
    lines = output.splitlines(keepends=True)
    return len(output) - (sum(map(len, lines[-LAST_LINES:])) if over else 0)


def _write(terminal: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # it may be closed
        while data:
            data = data[os.write(terminal, data) :]
