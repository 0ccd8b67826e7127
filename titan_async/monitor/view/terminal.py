"""Keys and signals of a live view. The terminal's settings are restored at exit."""

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
"""Index of the special characters in a terminal's attributes."""

_SEQUENCE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|O.)?")
"""Escape sequences of keys such as the arrows."""


@contextmanager
def reading_keys() -> Iterator[Callable[[float], str]]:
    """Yields a function that reads keys without waiting for a line; without a terminal there are none.

    The function waits for at most the given seconds and returns the keys pressed, possibly none. Ctrl-C
    remains a signal, and Ctrl-Z has no effect.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        yield _no_key
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    is_open = True

    def read(seconds: float) -> str:
        nonlocal is_open
        if not is_open:
            return _no_key(seconds)
        if not select.select([file], [], [], seconds)[0]:
            return ""
        pressed = os.read(file, 64).decode(errors="ignore")
        is_open = bool(pressed)
        return _SEQUENCE.sub("", pressed)

    try:
        tty.setcbreak(file)
        modes = termios.tcgetattr(file)
        # Ctrl-Z would leave the shell on this screen, and suspend a training in the same terminal.
        modes[_SPECIAL][termios.VSUSP] = os.fpathconf(file, "PC_VDISABLE").to_bytes()
        termios.tcsetattr(file, termios.TCSADRAIN, modes)
        yield read
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


class Interrupts:
    """A context in which Ctrl-C is counted, and SIGTERM and SIGHUP raise `SystemExit`.

    Args:
        ignored: number of Ctrl-C that are only counted; the next raises `KeyboardInterrupt`.
    """

    def __init__(self, ignored: int) -> None:
        self.count = 0
        self._ignored = ignored

    def __enter__(self) -> "Interrupts":
        handlers = {signal.SIGINT: self._interrupt, signal.SIGTERM: _raise_exit, signal.SIGHUP: _raise_exit}
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > self._ignored:
            raise KeyboardInterrupt


def _raise_exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
