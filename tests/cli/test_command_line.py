"""Flags of verbs that also take those of a recipe; and that their help loads nothing heavy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_async.cli.command_line import parse
from titan_async.cli.progress import progress_bar
from titan_async.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("verb", ["calibrate", "convert", "import", "sample"])
def test_help_imports_no_torch(verb: str) -> None:
    program = (
        "import sys; from titan_async.cli.main import main; status = main(sys.argv[1:])\n"
        "heavy = {'torch', 'torchtitan', 'pydantic', 'rich', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, verb, "--help"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"\n  titan-async {verb} " in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 112


def test_own_flags_may_stand_anywhere() -> None:
    line = parse(
        "v",
        [
            "--size=3",
            "a",
            "b",
            "--text",
            "--c.d",
            "--on",
            "--training.steps",
            "5",
            "--other",
            "x",
            "--last",
        ],
        ("size", "text", "other"),
        switches=("on",),
        optional=("last", "file"),
        recipe=True,
    )
    assert line.words == ["a", "b"]
    assert line.values == {"size": "3", "text": "--c.d", "on": None, "other": "x", "last": None}
    assert line.recipe_flags == ["--training.steps", "5"]
    assert (line.whole("size", 7), line.whole("weight", 7), line.whole("weight", None)) == (3, 7, None)
    assert parse("v", ["--file", "x"], (), optional=("file",)).value("file") == "x"
    assert parse("v", ["--file=x"], (), optional=("file",)).value("file") == "x"
    assert parse("v", ["--file", "--size", "1"], ("size",), optional=("file",)).values == {
        "file": None,
        "size": "1",
    }


@pytest.mark.parametrize("recipe", [False, True])
@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--size"], "--size needs a value, as in titan-async v --help"),
        (["--size="], "--size needs a value, as in titan-async v --help"),
        (["--size", "--on"], "--size needs a value, as in titan-async v --help"),
        (["--size", "1", "--size=2"], "--size is given twice: keep one"),
        (["--on=1"], "--on takes no value, as in titan-async v --help"),
    ],
)
def test_a_mistake_is_one_sentence(argv: list[str], sentence: str, recipe: bool) -> None:
    with pytest.raises(UserError) as raised:
        parse("v", argv, ("size",), switches=("on",), recipe=recipe)
    assert str(raised.value) == sentence


@pytest.mark.parametrize(
    ("flag", "recipe", "sentence"),
    [
        ("--szie", True, "unknown flag --szie; did you mean --size?"),
        ("--modul", True, "unknown flag --modul; did you mean --module?"),
        ("--szie", False, "unknown flag --szie of titan-async v; did you mean --size?"),
        ("-q", False, "unknown flag -q of titan-async v; there are --size, --help"),
    ],
)
def test_an_unknown_flag(flag: str, recipe: bool, sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        parse("v", [flag, "1"], ("size",), recipe=recipe)
    assert str(raised.value) == sentence


@pytest.mark.parametrize(("text", "least"), [("0", 1), ("-1", 0), ("x", 0), ("1.5", 0), ("9" * 19, 0)])
def test_a_number_that_is_none(text: str, least: int) -> None:
    with pytest.raises(UserError, match=f"--size must be a whole number from {least} on, not {text}"):
        parse("v", ["--size", text], ("size",)).whole("size", None, least=least)


def test_a_terminal_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with open(there, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        with progress_bar("converting") as progress:
            progress(3, 10)
    shown = b""
    while b"converting" not in shown:
        shown += os.read(here, 10_000)  # fails once everything was read, as the other end is closed
    os.close(here)


def test_a_file_shows_none(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("converting") as progress:
        progress(3, 10)
    assert capsys.readouterr() == ("", "")
