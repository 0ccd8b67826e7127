"""Documents of a user's function: texts or tokens, divided among ranks, exactly resumable."""

import dataclasses
import itertools
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from tests.data.conftest import equal
from tests.data.test_loader import build
from titan_async.data import TextSource, open_documents, shakespeare_tokenizer_folder
from titan_async.errors import UserError
from titan_async.training.dataloader import TextDataLoader

COUNT = 300


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.Config().build(tokenizer_path=str(shakespeare_tokenizer_folder()))


def texts() -> Iterator[str]:
    for number in range(COUNT):
        yield f"text {number}: " + " ".join(f"{number}.{word}" for word in range(number % 30))


def arrays() -> list[Any]:
    kinds = (lambda x: x, np.asarray, torch.tensor, lambda x: np.asarray(x, dtype=np.uint16))
    return [kinds[n % 4]([n % 2048, *range(1, 2 + n % 40)]) for n in range(COUNT)]


class Stateful:
    """An iterable with a state, which also counts the documents that it has yielded."""

    yielded = 0

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[str]:
        while self.at < COUNT:
            self.at += 1
            Stateful.yielded += 1
            yield f"document {self.at} {'word ' * (self.at % 20)}"

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class StatefulIterator:
    def __init__(self) -> None:
        self.inner = Stateful()
        self.documents = iter(self.inner)

    def __iter__(self) -> "StatefulIterator":
        return self

    def __next__(self) -> str:
        return next(self.documents)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


class Remade:
    """An iterable whose iterators have the state."""

    def __iter__(self) -> StatefulIterator:
        return StatefulIterator()


SOURCES = {"texts": texts, "tokens": arrays, "stateful": Stateful, "iterator": Remade}


def test_shares_of_ranks_and_splits_keep_the_order() -> None:
    def read(split: str, rank: int, world_size: int) -> list[str]:
        source = TextSource(function=texts, split=split, validation_fraction=0.1)
        return list(open_documents(source, rank=rank, world_size=world_size))

    whole = list(texts())
    train, validation = read("train", 0, 1), read("validation", 0, 1)
    assert [text for text in whole if text not in validation] == train and len(validation) == COUNT // 10
    for rank in range(3):
        assert read("train", rank, 3) == train[rank::3]


def test_function_is_given_the_arguments_that_it_has() -> None:
    def own(epoch: int, rank: int, world_size: int, split: str) -> list[str]:
        return [f"{split} {epoch} {rank} of {world_size}"]

    stream = open_documents(TextSource(function=own, split="validation"), rank=2, world_size=4)
    assert [*stream, *stream] == ["validation 0 2 of 4", "validation 1 2 of 4"]


def test_tokens_are_not_encoded_again(tokenizer: HuggingFaceTokenizer) -> None:
    loader = build(tokenizer, source=arrays, validation_fraction=0, infinite=False)
    (inputs, labels) = next(iter(loader))
    expected = [np.asarray(each, dtype=np.int64) for each in arrays()]
    flat = np.concatenate([each[:-1] for each in expected])[: 4 * 64]
    assert inputs["input"].flatten().tolist() == flat.tolist()
    flat = np.concatenate([each[1:] for each in expected])[: 4 * 64]
    assert labels.flatten().tolist() == flat.tolist()


@pytest.mark.covering(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("infinite", [True, False])
@pytest.mark.parametrize("name", SOURCES)
def test_resumes_in_a_new_loader(
    tokenizer: HuggingFaceTokenizer, name: str, infinite: bool, workers: int
) -> None:
    fields = {"source": SOURCES[name], "infinite": infinite, "num_workers": workers}
    loader = build(tokenizer, 1, 2, **fields)
    iterator = iter(loader)
    steps = 12 if infinite else 3  # more than an epoch
    for _ in range(steps):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    expected = list(itertools.islice(iterator, 12))
    assert expected
    resumed = build(tokenizer, 1, 2, **fields)
    resumed.load_state_dict(state)
    assert equal(list(itertools.islice(iter(resumed), 12)), expected)


@pytest.mark.parametrize("function", [Stateful, Remade])
def test_stateful_iterable_is_resumed_by_its_state(function: Any) -> None:
    first = open_documents(TextSource(function=function, validation_fraction=0))
    documents = iter(first)
    for _ in range(100):
        next(documents)
    state = json.loads(json.dumps(first.state_dict()))
    second = open_documents(TextSource(function=function, validation_fraction=0))
    second.load_state_dict(state)
    Stateful.yielded = 0
    assert next(iter(second)).startswith("document 101 ")
    assert Stateful.yielded == 1


def failing() -> Iterator[str]:
    yield "one text"
    raise KeyError("lost")


class Stubborn(Stateful):
    def state_dict(self) -> dict[str, Any]:
        return {"at": {1, 2}}


ONCE = iter(["a text"] * 3)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (lambda: 5, ["returns a int", "return an iterable"]),
        (lambda: [5], ["document 0", "is a int", "texts (str)"]),
        (lambda: [{"text": "a"}], ["document 0", "is a dict"]),
        (lambda: [[[1, 2]]], ["document 0", "is a list"]),
        (lambda: [[1.5, 2.5]], ["document 0", "is a list"]),
        (failing, ["failing failed: KeyError: 'lost'", "test_function_reader.py:"]),
        (list, ["yields no document in epoch 0"]),
        (lambda: ONCE, ["yields no document in epoch 1", "return a new iterable at each call"]),
        (Stubborn, ["state_dict()", "numbers, strings, lists"]),
    ],
)
def test_invalid_documents_are_user_errors(source: Any, words: list[str]) -> None:
    stream = open_documents(TextSource(function=source, validation_fraction=0))
    with pytest.raises(UserError) as refusal:
        list(itertools.chain(stream, stream, stream))
    for word in words:
        assert word in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_tokens_outside_the_vocabulary_are_refused(tokenizer: HuggingFaceTokenizer) -> None:
    for token in (2048, -1):
        loader = build(tokenizer, source=lambda token=token: [[1, token] * 400], validation_fraction=0)
        with pytest.raises(UserError, match=f"the token {token}, but the tokenizer"):
            next(iter(loader))


def test_function_and_dataset_exclude_each_other() -> None:
    with pytest.raises(UserError, match=r"Both dataloader.source .*texts and the dataset 'x/y'"):
        TextDataLoader.Config(source=texts, dataset_path="x/y").text_source()
    with pytest.raises(UserError, match="is a list: give a function"):
        TextDataLoader.Config(source=["a text"]).text_source()


def test_position_of_another_function_is_refused(tokenizer: HuggingFaceTokenizer) -> None:
    loader = build(tokenizer, source=texts)
    iterator = iter(loader)
    next(iterator)
    other = build(tokenizer, source=Stateful)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(UserError, match="position in other data"):
        next(iter(other))


def test_saved_recipe_refers_to_the_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_async.config.recipe_file import resolve_recipe

    (tmp_path / "my_texts.py").write_text(
        "import dataclasses\n"
        "from titan_async.recipes.debug import debug\n\n"
        "def lines():\n"
        "    return ['a text'] * 100\n\n"
        "def mine():\n"
        "    config = debug()\n"
        "    data = dataclasses.replace(config.dataloader, source=lines)\n"
        "    return dataclasses.replace(config, dataloader=data)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.toml").write_text('recipe = "mine"\n')
    resolved = resolve_recipe([str(tmp_path / "mine.toml"), "--module", "my_texts"])
    text = resolved.to_toml()
    assert "# dataloader.source: my_texts.lines\n" in text
    (tmp_path / "saved.toml").write_text(text)
    again = resolve_recipe([str(tmp_path / "saved.toml"), "--module", "my_texts"])
    assert list(again.config.dataloader.source()) == ["a text"] * 100
    assert "# dataloader.source: my_texts.lines\n" in again.to_toml()
    assert dataclasses.asdict(pickle.loads(pickle.dumps(again.config.dataloader)))["source"] is not None
