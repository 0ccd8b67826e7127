"""The live view: a full screen that is drawn anew four times a second where something has changed.

When output is not a terminal, plain lines are printed.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from titan_async.monitor.journal import JournalReader
from titan_async.monitor.processes import Launched, has_gone
from titan_async.monitor.run_folder import RunInfo, read_info
from titan_async.monitor.snapshot import RunWatch, Snapshot
from titan_async.monitor.view.frame import Shown, clean, render_frame
from titan_async.monitor.view.terminal import Interrupts, reading_keys

__all__ = ["STOPPING", "picture", "print_lines", "watch"]

_PERIOD = 0.25
_TOGGLES = {"p": "paused", "s": "by_slowest", "?": "help", "h": "help"}

STOPPING = "stopping after this step and saving; Ctrl-C again stops at once"


def watch(console: Console, source: Path | Launched) -> int:
    """Show a run until it is left; returns the exit status.

    Args:
        console: a terminal.
        source: a run's folder of events, or what a launcher starts. In the latter case the view ends with the
            run, and a first Ctrl-C, which the training gets as well, only makes it say so.

    Raises:
        UserError: the run cannot be read.
    """
    run = None if isinstance(source, Launched) else RunWatch(source)  # before the screen is taken

    def show(interrupts: Interrupts) -> None:
        with (
            reading_keys() as read_keys,
            Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False) as live,
        ):
            view = _View(console, live, run)
            over = False
            while not over:
                begin = time.monotonic()
                if isinstance(source, Launched):
                    view.follow(source.latest())
                    over = source.is_over(view.run.history.end if view.run else None)
                if interrupts.count:
                    view.shown = replace(view.shown, note="stopping" if view.run is None else STOPPING)
                view.refresh()  # after it is known to be over, so that the last is read
                over = over or view.press(read_keys(max(_PERIOD - (time.monotonic() - begin), 0.01)))

    return _until_left(source, show)


def print_lines(file: TextIO, source: Path | Launched) -> int:
    """Write the log of a run, from its beginning to its end; returns the exit status.

    Args:
        file: where to.
        source: as for `watch`.

    Raises:
        UserError: the run cannot be read.
    """

    def show(interrupts: Interrupts) -> None:
        folder: Path | None = None
        info: RunInfo | None = None
        reader: JournalReader | None = None
        end: str | None = None
        over = False
        while not over:
            latest = source.latest() if isinstance(source, Launched) else source
            if latest is not None and latest != folder:
                folder, info, reader, end = latest, read_info(latest), JournalReader(latest), None
            if isinstance(source, Launched):
                over = source.is_over(end)
            else:
                over = end is not None or (info is not None and has_gone(info))
            for entry in reader.new_entries() if reader is not None else []:
                if entry["kind"] in ("log", "warning"):
                    warning = "warning: " if entry["kind"] == "warning" else ""
                    file.write(f"{warning}{clean(str(entry.get('text')))}\n")
                elif entry["kind"] == "end":
                    end = str(entry.get("reason"))
            file.flush()
            if not over and (end is None or isinstance(source, Launched)):
                time.sleep(_PERIOD)

    return _until_left(source, show)


def picture(console: Console, folder: Path) -> None:
    """Print one frame of a run, of the console's size.

    Raises:
        UserError: the run cannot be read.
    """
    run = RunWatch(folder)
    run.poll()
    console.print(render_frame(console, run.snapshot(), run.history, Shown(), *console.size))


def _until_left(source: Path | Launched, show: Callable[[Interrupts], None]) -> int:
    """Show a run until Ctrl-C, the second one if it has a launcher, which gets the first; the exit status."""
    launched = isinstance(source, Launched)
    with Interrupts(survives=1 if launched else 0) as interrupts:
        try:
            show(interrupts)
        except KeyboardInterrupt:
            return 130 if launched else 0
    return 0


class _View:
    """What is on the screen, and which keys have been pressed."""

    def __init__(self, console: Console, live: Live, run: RunWatch | None) -> None:
        self._console, self._live = console, live
        self._drawn: object = None
        self._began = time.monotonic()
        self._snapshot: Snapshot | None = None
        self.run = run
        self.shown = Shown()

    def follow(self, folder: Path | None) -> None:
        """Show the run of this folder from now on."""
        if folder is not None and (self.run is None or folder != self.run.folder):
            self.run = RunWatch(folder)

    def press(self, keys: str) -> bool:
        """Do what keys ask for; whether to leave."""
        for key in keys:
            if key in "qQ":
                return True
            if (choice := _TOGGLES.get(key)) is not None:
                pressed = {choice: not getattr(self.shown, choice)}
                self.shown = replace(self.shown, **pressed)  # type: ignore[arg-type]
        return False

    def refresh(self) -> None:
        """Read and draw what is new; while paused, only what keys and the terminal's size change."""
        if self.run is not None and (not self.shown.paused or self._snapshot is None):
            self.run.poll()
            self._snapshot = self.run.snapshot()
        size, shown, run, seen = self._console.size, self.shown, self.run, self._snapshot
        if run is None or seen is None:
            waited = int(time.monotonic() - self._began)
            self._draw((waited, size, shown), lambda: self._waiting(waited))
        else:
            self._draw(
                (seen, size, shown), lambda: render_frame(self._console, seen, run.history, shown, *size)
            )

    def _draw(self, key: object, make: Callable[[], RenderableType]) -> None:
        if key != self._drawn:
            self._live.update(make(), refresh=True)
            self._drawn = key

    def _waiting(self, seconds: int) -> Text:
        text = Text(f"the training processes start; {seconds} s so far\n\n")
        return text.append(self.shown.note or "q quits this view, and not the training", "dim")
