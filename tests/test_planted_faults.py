"""The table of planted faults matches the code, and the script distinguishes caught faults from others."""

from __future__ import annotations

from pathlib import Path

import planted_faults as tool
import pytest

ROOT = Path(__file__).parents[1]

FAULTS = tool.read_table()
LAYERS = {path.parent.name for path in (ROOT / "titan_async").glob("*/__init__.py")}


def test_there_are_faults_in_every_layer() -> None:
    assert len(FAULTS) >= 40
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {Path(fault.file).parts[1] for fault in FAULTS} >= LAYERS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: tool.Fault) -> None:
    assert fault.file.startswith("titan_async/") and fault.what
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    new = tool.changed(text, fault)
    assert new != text
    compile(new, fault.file, "exec")
    assert 1 <= len(fault.tests) <= 2
    for test in fault.tests:
        assert (ROOT / test).is_file()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with one function, and a test of it."""
    tree = tmp_path_factory.mktemp("tree")
    (tree / "titan_async").mkdir()
    (tree / "titan_async/__init__.py").write_text("def double(x):\n    y = 2 * x\n    return y\n")
    (tree / "test_double.py").write_text(
        "from titan_async import double\n\n\ndef test_double():\n    assert double(2) == 4\n"
    )
    return tree


@pytest.mark.parametrize(
    ("old", "new", "outcome", "by"),
    [
        ("2 * x", "2 + x + 1", "caught", "test_double.py::test_double"),
        ("2 * x", "2 + x", "not caught", ""),
        ("3 * x", "2 + x", "does not apply", "has the lines 0 times, not once"),
        ("y", "z", "does not apply", "has the lines 2 times, not once"),
        ("def double", "def twice", "broken", "pytest ended with status 2"),
    ],
)
def test_outcome_of_a_fault(tree: Path, old: str, new: str, outcome: str, by: str) -> None:
    file = tree / "titan_async/__init__.py"
    before = file.read_text()
    fault = tool.Fault("some", "", "titan_async/__init__.py", old, new, ["test_double.py"])
    result = tool.try_fault(tree, fault)
    assert result.outcome == outcome and by in result.by
    assert file.read_text() == before


def test_a_tree_is_copied_and_imported(tree: Path, tmp_path: Path) -> None:
    (tree / ".git").mkdir()
    copy = tool.copy_tree(tree, tmp_path / "copy")
    assert (copy / "test_double.py").is_file() and not (copy / ".git").exists()


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.main(["nothing"])
    assert "there is no fault nothing; choose from recompute-with" in capsys.readouterr().err
