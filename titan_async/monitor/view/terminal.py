"""The terminal of a live view, which is left as it was found: single keys, and signals."""

import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupts", "reading_keys"]

_SPECIAL = 6
"""Where a terminal's modes have its special characters."""

_SEQUENCE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|O.)?")
"""What keys such as the arrows send."""


@contextmanager
def reading_keys() -> Iterator[Callable[[float], str]]:
    """Gives a function that reads keys as they are pressed; without a terminal there are none.

    It returns what is pressed, at the latest after so many seconds: nothing, a key, or several at once.
    Ctrl-C stays a signal, and Ctrl-Z does nothing.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        yield _no_key
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    is_there = True

    def read(seconds: float) -> str:
        nonlocal is_there
        if not is_there:
            return _no_key(seconds)
        if not select.select([file], [], [], seconds)[0]:
            return ""
        pressed = os.read(file, 64).decode(errors="ignore")
        is_there = bool(pressed)
        return _SEQUENCE.sub("", pressed)

    try:
        tty.setcbreak(file)
        modes = termios.tcgetattr(file)
        # Ctrl-Z would leave the shell on this screen, and stop a training in the same terminal.
        modes[_SPECIAL][termios.VSUSP] = os.fpathconf(file, "PC_VDISABLE").to_bytes()
        termios.tcsetattr(file, termios.TCSADRAIN, modes)
        yield read
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


class Interrupts:
    """Counts Ctrl-C, and ends the process by an exception on SIGTERM and SIGHUP, while it is entered.

    Args:
        survives: Ctrl-C that are only counted; the next raises `KeyboardInterrupt`.
    """

    def __init__(self, survives: int) -> None:
        self.count = 0
        self._survives = survives

    def __enter__(self) -> "Interrupts":
        handlers = {signal.SIGINT: self._interrupt, signal.SIGTERM: _leave, signal.SIGHUP: _leave}
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > self._survives:
            raise KeyboardInterrupt


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
