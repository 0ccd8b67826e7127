"""The command lines of verbs."""

from __future__ import annotations

import os
import sys

import pytest

from titan_async.cli.command_line import VerbParser, checked, integer, progress_bar
from titan_async.errors import UserError


def parser(operands: str = "A [B]", *, recipe: bool = True) -> VerbParser:
    parser = VerbParser("v", operands, "Does it.", recipe=recipe, examples=("v a --size 3",))
    parser.option("--size", "how large", type=integer(0, 9), default=7)
    parser.option("--weight", "how heavy", type=checked(float, "a number above 0", lambda x: x > 0))
    parser.option("--text", "anything")
    parser.option("--on", "a switch", action="store_true")
    parser.option("--file", "a name, or -", nargs="?", const="-")
    return parser


def test_options_in_any_position() -> None:
    argv = ["--size=3", "a", "b", "--text", "x y", "--c.d", "-1", "--on", "--training.steps=5", "--file"]
    line = parser().parse(argv)
    assert (line.size, line.weight, line.text, line.on, line.file) == (3, None, "x y", True, "-")
    assert line.operands == ["a", "b"]
    assert line.recipe_flags == ["--c.d", "-1", "--training.steps=5"]
    assert parser().parse(["a", "--text", "--c.d"]).text == "--c.d"
    assert parser().parse(["a", "--file", "x"]).file == parser().parse(["a", "--file=x"]).file == "x"
    line = parser().parse(["a", "--file", "--weight", "0.5"])
    assert (line.size, line.weight, line.file, line.recipe_flags) == (7, 0.5, "-", [])


@pytest.mark.parametrize("recipe", [False, True])
@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["a", "--size"], "--size: expected one argument"),
        (["a", "--size", "--on"], "--size: expected one argument"),
        (["a", "--size", "1", "--size=2"], "--size: given twice"),
        (["a", "--on=1"], "--on: ignored explicit argument '1'"),
        (["a", "--size", "10"], "--size: must be an integer from 0 to 9, not 10"),
        (["a", "--size", "-1"], "--size: must be an integer from 0 to 9, not -1"),
        (["a", "--size", "1.5"], "--size: must be an integer from 0 to 9, not 1.5"),
        (["a", "--size", "9" * 5000], f"--size: must be an integer from 0 to 9, not {'9' * 5000}"),
        (["a", "--weight", "nan"], "--weight: must be a number above 0, not nan"),
        (["a", "--szie", "1"], "unknown flag --szie; did you mean --size?"),
        ([], "titan-async v takes A [B], not nothing"),
        (["a", "b", "c"], "titan-async v takes A [B], not a b c"),
    ],
)
def test_a_mistake_is_one_sentence(argv: list[str], sentence: str, recipe: bool) -> None:
    with pytest.raises(UserError) as raised:
        parser(recipe=recipe).parse(argv)
    assert str(raised.value) == f"{sentence} (see titan-async v --help)"


def test_other_flags_are_those_of_a_recipe_or_unknown() -> None:
    assert parser().parse(["a", "-q", "--dump_folder", "x"]).recipe_flags == ["-q", "--dump_folder", "x"]
    with pytest.raises(UserError, match="^unknown flag --modul; did you mean --module?"):
        parser().parse(["a", "--modul", "x"])
    with pytest.raises(UserError, match=r"^unknown flag -q \(see titan-async v --help\)$"):
        parser(recipe=False).parse(["a", "-q"])


def test_the_number_of_operands() -> None:
    assert parser("A [A ...]").parse(["a", "b", "c"]).operands == ["a", "b", "c"]
    assert parser("").parse([]).operands == []
    with pytest.raises(UserError, match="^titan-async v takes only options, not a"):
        parser("").parse(["a"])


def test_help_names_each_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse(["--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert out.startswith("usage: titan-async v A [B] [options] [--section.key value ...]\n\nDoes it.\n")
    assert "  --size SIZE      how large\n" in out and "  --section.key value " in out
    assert out.endswith("examples:\n  titan-async v a --size 3\n")


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
