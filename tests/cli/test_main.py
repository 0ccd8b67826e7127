"""The command: verbs, help and exit statuses."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import titan_async
from tests.cli.conftest import RECIPE
from tests.support import forks
from tests.support.selection import slow
from titan_async.cli import launch, main, train
from titan_async.config.recipe_list import list_recipes, recipes_folder
from titan_async.data import shakespeare_tokenizer_folder
from titan_async.training.process import failures

ROOT = Path(titan_async.__file__).parents[1]


def help_of(*argv: str) -> str:
    """The output of a command that prints help, in a process that must not import large packages."""
    program = (
        "import sys; from titan_async.cli.main import main; status = main(sys.argv[1:])\n"
        "packages = {'torch', 'torchtitan', 'pydantic', 'rich', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {packages}' if packages else status)"
    )
    command = [sys.executable, "-c", program, *argv]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


@pytest.mark.parametrize("argv", [[], ["--help"], ["help"], ["train", "--help"], ["train", "x.toml", "-h"]])
def test_help_lists_recipe_files(argv: list[str]) -> None:
    text = help_of(*argv)
    assert "titan-async train debug_cpu.toml" in text
    assert f"recipe files, of {ROOT}/toml_configs:\n" in text
    for path in Path(ROOT, "toml_configs").glob("*.toml"):
        assert f"\n  {path.name} " in text


@pytest.mark.parametrize("verb", [verb for verb in main.VERBS if verb != "train"])
def test_help_of_a_verb(verb: str) -> None:
    text = help_of(verb, "--help")
    assert text.startswith(f"usage: titan-async {verb} ")
    assert f"\n  titan-async {verb} " in text
    assert max(map(len, text.splitlines())) < 112


def test_every_verb_has_its_module() -> None:
    for verb in main.VERBS:
        assert (Path(main.__file__).parent / f"{main.MODULES.get(verb, verb)}.py").is_file()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"titan-async {titan_async.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "unknown verb trian; did you mean train?"),
        (["frobnicate"], f"unknown verb frobnicate; there are: {', '.join(main.VERBS)} (and --help)"),
        (["--versoin"], "unknown option --versoin; did you mean --version?"),
        (["a.toml"], "unknown verb a.toml; did you mean titan-async train a.toml?"),
        (["train", "absent.toml"], "absent.toml: no such file"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main.main(argv) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", message + "\n")


@pytest.mark.parametrize("anew", [False, slow(True)])
def test_dry_run_prints_only_the_recipe_file(anew: bool, tmp_path: Path) -> None:
    """Log messages of imported modules are suppressed."""
    Path(tmp_path, "x.toml").write_text(RECIPE + '[checkpoint]\nfolder = "ckpt \\"ü"\n', encoding="utf-8")
    command = [sys.executable, "-m", "titan_async.cli", "train", "x.toml", "--module", "llama3", "--dry-run"]
    command += ["--hf_assets_path", str(shakespeare_tokenizer_folder())]
    command += ["--dataloader.dataset_path", "texts"]
    Path(tmp_path, "texts").mkdir()
    Path(tmp_path, "texts", "texts.jsonl").write_text('{"text": "A text."}\n', encoding="utf-8")
    env = {"PYTHONPATH": str(ROOT), "PATH": "", "PYTHONUTF8": "1"}
    if anew:
        result = subprocess.run(
            command, capture_output=True, encoding="utf-8", cwd=tmp_path, check=False, env=env
        )
    else:
        result = forks.run(command, cwd=tmp_path, env=env)
    assert result.returncode == 0
    (note,) = result.stderr.splitlines()  # about the training
    assert "training.disable_cuda_graphs is set" in note
    assert tomllib.loads(result.stdout)["checkpoint"]["folder"] == 'ckpt "ü'


def test_recipes_are_listed_without_running_them(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "_private.py").write_text("def hidden() -> Trainer.Config: ...")
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "some.py").write_text(
        "raise SystemExit\n"
        'def small() -> "Trainer.Config":\n    """A small one.\n\n    More."""\n'
        "def big() -> AsyncTrainer.Config: ...\n"
        "def _helper() -> Trainer.Config: ...\n"
        "def with_model(model: dict) -> Trainer.Config: ...\n"
        "def other() -> int: ...\n"
    )
    found = [(r.name, r.module, r.summary, r.takes_model) for r in list_recipes(tmp_path)]
    assert found == [
        ("big", "some", "", False),
        ("small", "some", "A small one.", False),
        ("with_model", "some", "", True),
    ]


def test_own_recipes_have_a_summary_and_their_own_name() -> None:
    recipes = list_recipes()
    assert recipes_folder() is not None
    assert len({recipe.name for recipe in recipes}) == len(recipes)
    assert all(recipe.summary for recipe in recipes)


def test_listing_shows_recipe_files(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("# What it is for.\nrecipe = 'x'")
    (tmp_path / "b.toml").write_text("recipe = 'x'")
    text = train.listing({name: tmp_path / name for name in ("a.toml", "b.toml")})
    assert f"recipe files, of {tmp_path}:\n  a.toml  What it is for.\n  b.toml\n" in text


def test_a_worker_process_does_not_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    class Worker:
        @staticmethod
        def main(argv: list[str]) -> int:
            seen.append(argv)
            return 5

    monkeypatch.setitem(sys.modules, "titan_async.training.worker", Worker)  # type: ignore[arg-type]
    monkeypatch.setattr("titan_async.training.worker", Worker, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch.train(["x.toml", "--training.steps", "3"]) == 5
    assert seen == [["x.toml", "--training.steps", "3"]]


def test_the_root_cause_of_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(failures.ERROR_DIR, raising=False)
    assert not failures.report_failure("error", "without a launcher")
    monkeypatch.setenv(failures.ERROR_DIR, str(tmp_path))
    for rank, kind in ((2, "lost_peer"), (1, "error"), (0, "user")):
        monkeypatch.setenv("RANK", str(rank))
        assert failures.report_failure(kind, f"rank {rank}")  # type: ignore[arg-type]
    assert failures.report_failure("error", "a second report of rank 0")
    (tmp_path / "rank-9.json").write_text('{"rank": 9, ')
    reports = failures.read_failures(tmp_path)
    assert [(report.rank, report.message) for report in reports] == [
        (2, "rank 2"), (1, "rank 1"), (0, "rank 0")
    ]  # fmt: skip
    cause = failures.root_cause(reports)
    assert cause is not None and cause.rank == 1
    assert failures.root_cause(reports[:1]) == reports[0]
    assert failures.root_cause([]) is None
