"""Batches from token files have the same sequences as `PackedDataset`, and are exactly resumable."""

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.data.conftest import check_a_new_process_resumes, jsonl_writer
from titan_async.data import (
    DocumentEncoder,
    PackedDataset,
    Sample,
    TextSource,
    TokenBatches,
    TokenFiles,
    prepare_tokens,
    shakespeare_tokenizer_folder,
    token_batches,
)
from titan_async.data.token_files import FORMAT, TokenIndex, write_index, write_shard
from titan_async.errors import UserError

VOCABULARY = 2**16


def write_tokens(folder: Path, shards: list[list[list[int]]]) -> TextSource:
    """Token files of these documents."""
    folder.mkdir(exist_ok=True)
    written = tuple(
        write_shard(
            folder,
            number,
            np.concatenate([np.array(document, dtype=np.uint16) for document in documents]),
            np.cumsum([len(document) for document in documents]),
        )
        for number, documents in enumerate(shards)
    )
    index = TokenIndex(
        format=FORMAT,
        source="test",
        tokenizer_sha256="",
        vocab_size=VOCABULARY,
        bos_id=None,
        eos_id=None,
        dtype="U16",
        documents=sum(shard.documents for shard in written),
        tokens=sum(shard.tokens for shard in written),
        shards=written,
    )
    write_index(folder, index)
    return TextSource(dataset="tokens", dataset_path=str(folder), validation_fraction=0)


def some_shards(count: int = 20, documents: int = 8) -> list[list[list[int]]]:
    """Documents of 1 to 19 tokens, in which no two tokens are the same."""
    numbers = iter(range(VOCABULARY))
    lengths = np.random.default_rng(0).integers(1, 20, (count, documents))
    return [[list(itertools.islice(numbers, length)) for length in row] for row in lengths.tolist()]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TextSource:
    return write_tokens(tmp_path_factory.mktemp("tokens"), some_shards())


def replaced(source: TextSource, **fields: object) -> TextSource:
    values = {"dataset": "tokens", "dataset_path": source.dataset_path, "validation_fraction": 0}
    return TextSource(**(values | fields))  # type: ignore[arg-type]


def rows(batches: Iterator[Sample] | list[Sample]) -> list[tuple[list[int], list[int], list[int]]]:
    return [
        row
        for fields, labels in batches
        for row in zip(fields["input"].tolist(), fields["positions"].tolist(), labels.tolist(), strict=True)
    ]


def pairs(batches: Iterator[Sample] | list[Sample]) -> list[tuple[int, int]]:
    return [pair for row in rows(batches) for pair in zip(row[0], row[2], strict=True)]


def pairs_of(shards: list[list[list[int]]]) -> list[tuple[int, int]]:
    return [pair for documents in shards for document in documents for pair in itertools.pairwise(document)]


def naive(documents: list[list[int]], seq_len: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Packing, pair by pair."""
    stream = [
        (document[index], index, document[index + 1])
        for document in documents
        for index in range(len(document) - 1)
    ]
    packed = []
    for start in range(0, len(stream) - seq_len + 1, seq_len):
        sequence = stream[start : start + seq_len]
        positions: list[int] = []
        for _, index, _ in sequence:
            positions.append(0 if not positions or index == 0 else positions[-1] + 1)
        packed.append(([pair[0] for pair in sequence], positions, [pair[2] for pair in sequence]))
    return packed


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=4), min_size=1, max_size=11),
    seq_len=st.integers(1, 20),
    batch_size=st.integers(1, 4),
    infinite=st.booleans(),
)
def test_sequences_are_concatenated_pairs(
    tmp_path: Path, lengths: list[list[int]], seq_len: int, batch_size: int, infinite: bool
) -> None:
    numbers = iter(range(VOCABULARY))
    shards = [[list(itertools.islice(numbers, length)) for length in shard] for shard in lengths]
    source = replaced(write_tokens(tmp_path / "tokens", shards), shuffle=False)
    documents = [document for shard in shards for document in shard]
    expected = naive(documents * (3 if infinite else 1), seq_len)
    if not naive(documents, seq_len) or (not infinite and len(expected) < batch_size):
        with pytest.raises(UserError, match="has fewer than the"):
            next(iter(TokenBatches(source, seq_len=seq_len, batch_size=batch_size, infinite=infinite)))
        return
    batches = TokenBatches(source, seq_len=seq_len, batch_size=batch_size, infinite=infinite)
    count = len(expected) // batch_size
    assert rows(itertools.islice(batches, count)) == expected[: count * batch_size]
    if not infinite:
        assert len(list(TokenBatches(source, seq_len=seq_len, batch_size=batch_size))) == count


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 3)])
def test_same_sequences_as_from_the_text(tmp_path: Path, split: str, rank: int, world_size: int) -> None:
    encoder = DocumentEncoder(shakespeare_tokenizer_folder())
    texts = [f"{index} " + "what light through yonder window breaks " * (index % 30) for index in range(300)]
    path = jsonl_writer(tmp_path)("a.jsonl", texts)
    text = TextSource(dataset_path=str(path), split=split, shuffle=False, validation_fraction=0.2)
    prepare_tokens(
        TextSource(dataset_path=str(path)),
        shakespeare_tokenizer_folder(),
        tmp_path / "tokens",
        shard_tokens=2500,
    )
    fields = {"split": split, "shuffle": False, "validation_fraction": 0.2}
    tokens = TextSource(dataset="tokens", dataset_path=str(tmp_path / "tokens"), **fields)
    assert len(TokenFiles(tmp_path / "tokens").index.shards) > token_batches._WINDOW
    share = {"seq_len": 50, "rank": rank, "world_size": world_size}
    whole = PackedDataset(text, lambda document: encoder([document])[0].tolist(), **share)
    samples = [(fields["input"], fields["positions"], labels) for fields, labels in whole]
    batches = TokenBatches(tokens, batch_size=4, **share)
    mine = [
        row
        for fields, labels in batches
        for row in zip(fields["input"], fields["positions"], labels, strict=True)
    ]
    assert len(mine) == len(samples) // 4 * 4 > 30
    for row, sample in zip(mine, samples, strict=False):
        assert all(map(torch.equal, row, sample))
    assert mine[0][0].dtype == mine[0][1].dtype == mine[0][2].dtype == torch.int64


@pytest.mark.parametrize("infinite", [False, True])
@pytest.mark.parametrize(("seq_len", "batch_size"), [(1, 9), (7, 2), (64, 1), (300, 2)])
def test_resumes_at_any_batch(source: TextSource, infinite: bool, seq_len: int, batch_size: int) -> None:
    def new() -> TokenBatches:
        return TokenBatches(
            replaced(source), seq_len=seq_len, batch_size=batch_size, rank=1, world_size=2, infinite=infinite
        )

    dataset = new()
    states, read = [json.dumps(dataset.state_dict())], []
    for batch in itertools.islice(dataset, 1500 // (seq_len * batch_size) + 5):
        read.append(rows([batch]))
        states.append(json.dumps(dataset.state_dict()))
    if infinite:
        assert dataset.state_dict()["position"][0] > 0
    assert max(map(len, states)) < 200
    for count in range(0, len(states), max(1, len(states) // 12)):
        resumed = new()
        resumed.load_state_dict(json.loads(states[count]))
        assert json.dumps(resumed.state_dict()) == states[count]
        rest = [rows([batch]) for batch in itertools.islice(resumed, len(read) - count)]
        assert rest == read[count:], count


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_divide_the_documents(source: TextSource, world_size: int, shuffle: bool) -> None:
    shares = []
    for rank in range(world_size):
        share = {"rank": rank, "world_size": world_size, "infinite": True}
        dataset = TokenBatches(replaced(source, shuffle=shuffle), seq_len=1, batch_size=1, **share)
        shares.append([])
        for batch in dataset:
            if dataset.state_dict()["position"][0] == 1:
                break
            shares[-1] += pairs([batch])
    assert sorted(itertools.chain(*shares)) == sorted(pairs_of(some_shards()))
    beginnings = {document[0] for shard in some_shards() for document in shard}
    documents = [sum(first in beginnings for first, _ in share) for share in shares]
    assert max(documents) - min(documents) <= 3  # windows


def test_epochs_have_different_orders(tmp_path: Path) -> None:
    shards = some_shards(token_batches._WINDOW + 2, 3)
    source = write_tokens(tmp_path, shards)
    dataset = TokenBatches(source, seq_len=1, batch_size=1)
    first, second = pairs(dataset), pairs(dataset)
    assert first != second
    assert sorted(first) == sorted(second) == sorted(pairs_of(shards))
    assert pairs(TokenBatches(replaced(source, seed=1), seq_len=1, batch_size=1)) != first
    assert pairs(TokenBatches(source, seq_len=1, batch_size=1)) == first


def test_documents_of_several_files_are_shuffled_together(source: TextSource) -> None:
    tokens = [pair[0] for pair in pairs(TokenBatches(source, seq_len=1, batch_size=1))]
    lasts = np.cumsum([sum(map(len, shard)) for shard in some_shards()])
    files = np.searchsorted(lasts, tokens, side="right")
    changes = int((np.diff(files) != 0).sum())
    assert changes > 100
    assert len(set(files[: len(files) // 4].tolist())) == token_batches._WINDOW


def test_resuming_opens_one_window(source: TextSource, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = TokenBatches(source, seq_len=10, batch_size=2, infinite=True)
    for _ in itertools.islice(dataset, 50):
        pass
    state = dataset.state_dict()
    assert state["position"][1] > 0
    opened: Counter[int] = Counter()
    whole = TokenFiles.map
    monkeypatch.setattr(
        TokenFiles, "map", lambda self, number: opened.update([number]) or whole(self, number)
    )
    resumed = TokenBatches(source, seq_len=10, batch_size=2, infinite=True)
    resumed.load_state_dict(state)
    next(iter(resumed))
    assert opened.total() <= token_batches._WINDOW


def new_loader(path: str, rank: int, world_size: int, workers: int) -> StatefulDataLoader:
    source = TextSource(dataset="tokens", dataset_path=path)
    dataset = TokenBatches(source, seq_len=16, batch_size=2, rank=rank, world_size=world_size, infinite=True)
    return StatefulDataLoader(dataset, batch_size=None, num_workers=workers)


def test_token_batches_resume_in_a_new_process(source: TextSource, tmp_path: Path) -> None:
    shares = [(0, 1, 0), (1, 2, 2)]
    check_a_new_process_resumes("test_token_batches", new_loader, source.dataset_path, shares, tmp_path)


def test_position_in_other_token_files_is_refused(source: TextSource, tmp_path: Path) -> None:
    state = TokenBatches(source, seq_len=8, batch_size=1).state_dict()
    shards = some_shards()
    shards[0][0][0] += 1
    for other in (write_tokens(tmp_path, shards), replaced(source, seed=1), replaced(source, shuffle=False)):
        with pytest.raises(UserError, match="position in other data"):
            TokenBatches(other, seq_len=8, batch_size=1).load_state_dict(state)


@pytest.mark.parametrize("infinite", [True, False])
def test_position_beyond_shortened_data_continues_with_the_next_epoch(
    source: TextSource, tmp_path: Path, infinite: bool
) -> None:
    fields = {"seq_len": 4, "batch_size": 1, "infinite": infinite}
    long = TokenBatches(source, **fields)
    left = iter(long)
    while long.state_dict()["position"][1] == 0:  # to the end of the first eight files
        state = long.state_dict()
        next(left)
    short = TokenBatches(write_tokens(tmp_path, some_shards(9, 4)), accept_changed_data=True, **fields)
    short.load_state_dict(state)
    epoch, window, used = state["position"]
    assert (epoch, window) == (0, 0) and used > 8 * 4 * 4
    next(iter(short))
    assert short.state_dict()["position"] > [0, 1, 0]


def test_token_outside_the_vocabulary_is_a_user_error(tmp_path: Path) -> None:
    source = write_tokens(tmp_path, [[[1, 2, 3], [4, 5, 6]]])
    index = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps(index | {"vocab_size": 6}))
    with pytest.raises(UserError, match="contain the token 6, but the vocabulary has 6 entries"):
        list(TokenBatches(source, seq_len=4, batch_size=1))


def test_user_errors_of_token_batches(source: TextSource) -> None:
    with pytest.raises(UserError, match=r"set training.seq_len to 1 or more"):
        TokenBatches(source, seq_len=0, batch_size=1)
    with pytest.raises(UserError, match="set split to"):
        TokenBatches(replaced(source, split="test"), seq_len=1, batch_size=1)
    with pytest.raises(UserError, match="validation split is empty because validation_fraction is 0"):
        TokenBatches(replaced(source, split="validation"), seq_len=1, batch_size=1)
    with pytest.raises(UserError, match='"tokens" without a path'):
        TextSource(dataset="tokens")
    for infinite in (False, True):
        few = TokenBatches(source, seq_len=9000, batch_size=2, world_size=2, infinite=infinite)
        with pytest.raises(UserError, match="sequences of 9000 tokens that are needed for each of 2 data"):
            next(iter(few))


@pytest.mark.parametrize(("cut", "said"), [(True, r"has \d+ bytes instead of \d+"), (False, "is missing")])
def test_truncated_or_removed_file_is_a_user_error(tmp_path: Path, cut: bool, said: str) -> None:
    source = write_tokens(tmp_path, [[list(range(60_000))]])
    batches = iter(TokenBatches(source, seq_len=1000, batch_size=4, infinite=True))
    next(batches)
    file = tmp_path / "tokens-00000.safetensors"
    if cut:
        os.truncate(file, 10_000)
    else:
        file.unlink()
    with pytest.raises(UserError, match=rf"tokens-00000\.safetensors {said}: copy the folder again"):
        next(batches)
