"""Malicious and corrupt input: each is refused with one sentence, and has no other effect.

For any content of files and any arguments, the command prints one line with the cause and the fix, exits with
status 2, and does not change the folder. It does not run code of the files; time and memory are bounded.
`tests/cli/hostile_cases.py` has the table. `tests/training/test_mistakes.py` and the tests of the layers have
ordinary mistakes.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import runpy
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli import hostile_files as files
from tests.cli.hostile_cases import CASES, TEXT, Case
from tests.support.events import write_run
from tests.support.saved_runs import DENSE, ROOT, save_run
from tests.support.training import environment, train
from titan_async.cli import elastic, main
from titan_async.config import toml_file
from titan_async.config.checks import check_numbers
from titan_async.config.recipe_file import resolve, resolve_recipe
from titan_async.data.files import read_documents
from titan_async.data.tokenizer import shakespeare_tokenizer_folder
from titan_async.errors import UserError

pytestmark = pytest.mark.timeout(120)  # a read from a pipe without a writer would block

MOST_SECONDS = 60
"""Processor time; the longest case takes 2 s."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, its model in one file and in several, events of a run, token files, and a tokenizer."""
    folder = tmp_path_factory.mktemp("good")
    save_run(folder / "run")
    write_run(folder / "events", steps=4, stages=2)
    shutil.copytree(shakespeare_tokenizer_folder(), folder / "tokenizer")
    (folder / "a.txt").write_text("To be, or not to be.\n" * 100)
    for argv in (
        ["convert", str(folder / "run"), str(folder / "one")],
        ["convert", str(folder / "run"), str(folder / "several"), "--max-shard-size", "4MB"],
    ):
        assert main.main(argv) == 0
    argv = [str(folder / "tokens"), "--tokenizer", str(folder / "tokenizer"), "--dataset_path"]
    assert prepare_data([*argv, str(folder / "a.txt"), "--processes", "1"]) == 0
    return folder


prepare_data: Callable[[list[str]], int] = runpy.run_path(str(ROOT / "tools" / "prepare_data.py"))["main"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in os.environ.keys() - environment().keys():
        monkeypatch.delenv(name)

    def start(*args: object, **options: object) -> None:
        raise AssertionError("processes were started")

    monkeypatch.setattr(elastic, "run_workers", start)
    return tmp_path


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns the mode and size of everything in a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        size = status.st_size if path.is_file() else 0
        found[str(path.relative_to(folder))] = (status.st_mode, size)
    return found


def test_cases_cover_all_verbs() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 60
    assert {case.argv.split()[0] for case in CASES if isinstance(case.argv, str)} >= {*main.VERBS, "prepare"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_input_is_refused_with_one_sentence_and_no_other_effect(
    case: Case,
    good: Path,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if case.needs:
        shutil.copytree(good / case.needs, here / case.needs)
    case.make(here)
    for name, value in case.variables.items():
        monkeypatch.setenv(name, value)
    words = case.argv.split() if isinstance(case.argv, str) else case.argv
    words = [str(DENSE) if word == "RECIPE" else word.replace("HERE", str(here)) for word in words]
    before = listing(here)
    capfd.readouterr()
    begin = time.process_time()
    status = prepare_data(words[1:]) if words[0] == "prepare" else main.main(words)
    seconds = time.process_time() - begin
    out, err = capfd.readouterr()
    assert (status, out) == (2, "")
    assert err.endswith("\n") and err[:-1].isprintable() and "Traceback" not in err, err[:2000]
    missing = [word for word in case.words if word not in err]
    assert not missing, f"{missing} not in: {err[:2000]}"
    assert listing(here) == before
    assert seconds < MOST_SECONDS


@pytest.mark.parametrize(
    "make", [files.endless_line("a.jsonl.gz"), files.sparse("a.txt", 10 << 30)], ids=["gzip", "zeros"]
)
def test_memory_is_bounded_for_decompression_bombs(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path)
    [file] = tmp_path.iterdir()
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="has more than"):
            list(read_documents(file, "text"))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1 << 30


def refusal(config: Any) -> str:
    try:
        check_numbers(config)
    except UserError as error:
        return str(error)
    return "nothing"


def test_every_number_has_a_range() -> None:
    """No field of the configuration accepts NaN or an integer beyond 64 bits."""
    config = resolve([str(DENSE)])
    accepted, seen = [], 0

    def visit(section: Any, path: str) -> None:
        nonlocal seen
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if dataclasses.is_dataclass(value) and field.name != "model_spec":
                visit(value, f"{path}{field.name}.")
            elif isinstance(value, int | float) and not isinstance(value, bool):
                seen += 1
                wrong: tuple[float, ...] = (2**70, -(2**70)) if isinstance(value, int) else (float("nan"),)
                for number in wrong:
                    setattr(section, field.name, number)
                    error = refusal(config)
                    if f"{path}{field.name} is {number}" not in error:
                        accepted.append(f"{path}{field.name} = {number}: {error}")
                setattr(section, field.name, value)

    visit(config, "")
    assert seen > 40
    assert not accepted


def test_code_of_a_tokenizer_is_ignored(here: Path) -> None:
    """A tokenizer that names remote code is loaded without it."""
    shutil.copytree(shakespeare_tokenizer_folder(), "tokenizer")
    code = {"AutoTokenizer": ["evil.Tokenizer", None]}
    files.changed_json("tokenizer_config.json", auto_map=code, tokenizer_class="Evil")(Path("tokenizer"))
    Path("tokenizer/evil.py").write_text("import os; os.mkdir('canary')")
    with pytest.raises(AssertionError, match="^processes were started$"):
        main.main(["train", str(DENSE), "--dump_folder", "out", "--hf_assets_path", "tokenizer"])
    assert not Path("canary").exists()


def test_code_in_a_model_is_not_run(good: Path, here: Path) -> None:
    shutil.copytree(good / "one", "one")
    files.changed_json("config.json", auto_map={"AutoModel": "evil.Model"})(Path("one"))
    Path("one/evil.py").write_text("import os; os.mkdir('canary')")
    assert main.main(["import", "one", "out"]) == 0
    assert sorted(path.name for path in here.iterdir()) == ["one", "out"]


def test_the_pickles_run_code_when_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If so, the absence of `canary` in other tests shows that no pickle was loaded."""
    monkeypatch.chdir(tmp_path)
    files.pickled("a")(tmp_path)
    pickle.loads(Path("a").read_bytes())
    assert Path("canary").is_dir()


def test_the_line_of_a_key_is_found_in_a_long_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comments = "# x\n" * 30_000
    text = comments + TEXT.replace("steps = 300", "stesp = [\n1,\n\n2]") + comments
    Path("x.toml").write_text(text)
    line = text[: text.index("stesp")].count("\n") + 1
    parsed = []

    def loads(text: str, loads=toml_file.tomllib.loads) -> dict[str, Any]:
        parsed.append(len(text))
        return loads(text)

    monkeypatch.setattr(toml_file.tomllib, "loads", loads)
    with pytest.raises(UserError, match=rf"^x\.toml:{line}: unknown key training.stesp"):
        resolve_recipe(["x.toml"])
    assert 0 < sum(parsed) < 40 * len(text), "it was parsed line by line"


def test_all_ranks_stop_when_one_cannot_load(good: Path, tmp_path: Path) -> None:
    """Only training processes detect it: the index is valid, but a file that it names is missing."""
    shutil.copytree(good / "run", tmp_path / "other")
    (tmp_path / "other/checkpoint/step-7/__0_0.distcp").unlink()
    initial = tmp_path / "other/checkpoint/step-7"
    flags = ("--checkpoint.initial_load_path", initial, "--validator.no-enable")
    run = train(tmp_path, *flags, recipe=DENSE)
    assert (run.status, run.err.count("\n")) == (2, 1), run.err
    assert "__0_0.distcp is missing" in run.err and "use another checkpoint" in run.err
    assert not list(tmp_path.glob("run/checkpoint/*"))
