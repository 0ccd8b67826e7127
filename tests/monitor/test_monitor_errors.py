"""User errors of the commands watch, trace and plot: one line each, and nothing is written."""

from pathlib import Path

import pytest

from tests.support.events import write_run
from titan_async.cli.main import main

RUN_ID = "20260101-000000-aaaa"

MISTAKES = {
    "trace": "titan-async trace takes RUN_DIR, not nothing {see}",
    "trace {run} {run}": "titan-async trace takes RUN_DIR, not {run} {run} {see}",
    "trace {tmp}/absent": "{tmp}/absent is not a folder: give {what}",
    "trace {tmp}/empty": "{tmp}/empty has no events of a run: give {what} that recorded them",
    "trace {run} --run x": "{run} has no run x: there are {id}",
    "trace {run} --stesp 3": "unknown flag --stesp; did you mean --steps? {see}",
    "trace {run} --steps 5-x": "--steps is 5-x: write A-B, A- or A, for example 10-12",
    "trace {run} --steps 5-3": "--steps is 5-3: its first step is after its last",
    "trace {run} --steps 4-9": "--steps is 4-9, but the files of run {id} have 1-4: choose among these",
    "trace {run} --out t.txt": "--out is t.txt: its name must end in .json or .json.gz",
    "trace {run} --out {tmp}/file/t.json": (
        "cannot write {tmp}/file/t.json ({tmp}/file is not a folder): choose another path with --out"
    ),
    "plot": "titan-async plot takes RUN_DIR [RUN_DIR ...], not nothing {see}",
    "plot {run} {tmp}/absent": "{tmp}/absent is not a folder: give {what}",
    "plot {run} --format pdf": "--format: invalid choice: 'pdf' (choose from 'png', 'svg') {see}",
    "plot {run} --out x.pdf": "--out is x.pdf: name a folder, or a file that ends in .png or .svg",
    "plot {run} --out x.png --format svg": "--out x.png is not svg: leave out one of --out and --format",
    "plot {run} --labels a,b": (
        "--labels names 2 runs, but there are 1: give one label for each, with commas between them"
    ),
    "plot {run} --steps 4-9": "--steps is 4-9, but the files of run {id} have 1-4: choose among these",
    "plot {run} --out {tmp}/file/plots": (
        "cannot write {tmp}/file/plots/loss.png (Not a directory): choose another path with --out"
    ),
    "watch": "titan-async watch takes RUN_DIR, not nothing {see}",
    "watch a b": "titan-async watch takes RUN_DIR, not a b {see}",
    "watch {tmp}/absent": "{tmp}/absent is not a folder: give {what}",
    "watch {tmp}/empty": "{tmp}/empty has no events of a run: give {what} that recorded them",
    "watch {run} --run x": "{run} has no run x: there are {id}",
    "watch {run} --following me": "--following: must be an integer of at least 1, not me {see}",
    "watch {run} --following 1 --once": (
        "--following waits for a run to start: omit --run, --once and --svg"
    ),
    "watch {run} --svg {tmp}/file/x.svg": (
        "cannot write {tmp}/file/x.svg ({tmp}/file is not a folder): choose another path with --svg"
    ),
}


@pytest.mark.parametrize("command", MISTAKES)
def test_user_error_is_one_sentence(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "run", RUN_ID, stages=2, microbatches=2, steps=4)
    places = {"run": tmp_path / "run", "tmp": tmp_path, "id": RUN_ID, "what": "the dump_folder of a run"}
    places["see"] = f"(see titan-async {command.split()[0]} --help)"
    before = sorted(tmp_path.rglob("*"))
    assert main([word.format(**places) for word in command.split()]) == 2
    assert capsys.readouterr() == ("", MISTAKES[command].format(**places) + "\n")
    assert sorted(tmp_path.rglob("*")) == before
