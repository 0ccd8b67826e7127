"""Single keys from a terminal, which is left as it was found."""

import os
import re
import select
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Any

__all__ = ["Keys"]

_SPECIAL = 6
"""Where a terminal's modes have its special characters."""

_SEQUENCE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|O.)?")
"""What keys such as the arrows send."""


class Keys:
    """Reads keys as they are pressed, while it is entered; without a terminal there are none.

    Ctrl-C stays a signal, and Ctrl-Z does nothing.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        self._modes: list[Any] = []

    def __enter__(self) -> "Keys":
        if sys.stdin is not None and sys.stdin.isatty():
            self._file = sys.stdin.fileno()
            self._modes = termios.tcgetattr(self._file)
            tty.setcbreak(self._file)
            modes = termios.tcgetattr(self._file)
            # Ctrl-Z would leave the shell on this screen, and stop a training in the same terminal.
            modes[_SPECIAL][termios.VSUSP] = os.fpathconf(self._file, "PC_VDISABLE").to_bytes()
            termios.tcsetattr(self._file, termios.TCSADRAIN, modes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._modes:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._modes)

    def read(self, seconds: float) -> str:
        """What is pressed, at the latest after so many seconds: nothing, a key, or several at once."""
        if self._file is None:
            time.sleep(seconds)
            return ""
        if not select.select([self._file], [], [], seconds)[0]:
            return ""
        pressed = os.read(self._file, 64).decode(errors="ignore")
        if not pressed:  # the terminal is gone
            self._file = None
        return _SEQUENCE.sub("", pressed)
