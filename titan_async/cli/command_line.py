"""Shared by verbs: parsers of command lines and ranges of steps, progress bars, suppression of logs."""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from titan_async.config.suggestions import nearest
from titan_async.errors import UserError

__all__ = ["VerbParser", "checked", "integer", "progress_bar", "quiet", "step_range"]

T = TypeVar("T")

_RECIPE_FLAGS = """\
--section.key value     any field of the recipe, as for titan-async train
--module MODULE         as for titan-async train"""


class VerbParser(argparse.ArgumentParser):
    """Parses the command line of a verb: operands, options anywhere, and last the flags of a recipe."""

    def __init__(
        self, verb: str, operands: str, description: str, *, examples: Sequence[str], recipe: bool = False
    ) -> None:
        """Creates a parser whose only option is --help.

        Args:
            verb: the name of the verb.
            operands: their names as in a usage line; optional ones in brackets.
            description: what the verb does.
            examples: command lines, without "titan-async".
            recipe: whether other options are flags of a recipe; otherwise they are errors.
        """
        super().__init__(
            prog=f"titan-async {verb}",
            usage=" ".join(
                ["titan-async", verb, *operands.split(), "[options]", *["[--section.key value ...]"] * recipe]
            ),
            description=description,
            epilog="".join(["examples:", *(f"\n  titan-async {line}" for line in examples)]),
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
        )
        self.register("action", None, _StoreOnce)
        if recipe:
            self.add_argument_group("flags of the recipe", _RECIPE_FLAGS)
        self._operands = operands.split()
        self._recipe = recipe
        self._options = {"--help": False, "-h": False}
        """Whether each takes exactly one value."""

    def option(self, name: str, help: str, **settings: Any) -> None:
        """Adds an option, as `add_argument` does."""
        self._options[name] = settings.keys().isdisjoint(("action", "nargs"))
        self.add_argument(name, help=help, **settings)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Returns the options, and lists of words: `operands`, and `recipe_flags` with their values.

        Raises:
            UserError: the command line is wrong.
            SystemExit: help was requested, and has been printed.
        """
        words: list[str] = []
        for word in argv:
            # argparse treats a value that starts with a dash as an option, unless it follows "=".
            if words and self._options.get(words[-1]) and word.partition("=")[0] not in self._options:
                words[-1] += f"={word}"
            else:
                words.append(word)
        line, others = self.parse_known_args(words)
        first = next((index for index, word in enumerate(others) if word.startswith("-")), len(others))
        line.operands, line.recipe_flags = others[:first], others[first:]
        for flag in line.recipe_flags:
            self._check_unknown(flag.partition("=")[0])
        required = [name for name in self._operands if not name.startswith(("[", "..."))]
        most = len(line.operands) if "...]" in self._operands else len(self._operands)
        if not len(required) <= len(line.operands) <= most:
            expected = " ".join(self._operands) or "only options"
            self.error(f"{self.prog} takes {expected}, not {' '.join(line.operands) or 'nothing'}")
        return line

    def _check_unknown(self, name: str) -> None:
        if self._recipe and (not name.startswith("--") or "." in name):
            return
        known = [*self._options, *["--module"] * self._recipe]
        close = nearest(name, known, cutoff=0.8 if self._recipe else 0.6)
        if close != name and (close or not self._recipe):
            self.error(f"unknown flag {name}" + (f"; did you mean {close}?" if close else ""))

    def error(self, message: str) -> NoReturn:
        """Raises a `UserError`, instead of printing the usage and exiting as argparse does."""
        raise UserError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=110)


class _StoreOnce(argparse.Action):
    """Stores a value, and refuses a second one."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        if getattr(namespace, self.dest) is not self.default:
            raise argparse.ArgumentError(self, "given twice")
        setattr(namespace, self.dest, values)


def checked(convert: Callable[[str], T], expected: str, is_valid: Callable[[T], bool]) -> Callable[[str], T]:
    """Returns a `type` for an option, whose error names what was `expected`."""

    def parse(text: str) -> T:
        try:
            value = convert(text)
            if is_valid(value):
                return value
        except (ValueError, OverflowError):
            pass
        raise argparse.ArgumentTypeError(f"must be {expected}, not {text}")

    return parse


def integer(least: int = 1, most: int = 10**18) -> Callable[[str], int]:
    """Returns a `type` for an option that takes an integer in a range."""
    expected = f"an integer of at least {least}" if most == 10**18 else f"an integer from {least} to {most}"
    return checked(int, expected, lambda number: least <= number <= most)


def step_range(text: str | None, available: range, latest: int) -> range:
    """Parses a range of steps: "A-B", "A-" or "A".

    Args:
        text: as the user wrote it; None for the `latest`.
        available: the steps that are recorded; the range may contain others.
        latest: the number of steps without `text`.

    Raises:
        UserError: it is not a range.
    """
    if text is None:
        return available[-latest:]
    match = re.fullmatch(r"([1-9]\d{0,9})(-(\d{0,10}))?", text)
    if match is None:
        raise UserError(f"--steps is {text}: write A-B, A- or A, for example 10-12")
    first = int(match[1])
    last = first if match[2] is None else int(match[3]) if match[3] else max(first, available.stop - 1)
    if last < first:
        raise UserError(f"--steps is {text}: its first step is after its last")
    return range(first, last + 1)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses log messages and warnings of torchtitan about configurations and CPUs."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module="torchtitan")
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # of data loaders
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Shows a progress bar of bytes on stderr, if that is a terminal.

    Yields:
        A function to call with the number of bytes done and in total.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
