"""Data that do not fit the run, or are too few for it, are refused before any process starts."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.data.conftest import jsonl_writer
from titan_async.data import TextSource, prepare_tokens, shakespeare_tokenizer_folder
from titan_async.errors import UserError
from titan_async.recipes.debug import debug
from titan_async.training.dataloader import TextDataLoader
from titan_async.training.preflight.check import check
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
        check(config, world_size=2)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_valid_token_files_are_accepted(made: Path) -> None:
    check(config(made), world_size=2)


def other_tokenizer(folder: Path, change: Callable[[Path], object]) -> Path:
    change(Path(shutil.copytree(shakespeare_tokenizer_folder(), folder / "tokenizer")))
    return folder / "tokenizer"


def test_token_files_of_another_tokenizer(made: Path, tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        content["model"]["merges"].pop()
        (folder / "tokenizer.json").write_text(json.dumps(content))

    text = message(config(made, other_tokenizer(tmp_path, change)))
    assert f"token files of dataloader, {made}, were made with another tokenizer than the one in" in text
    assert "create the files again" in text


def test_token_files_with_other_bos_and_eos_tokens(made: Path, tmp_path: Path) -> None:
    tokenizer = other_tokenizer(tmp_path, lambda folder: (folder / "tokenizer_config.json").unlink())
    assert "with the tokens 0 and 0, but the tokenizer_config.json in" in message(config(made, tokenizer))


def test_a_vocabulary_too_large_for_the_model(copy: Path) -> None:
    index = json.loads((copy / "index.json").read_text())
    (copy / "index.json").write_text(json.dumps(index | {"vocab_size": 2049}))
    text = message(config(copy))
    assert "have a vocabulary of 2049 entries but the model has room for 2048: choose a recipe" in text


def test_a_tokenizer_whose_configuration_adds_entries_counts_with_them(made: Path, tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        (folder / "tokenizer_config.json").write_text('{"pad_token": "<pad>"}')

    text = message(config(made, other_tokenizer(tmp_path, change)))
    assert "has 2049 entries but the model has room for 2048" in text


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
        (lambda folder: (folder / "index.json").rename(folder / "progress.json"), "are incomplete"),
        (lambda folder: shutil.rmtree(folder), "has no token files: create them with tools/prepare_data.py"),
    ],
)
def test_incomplete_token_files(copy: Path, damage: Callable[[Path], object], part: str) -> None:
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


@pytest.fixture
def texts(tmp_path: Path) -> Callable[..., AsyncTrainer.Config]:
    """Creates configurations with documents of the given numbers of words, without a validation split.

    A word is a token, documents have no end token, and sequences have 10 tokens.
    """
    vocabulary = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, "[UNK]"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "words").mkdir()
    vocabulary.save(str(tmp_path / "words/tokenizer.json"))

    def make(words: Sequence[int], steps: int | None = None, **fields: object) -> AsyncTrainer.Config:
        jsonl_writer(tmp_path)("texts.jsonl", ["a " * count for count in words])
        base = debug()
        loader = {"dataset_path": str(tmp_path / "texts.jsonl"), "shuffle": False, **fields}
        made = dataclasses.replace(
            base,
            dump_folder=str(tmp_path / "run"),
            hf_assets_path=str(tmp_path / "words"),
            training=dataclasses.replace(base.training, seq_len=10, local_batch_size=4),
            dataloader=TextDataLoader.Config(validation_fraction=0.0, **loader),
        )
        if steps is None:
            return dataclasses.replace(made, validator=dataclasses.replace(base.validator, enable=False))
        made.dataloader.validation_fraction = 0.5
        validation = TextDataLoader.Config(split="validation", validation_fraction=0.5, **loader)
        validator = dataclasses.replace(base.validator, steps=steps, dataloader=validation)
        return dataclasses.replace(made, validator=validator)

    return make


def accepts(config: AsyncTrainer.Config, shards: int = 1) -> bool:
    config.parallelism.data_parallel_shard_degree = shards
    try:
        check(config, world_size=2 * shards)
    except UserError as error:
        text = str(error)
    else:
        return True
    assert "sequences of 10 tokens" in text
    return False


@pytest.mark.parametrize(
    ("words", "shards", "workers", "fits"),
    [
        # A document of n words has n - 1 pairs of a token and the next; those of a rank are laid end to end.
        ([11], 1, 0, True),
        ([10], 1, 0, False),
        ([6, 6], 1, 0, True),
        ([6, 5], 1, 0, False),
        ([6, 6, 6, 6], 2, 0, True),
        ([6, 7, 6, 5], 2, 0, True),
        ([6, 6, 6, 5], 2, 0, False),
        ([1000], 2, 0, False),
        ([1000, 1000, 1000], 2, 2, False),
        ([1000] * 4, 2, 2, True),
        ([3] * 40, 2, 0, True),
        ([3] * 40, 4, 0, True),
        ([3] * 16, 4, 0, False),
        ([1000, 2] * 3, 2, 0, False),
    ],
)
def test_each_reader_needs_a_sequence(
    texts: Callable[..., AsyncTrainer.Config],
    words: list[int],
    shards: int,
    workers: int,
    fits: bool,
) -> None:
    assert accepts(texts(words, num_workers=workers), shards) == fits


@pytest.mark.parametrize(
    ("words", "shards", "fits"),
    [
        ([41], 1, True),
        ([40], 1, False),
        ([41, 41], 2, True),
        ([41, 40], 2, False),
        ([22, 22, 20, 21], 2, True),
    ],
)
def test_a_single_pass_needs_a_batch_of_all_ranks(
    texts: Callable[..., AsyncTrainer.Config], words: list[int], shards: int, fits: bool
) -> None:
    assert accepts(texts(words, infinite=False), shards) == fits
    # And so does a validation on the whole split, which has every second document.
    validated = [count for pair in zip([1000] * len(words), words, strict=True) for count in pair]
    assert accepts(texts(validated, steps=-1), shards) == fits


def test_a_validation_of_some_steps_reads_a_short_text_again(
    texts: Callable[..., AsyncTrainer.Config],
) -> None:
    assert accepts(texts([1000, 11], steps=50))
    assert not accepts(texts([1000, 10], steps=50))
    assert "The validation split of" in message(texts([1000, 10], steps=1))


def test_token_files_for_more_ranks_than_documents(made: Path) -> None:
    loader = config(made).dataloader
    few = dataclasses.replace(config(made), validator=dataclasses.replace(debug().validator, enable=False))
    few.parallelism.data_parallel_shard_degree = 128
    few.dataloader = dataclasses.replace(loader, validation_fraction=0.0)
    with pytest.raises(UserError, match="sequences of 256 tokens that are needed for each of 128"):
        check(few, world_size=256)
    few.parallelism.data_parallel_shard_degree = 8
    check(few, world_size=16)


def test_a_tokenizer_of_other_files_is_checked_too(texts: Callable[..., AsyncTrainer.Config]) -> None:
    made = texts([1000])
    folder = Path(made.hf_assets_path)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps({f"w{index}": index for index in range(3000)}))
    assert "has 3000 entries but the model has room for 2048" in message(made)
    (folder / "vocab.json").write_text("[")
    assert "cannot be read" in message(made)
