"""The data loader for torchtitan: shapes, resumption from a checkpoint, and user errors."""

import dataclasses
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tokenizers import Tokenizer

from tests.data.conftest import equal, jsonl_writer
from tests.data.test_encoder import adds, make
from titan_async.data import (
    TextSource,
    document_stream,
    prepare_tokens,
    shakespeare,
    shakespeare_tokenizer_folder,
)
from titan_async.errors import UserError

pytest.importorskip("torchtitan")

from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from titan_async.training.dataloader import Batch, TextDataLoader, plain_worker_errors


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.Config().build(tokenizer_path=str(shakespeare_tokenizer_folder()))


def build(
    tokenizer: HuggingFaceTokenizer, rank: int = 0, world_size: int = 1, **fields: object
) -> TextDataLoader:
    return TextDataLoader.Config(**fields).build(
        dp_world_size=world_size, dp_rank=rank, tokenizer=tokenizer, seq_len=64, local_batch_size=4
    )


def test_batches(tokenizer: HuggingFaceTokenizer) -> None:
    assert tokenizer.bos_id == tokenizer.eos_id == 0
    assert tokenizer.vocab_size == 2048
    inputs, labels = next(iter(build(tokenizer, shuffle=False)))
    assert set(inputs) == {"input", "positions"}
    for tensor in (*inputs.values(), labels):
        assert tensor.shape == (4, 64)
        assert tensor.dtype == torch.int64
    assert torch.equal(inputs["input"][0, 1:], labels[0, :-1])
    assert tokenizer.decode(labels[0].tolist()).startswith("A Midsummer Night's Dream, ACT I, SCENE I.")
    assert inputs["input"][0, 0] == tokenizer.bos_id
    assert inputs["positions"].equal(torch.arange(64).expand(4, 64))


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents in which no two sequences are the same."""
    texts = [" ".join(f"{number}.{word}" for word in range(number % 60)) for number in range(1, 500)]
    return str(jsonl_writer(tmp_path_factory.mktemp("text"))("a.jsonl", texts))


@pytest.fixture(scope="module")
def token_folder(text_file: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokens")
    source = TextSource(dataset_path=text_file)
    prepare_tokens(source, shakespeare_tokenizer_folder(), folder, shard_tokens=2**14)
    return str(folder)


@pytest.mark.covering(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("tokens", [False, True])
def test_resumes_in_a_new_loader(
    tokenizer: HuggingFaceTokenizer, workers: int, split: str, tokens: bool, token_folder: str
) -> None:
    fields = {"num_workers": workers, "split": split, "infinite": split == "train"}
    if tokens:
        fields |= {"dataset": "tokens", "dataset_path": token_folder, "validation_fraction": 0.3}
    loader = build(tokenizer, 1, 2, **fields)
    iterator = iter(loader)
    for _ in range(7):
        next(iterator)
    state = loader.state_dict()
    assert isinstance(state["dp_rank_1"], str)
    json.loads(state["dp_rank_1"])
    expected = list(itertools.islice(iterator, 20))
    resumed = build(tokenizer, 1, 2, **fields)
    resumed.load_state_dict(state)
    assert equal(list(itertools.islice(iter(resumed), 20)), expected)


def test_default_worker_on_gpus_gives_the_same_batches(
    tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, state = build(tokenizer), {}
    batches = iter(alone)
    expected = []
    for number in range(8):
        expected.append(next(batches))
        if number == 3:
            state = alone.state_dict()
    assert alone.num_workers == 0
    monkeypatch.setattr("titan_async.training.dataloader.has_accelerator", lambda: True)
    loader = build(tokenizer)
    assert (loader.num_workers, loader.prefetch_factor) == (1, 16)
    assert equal(list(itertools.islice(iter(loader), 8)), expected)
    set_otherwise = build(tokenizer, num_workers=2, prefetch_factor=3)
    assert (set_otherwise.num_workers, set_otherwise.prefetch_factor) == (2, 3)
    assert build(tokenizer, num_workers=0).num_workers == 0

    # A run that resumes on another machine keeps the number of workers.
    resumed = build(tokenizer)
    resumed.load_state_dict(state)
    assert resumed.num_workers == 0
    assert equal(list(itertools.islice(iter(resumed), 4)), expected[4:])
    with pytest.raises(UserError, match="num_workers 0, not 1"):
        build(tokenizer, num_workers=1).load_state_dict(state)
    monkeypatch.setattr("titan_async.training.dataloader.has_accelerator", lambda: False)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    back = build(tokenizer)
    back.load_state_dict(loader.state_dict())
    assert back.num_workers == 1
    assert equal(list(itertools.islice(iter(back), 4)), list(itertools.islice(iterator, 4)))


def test_token_files_give_the_same_batches_as_text(
    tokenizer: HuggingFaceTokenizer, text_file: str, token_folder: str
) -> None:
    for infinite in (False, True):
        fields = {"shuffle": False, "split": "validation", "infinite": infinite, "validation_fraction": 0.3}
        text = build(tokenizer, dataset_path=text_file, **fields)
        tokens = build(tokenizer, dataset="tokens", dataset_path=token_folder, **fields)
        assert equal(list(itertools.islice(tokens, 50)), list(itertools.islice(text, 50)))


def test_resumes_through_a_checkpoint_on_disk(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    loader = build(tokenizer)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    dcp.save({"dataloader": loader}, checkpoint_id=tmp_path / "step-5", no_dist=True)
    resumed = build(tokenizer)
    dcp.load({"dataloader": resumed}, checkpoint_id=tmp_path / "step-5", no_dist=True)
    expected = list(itertools.islice(iterator, 10))
    assert equal(list(itertools.islice(iter(resumed), 10)), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_validation_gives_every_rank_equally_many_batches(
    tokenizer: HuggingFaceTokenizer, workers: int, text_file: str
) -> None:
    source = {"dataset_path": text_file, "split": "validation", "validation_fraction": 0.3}
    passes = [
        list(build(tokenizer, rank, 3, infinite=False, num_workers=workers, **source)) for rank in range(3)
    ]
    assert len({len(batches) for batches in passes}) == 1
    assert len(passes[0]) > 20
    rows = [tuple(row.tolist()) for batches in passes for _, labels in batches for row in labels]
    assert all(labels.shape == (4, 64) for batches in passes for _, labels in batches)
    assert len(set(rows)) == len(rows)


def test_workers_share_the_documents(tokenizer: HuggingFaceTokenizer) -> None:
    rows: list[tuple[int, ...]] = []
    for rank in range(2):
        loader = build(tokenizer, rank, 2, split="validation", num_workers=2)
        for _, labels in itertools.islice(loader, 60):
            rows += [tuple(row.tolist()) for row in labels]
    assert len(set(rows)) == len(rows)


def test_validation_loaders_are_cheap_to_build(
    tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plays are not read again, and no more is tokenized than the first batch needs."""
    config = dataclasses.replace(TextDataLoader.Config(split="validation"), infinite=True)
    build(tokenizer)
    read, encoded = [], []

    def encode(text: str, *args: object, encode=tokenizer.encode, **options: object) -> list[int]:
        encoded.append(encode(text, *args, **options))
        return encoded[-1]

    monkeypatch.setattr(shakespeare, "_scenes_of", lambda text: read.append(text) or [])
    monkeypatch.setattr(tokenizer, "encode", encode)
    for _ in range(10):
        loader = config.build(dp_world_size=1, dp_rank=0, tokenizer=tokenizer, seq_len=64, local_batch_size=4)
        next(iter(loader))
        # Only the last document completes the batch.
        assert encoded and sum(len(tokens) - 1 for tokens in encoded[:-1]) < 4 * 64
        encoded.clear()
    assert not read


def test_unread_loader_has_a_state(tokenizer: HuggingFaceTokenizer) -> None:
    loader = build(tokenizer)
    state = loader.state_dict()
    first = next(iter(loader))
    resumed = build(tokenizer)
    resumed.load_state_dict({})
    resumed.load_state_dict(state)
    assert equal([next(iter(resumed))], [first])


@pytest.mark.parametrize("workers", [0, 2])
def test_user_errors_are_raised_from_workers(
    tokenizer: HuggingFaceTokenizer, workers: int, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text("{\n")
    loader = build(tokenizer, dataset_path=str(tmp_path), num_workers=workers)
    with pytest.raises(
        UserError, match=r"^Line 1 of .*a.jsonl is not valid JSON .*fix or remove that line.$"
    ):
        next(iter(loader))


ENDED = r"^A data loader worker has died \(%s\), perhaps .* resumes from its last checkpoint\.$"


def test_dead_worker_is_a_user_error(
    tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = set(multiprocessing.active_children())
    loader = build(tokenizer, num_workers=1)
    batches = iter(loader)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - others

    def compute() -> None:
        with plain_worker_errors():
            os.kill(worker.pid, signal.SIGKILL)
            while True:  # until torch's signal handler raises
                time.sleep(0.01)

    with pytest.raises(UserError, match=ENDED % r"DataLoader worker \(pid[^:]*: Killed"):
        compute()

    def lose(_: object) -> Iterator[Batch]:
        raise ConnectionResetError(104, "Connection reset by peer")
        yield

    monkeypatch.setattr(StatefulDataLoader, "__iter__", lose)
    with pytest.raises(UserError, match=ENDED % ".*Connection reset by peer"):
        next(iter(loader))
    with pytest.raises(ConnectionResetError):
        next(iter(build(tokenizer)))


def test_invalid_states_are_refused(tokenizer: HuggingFaceTokenizer) -> None:
    state = build(tokenizer, 0, 2).state_dict()
    with pytest.raises(UserError, match=r"data-parallel degree 2, not 4: resume with"):
        build(tokenizer, 3, 4).load_state_dict(state)
    with pytest.raises(UserError, match=r"dataloader.num_workers 0, not 1"):
        build(tokenizer, 0, 2, num_workers=1).load_state_dict(state)
    other = build(tokenizer, 0, 2, data_seed=1)
    other.load_state_dict(state)
    with pytest.raises(UserError, match="position in other data"):
        next(iter(other))


ENDINGS = ["jsonl", "txt", "parquet", "tokens"]


def write_data(folder: Path, ending: str, texts: list[str], name: str = "a") -> dict[str, object]:
    """Write texts to a folder; gives the loader's fields for it."""
    folder.mkdir(exist_ok=True)
    if ending == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / f"{name}.parquet")
    elif ending == "txt":
        (folder / f"{name}.txt").write_text("\n\n".join(text.ljust(20_000, ".") for text in texts))
    else:
        jsonl_writer(folder)(f"{name}.jsonl", texts)
    if ending != "tokens":
        return {"dataset_path": str(folder)}
    shutil.rmtree(folder / "tokens", ignore_errors=True)
    prepare_tokens(TextSource(dataset_path=str(folder)), shakespeare_tokenizer_folder(), folder / "tokens")
    return {"dataset": "tokens", "dataset_path": str(folder / "tokens")}


TEXTS = [f"{number} " + "word " * 90 for number in range(40)]

CHANGES: dict[str, list[str]] = {
    "appended": [*TEXTS, "one more"],
    "cut off": TEXTS[:-1],
    "a document replaced": [*TEXTS[:20], TEXTS[20].replace("word", "verb"), *TEXTS[21:]],
    "two documents exchanged": [TEXTS[10], *TEXTS[1:10], TEXTS[0], *TEXTS[11:]],
}

REFUSED = (
    r"^The data have changed since the checkpoint was saved \(%s\), so some documents would be repeated and "
    r"others skipped: restore the files, accept that with --dataloader.accept_changed_data,"
)


@pytest.mark.parametrize("ending", ENDINGS)
def test_changed_data_are_refused_or_accepted(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, ending: str
) -> None:
    fields = write_data(tmp_path / "data", ending, TEXTS)
    loader = build(tokenizer, **fields)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = loader.state_dict()
    expected = list(itertools.islice(batches, 5))
    name = "tokens-00000.safetensors" if ending == "tokens" else f"a.{ending}"
    for texts in CHANGES.values():
        write_data(tmp_path / "data", ending, texts)
        with pytest.raises(UserError, match=REFUSED % name):
            build(tokenizer, **fields).load_state_dict(state)
        accepting = build(tokenizer, accept_changed_data=True, **fields)
        accepting.load_state_dict(state)
        assert len(list(itertools.islice(accepting, 20))) == 20
    # The previous data, in another folder.
    write_data(tmp_path / "data", ending, TEXTS)
    (tmp_path / "data").rename(tmp_path / "moved")
    moved = str(tmp_path / "moved/tokens") if ending == "tokens" else str(tmp_path / "moved")
    resumed = build(tokenizer, **{**fields, "dataset_path": moved})
    resumed.load_state_dict(state)
    assert equal(list(itertools.islice(resumed, 5)), expected)


@pytest.mark.parametrize(("ending", "more"), [("jsonl", "jsonl"), ("parquet", "parquet"), ("parquet", "txt")])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("added", [True, False])
def test_additional_file_is_a_change(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, ending: str, more: str, shuffle: bool, added: bool
) -> None:
    fields = {**write_data(tmp_path, ending, TEXTS), "shuffle": shuffle}
    if not added:
        write_data(tmp_path, more, TEXTS[:3], name="b")
    loader = build(tokenizer, **fields)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = loader.state_dict()
    if added:
        write_data(tmp_path, more, TEXTS[:3], name="b")
    else:
        (tmp_path / f"b.{more}").unlink()
    with pytest.raises(UserError, match=REFUSED % f"b.{more}"):
        build(tokenizer, **fields).load_state_dict(state)
    accepting = build(tokenizer, accept_changed_data=True, **fields)
    accepting.load_state_dict(state)
    assert len(list(itertools.islice(accepting, 20))) == 20
    # Another order or split is still refused.
    for other in ({"data_seed": 1, "shuffle": True}, {"validation_fraction": 0.5}):
        wrong = build(tokenizer, accept_changed_data=True, **{**fields, **other})
        wrong.load_state_dict(state)
        with pytest.raises(UserError, match="position in other data"):
            next(iter(wrong))


def test_changed_plays_are_refused(tokenizer: HuggingFaceTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    state = build(tokenizer).state_dict()
    build(tokenizer).load_state_dict(state)
    scenes = shakespeare.play_scenes()
    monkeypatch.setattr(document_stream, "play_scenes", lambda: scenes[:-1])
    with pytest.raises(UserError, match=REFUSED % "shakespeare"):
        build(tokenizer).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_state_without_fingerprints_resumes(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, workers: int
) -> None:
    fields = {**write_data(tmp_path, "jsonl", TEXTS), "num_workers": workers}
    loader = build(tokenizer, **fields)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    state.pop("files")
    expected = list(itertools.islice(batches, 5))
    resumed = build(tokenizer, **fields)
    resumed.load_state_dict(state)
    assert equal(list(itertools.islice(resumed, 5)), expected)


def test_tokenizer_that_adds_bos_also_ends_documents(tmp_path: Path) -> None:
    """As for OPT: BOS and EOS are the same token, and the tokenizer adds only BOS."""
    end = "<|endoftext|>"
    folder = make(tmp_path / "made", {"bos_token": end, "eos_token": end}, adds(f"{end} $A", **{end: 0}))
    fields = write_data(tmp_path / "data", "jsonl", [f"a {end} b", "word " * 400])
    loader = build(
        HuggingFaceTokenizer(tokenizer_path=str(folder)), shuffle=False, validation_fraction=0.0, **fields
    )
    inputs, labels = next(iter(loader))
    (*first, last) = loader.dataset._encode(f"a {end} b")
    # Its spelling in the text is not encoded as the token.
    assert first[0] == last == 0 and 0 not in first[1:]
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).decode(first[1:]) == f"a {end} b"
    assert inputs["input"][0, : len(first)].tolist() == first
    assert labels[0, len(first) - 1] == last and inputs["input"][0, len(first)] == 0
