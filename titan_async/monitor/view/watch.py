"""The live view: a full screen that is drawn anew four times a second where something has changed."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from titan_async.monitor.processes import Launched
from titan_async.monitor.snapshot import RunWatch, Snapshot
from titan_async.monitor.view.frame import Frame, Shown
from titan_async.monitor.view.keys import Keys
from titan_async.monitor.view.signals import Interrupts

__all__ = ["STOPPING", "picture", "watch"]

_PERIOD = 0.25

STOPPING = "stopping after this step and saving; Ctrl-C again stops at once"


class _View:
    """What is on the screen, and which keys have been pressed."""

    def __init__(self, console: Console, live: Live) -> None:
        self._console, self._live = console, live
        self._frame = Frame(console)
        self._drawn: object = None
        self._began = time.monotonic()
        self._snapshot: Snapshot | None = None
        self.run: RunWatch | None = None
        self.shown = Shown()

    def press(self, keys: str) -> bool:
        """Do what keys ask for; whether to leave."""
        for key in keys:
            shown = self.shown
            if key in "qQ":
                return True
            if key == "p":
                self.shown = replace(shown, paused=not shown.paused)
            elif key == "s":
                self.shown = replace(shown, by_slowest=not shown.by_slowest)
            elif key in "?h":
                self.shown = replace(shown, help=not shown.help)
        return False

    def refresh(self) -> None:
        """Read and draw what is new; while paused, only what keys and the terminal's size change."""
        if self.run is not None and (not self.shown.paused or self._snapshot is None):
            self.run.poll()
            self._snapshot = self.run.snapshot()
        size = self._console.size
        if self.run is None or self._snapshot is None:
            waited = int(time.monotonic() - self._began)
            self._draw((waited, size, self.shown), lambda: self._waiting(waited))
            return
        run, history, shown = self._snapshot, self.run.history, self.shown
        self._draw((run, size, shown), lambda: self._frame.render(run, history, shown, *size))

    def _draw(self, key: object, make: Callable[[], object]) -> None:
        if key != self._drawn:
            self._live.update(make(), refresh=True)  # type: ignore[arg-type]
            self._drawn = key

    def _waiting(self, seconds: int) -> Text:
        text = Text(f"the training processes start; {seconds} s so far\n\n")
        return text.append(self.shown.note or "q quits this view, and not the training", "dim")


def watch(console: Console, source: Path | Launched) -> int:
    """Show a run until it is left; returns the exit status.

    Args:
        console: a terminal.
        source: a run's folder of events, or what a launcher starts. In the latter case the view ends with the
            run, and a first Ctrl-C, which the training gets as well, only makes it say so.

    Raises:
        UserError: the run cannot be read.
    """
    launched = source if isinstance(source, Launched) else None
    run = None if isinstance(source, Launched) else RunWatch(source)  # before the screen is taken
    with Interrupts(survives=1 if launched else 0) as interrupts:
        try:
            with (
                Keys() as keys,
                Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False) as live,
            ):
                view = _View(console, live)
                view.run = run
                _show(view, keys, interrupts, launched)
        except KeyboardInterrupt:
            return 130 if launched else 0
    return 0


def _show(view: _View, keys: Keys, interrupts: Interrupts, launched: Launched | None) -> None:
    while True:
        begin = time.monotonic()
        if launched is not None:
            latest = launched.latest()
            if latest is not None and (view.run is None or latest != view.run.folder):
                view.run = RunWatch(latest)
        if interrupts.count:
            view.shown = replace(view.shown, note=STOPPING if view.run is not None else "stopping")
        over = launched is not None and launched.is_over(view.run.history.end if view.run else None)
        view.refresh()  # after it is known to be over, so that the last is read
        if over or view.press(keys.read(max(_PERIOD - (time.monotonic() - begin), 0.01))):
            return


def picture(console: Console, folder: Path) -> None:
    """Print one frame of a run, of the console's size.

    Raises:
        UserError: the run cannot be read.
    """
    run = RunWatch(folder)
    run.poll()
    console.print(Frame(console).render(run.snapshot(), run.history, Shown(), *console.size))
