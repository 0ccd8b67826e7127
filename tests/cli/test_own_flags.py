"""Flags of verbs that also take those of a recipe; and that their help loads nothing heavy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_async.cli.own_flags import split_flags
from titan_async.errors import UserError
from titan_async.huggingface.progress import progress_bar

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("verb", ["convert", "import", "sample"])
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
    line = split_flags(
        "v",
        ["--size=3", "a", "b", "--text", "--c.d", "--training.steps", "5", "--other", "x y"],
        ("size", "text", "other"),
    )
    assert line.words == ["a", "b"]
    assert line.values == {"size": "3", "text": "--c.d", "other": "x y"}
    assert line.recipe_flags == ["--training.steps", "5"]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--size"], "--size needs a value, as in titan-async v --help"),
        (["--size", "1", "--size=2"], "--size is given twice: keep one"),
        (["--szie", "1"], "unknown flag --szie; did you mean --size?"),
        (["--modul", "1"], "unknown flag --modul; did you mean --module?"),
    ],
)
def test_a_mistake_is_one_sentence(argv: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        split_flags("v", argv, ("size",))
    assert str(raised.value) == sentence


def test_a_terminal_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with open(there, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        with progress_bar("converting") as progress:
            progress(3, 10)
    assert b"converting" in os.read(here, 10_000)
    os.close(here)


def test_a_file_shows_none(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("converting") as progress:
        progress(3, 10)
    assert capsys.readouterr() == ("", "")
