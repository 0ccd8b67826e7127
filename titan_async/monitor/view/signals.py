"""What a view does about signals: it leaves the terminal as it found it, and may outlive a first Ctrl-C."""

import signal
from types import FrameType, TracebackType

__all__ = ["Interrupts"]


class Interrupts:
    """Counts Ctrl-C, and ends the process by an exception when it is told to end, while it is entered.

    Args:
        survives: Ctrl-C that are only counted; the next raises `KeyboardInterrupt`.
    """

    def __init__(self, survives: int) -> None:
        self.count = 0
        self._survives = survives

    def __enter__(self) -> "Interrupts":
        self._before = {
            signal.SIGINT: signal.signal(signal.SIGINT, self._interrupt),
            signal.SIGTERM: signal.signal(signal.SIGTERM, _leave),
            signal.SIGHUP: signal.signal(signal.SIGHUP, _leave),
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > self._survives:
            raise KeyboardInterrupt


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
