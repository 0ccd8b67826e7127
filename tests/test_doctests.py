"""Examples in docstrings pass, and the main public names have one."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import titan_async
from titan_async.config.device import ensure_device

PACKAGE = Path(titan_async.__file__).parent

MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if ">>>" in path.read_text(encoding="utf-8")
)

WITH_AN_EXAMPLE = {
    "pipelining": ["ScheduleAsync2BW", "step_actions"],
    "pipelining.simulation": ["simulate"],
    "optim": [
        "DelayedGradients",
        "ErrorFeedback",
        "Lion",
        "Muon",
        "QKClip",
        "orthogonalize",
        "pipedream_delays",
    ],
    "data": ["DocumentEncoder", "PackedDataset", "open_documents", "prepare_tokens", "train_tokenizer"],
    "checkpoint.safetensors_files": ["plan_shards", "write_folder"],
    "training.models.hf_architecture": ["describe"],
    "planning.hardware": ["cluster_of"],
    "planning.layout": ["layout_of"],
    "training.pipeline.balance": ["balanced_split"],
    "config.recipe_file": ["resolve"],
}


def test_modules_with_examples_are_found() -> None:
    assert len(MODULES) >= 20


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_device()  # before an example imports torchtitan
    module = importlib.import_module(name)
    # Indentation or a missing section could hide an example from doctest.
    text = Path(str(module.__file__)).read_text(encoding="utf-8")
    written = text.count(">>> ")
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert (result.failed, result.attempted) == (0, written)


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package, names in WITH_AN_EXAMPLE.items() for name in names]
)
def test_main_names_have_an_example(package: str, name: str) -> None:
    ensure_device()
    documented = getattr(importlib.import_module(f"titan_async.{package}"), name)
    assert doctest.DocTestParser().get_examples(documented.__doc__)
