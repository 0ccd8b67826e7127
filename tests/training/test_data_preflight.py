"""Token files that do not fit the run are one sentence, before any process starts."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.conftest import jsonl_writer
from titan_async.data import TextSource, prepare_tokens, shakespeare_tokenizer_folder
from titan_async.errors import UserError
from titan_async.recipes.debug import debug
from titan_async.training import preflight
from titan_async.training.data import TextDataLoader
from titan_async.training.trainer import AsyncTrainer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    jsonl_writer(folder)("a.jsonl", ["what light through yonder window breaks " * 20] * 100)
    prepare_tokens(TextSource(dataset_path=str(folder)), shakespeare_tokenizer_folder(), folder / "tokens")
    return folder / "tokens"


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "tokens"))


def config(folder: Path, tokenizer: Path | None = None, **fields: object) -> AsyncTrainer.Config:
    base = debug()
    loader = {"dataset": "tokens", "dataset_path": str(folder), **fields}
    return dataclasses.replace(
        base,
        dump_folder=str(folder.parent / "run"),
        hf_assets_path=str(tokenizer or shakespeare_tokenizer_folder()),
        dataloader=TextDataLoader.Config(**loader),
        validator=dataclasses.replace(
            base.validator, dataloader=TextDataLoader.Config(split="validation", shuffle=False, **loader)
        ),
    )


def message(config: AsyncTrainer.Config) -> str:
    with pytest.raises(UserError) as caught:
        preflight.check(config, world_size=2)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_fits_is_accepted(made: Path) -> None:
    preflight.check(config(made), world_size=2)


def other_tokenizer(folder: Path, change: Callable[[Path], object]) -> Path:
    change(Path(shutil.copytree(shakespeare_tokenizer_folder(), folder / "tokenizer")))
    return folder / "tokenizer"


def test_another_tokenizer(made: Path, tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        content["model"]["merges"].pop()
        (folder / "tokenizer.json").write_text(json.dumps(content))

    said = message(config(made, other_tokenizer(tmp_path, change)))
    assert f"token files of dataloader, {made}, were made with another tokenizer than the one in" in said
    assert "make the files anew" in said


def test_other_marks(made: Path, tmp_path: Path) -> None:
    tokenizer = other_tokenizer(tmp_path, lambda folder: (folder / "tokenizer_config.json").unlink())
    assert "with the tokens 0 and 0, but the tokenizer_config.json in" in message(config(made, tokenizer))


def test_a_vocabulary_too_large_for_the_model(copy: Path) -> None:
    index = json.loads((copy / "index.json").read_text())
    (copy / "index.json").write_text(json.dumps(index | {"vocab_size": 2049}))
    said = message(config(copy))
    assert "of a vocabulary of 2049 entries but the model has room for 2048: choose a recipe" in said


def test_a_tokenizer_whose_configuration_adds_entries_counts_with_them(made: Path, tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        (folder / "tokenizer_config.json").write_text('{"pad_token": "<pad>"}')

    said = message(config(made, other_tokenizer(tmp_path, change)))
    assert "has 2049 entries but the model has room for 2048" in said


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (
            lambda folder: (folder / "tokens-00000.safetensors").unlink(),
            "tokens-00000.safetensors is missing",
        ),
        (lambda folder: os.truncate(folder / "tokens-00000.safetensors", 99), "has 99 bytes instead of"),
        (
            lambda folder: (folder / "tokens-00000.safetensors").write_bytes(
                bytes((folder / "tokens-00000.safetensors").stat().st_size)
            ),
            "tokens-00000.safetensors can't be read",
        ),
        (lambda folder: (folder / "index.json").rename(folder / "progress.json"), "are unfinished"),
        (lambda folder: shutil.rmtree(folder), "holds no token files: make them with tools/prepare_data.py"),
    ],
)
def test_files_that_are_not_whole(copy: Path, damage: Callable[[Path], object], part: str) -> None:
    damage(copy)
    assert part in message(config(copy))


def test_splits(made: Path) -> None:
    assert "validation split is empty" in message(config(made, validation_fraction=0))
    differing = config(made)
    differing.dataloader.validation_fraction = 0.1
    assert "set both to the same" in message(differing)
    few = config(made, validation_fraction=0.005)
    assert "The validation split of" in message(few)
    assert "fewer than the 1 sequences of 256 tokens" in message(few)
