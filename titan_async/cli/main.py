"""The command `titan-async VERB ...`.

A verb is a module of this package with a `run(argv) -> int` and a line in `VERBS`. It is imported when it is
called, so the dependencies of other verbs are not loaded.
"""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Sequence

from titan_async import __version__
from titan_async.config.suggestions import nearest
from titan_async.errors import UserError

__all__ = ["MODULES", "VERBS", "main"]

VERBS = {
    "train": "train a model with a recipe file",
    "plan": "predict the time, memory and traffic of a run",
    "calibrate": "measure this machine's GPU or CPU, for plans",
    "rehearse": "try a run of many GPUs on this machine's CPU, rank by rank",
    "watch": "show a run while it trains: stages, waits, losses",
    "trace": "write the spans of a run's ranks as a file for Perfetto",
    "plot": "draw runs: loss, timeline of steps, utilization",
    "convert": "write a checkpoint for Hugging Face's transformers",
    "import": "start a run from a model in Hugging Face's format",
    "sample": "print the text that a model generates after a prompt",
}
"""Verbs with their descriptions. The module of a verb has its name, except for those in `MODULES`."""

MODULES = {"import": "import_model"}
"""Modules of verbs that are keywords of Python."""

USER_ERROR = 2
"""The exit status after a `UserError`."""

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit status.

    A `UserError` is printed on stderr as one line, without a traceback.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(argv)
    except UserError as error:
        print(error, file=sys.stderr)
        return USER_ERROR
    except SystemExit as done:
        return int(done.code or 0)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `titan-async train --help | head`
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        print(
            UserError(f"the name {error.filename} is too long for this system: shorten it"), file=sys.stderr
        )
        return USER_ERROR


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help(), end="")
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"titan-async {__version__}")
        return 0
    if argv[0] not in VERBS:
        what = "unknown option" if argv[0].startswith("-") else "unknown verb"
        if argv[0].endswith(".toml"):
            raise UserError(f"{what} {argv[0]}; did you mean titan-async train {argv[0]}?")
        close = nearest(argv[0], [*VERBS, "--help", "--version"])
        hint = f"did you mean {close}?" if close else f"there are: {', '.join(VERBS)} (and --help)"
        raise UserError(f"{what} {argv[0]}; {hint}")
    verb = importlib.import_module(f"titan_async.cli.{MODULES.get(argv[0], argv[0])}")
    return int(verb.run(argv[1:]))


def _help() -> str:
    from titan_async.cli import train

    verbs = "".join(f"  {name:<10}{text}\n" for name, text in VERBS.items())
    return f"""\
usage: titan-async VERB ...

Asynchronous pipeline parallelism (PipeDream-2BW) for pretraining language models, on torchtitan.

verbs:
{verbs}
{train.listing()}
examples:
{train.EXAMPLES}
`titan-async VERB --help` describes a verb; `titan-async --version` prints the version.
"""
