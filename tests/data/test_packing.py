"""Packed sequences: the conventions of torchtitan's text dataset, and exact resumption."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from tests.data.conftest import equal
from titan_async.data import PackedDataset, Sample, TextSource, open_documents
from titan_async.errors import UserError


def encode(text: str) -> list[int]:
    return [0, *text.encode(), 0]


def pairs(samples: list[Sample]) -> list[tuple[int, int]]:
    return [pair for x, labels in samples for pair in zip(x["input"].tolist(), labels.tolist(), strict=True)]


def test_short_example(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"text": "cdefgh"}\n')
    source = TextSource(dataset_path=str(tmp_path), shuffle=False, validation_fraction=0)
    (first, first_labels), (second, second_labels) = PackedDataset(source, encode, seq_len=5)
    a, b, c, d, e, f, g, h = b"abcdefgh"
    assert first["input"].tolist() == [0, a, b, 0, c]
    assert first_labels.tolist() == [a, b, 0, c, d]
    assert first["positions"].tolist() == [0, 1, 2, 0, 1]
    assert second["input"].tolist() == [d, e, f, g, h]
    assert second_labels.tolist() == [e, f, g, h, 0]
    assert second["positions"].tolist() == [0, 1, 2, 3, 4]
    assert first["input"].dtype == first["positions"].dtype == first_labels.dtype == torch.int64


@pytest.mark.parametrize("seq_len", [1, 7, 64, 501])
def test_same_sequences_as_torchtitan(folder: Path, seq_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    text_datasets = pytest.importorskip("torchtitan.hf_datasets.text_datasets")

    class Tokenizer:
        def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
            assert add_bos
            assert add_eos
            return encode(text)

    source = TextSource(dataset_path=str(folder), shuffle=False, validation_fraction=0)
    theirs = datasets.Dataset.from_list([{"text": text} for text in open_documents(source)])
    entry = text_datasets.DatasetConfig(
        path="", loader=lambda path: theirs, sample_processor=lambda record: record["text"]
    )
    monkeypatch.setitem(text_datasets.DATASETS, "ours", entry)
    reference = text_datasets.HuggingFaceTextDataset("ours", None, Tokenizer(), seq_len=seq_len)
    samples = list(PackedDataset(source, encode, seq_len=seq_len))
    assert len(samples) > 3
    assert equal(samples, list(reference))


@pytest.mark.parametrize("plays", [False, True])
@pytest.mark.parametrize("infinite", [False, True])
@pytest.mark.parametrize("seq_len", [5, 100, 256])
def test_resumes_at_any_sequence(folder: Path, plays: bool, infinite: bool, seq_len: int) -> None:
    source = TextSource(dataset_path=None if plays else str(folder))

    def new() -> PackedDataset:
        return PackedDataset(source, encode, seq_len=seq_len, rank=1, world_size=2, infinite=infinite)

    dataset = new()
    states, samples = [], []
    for sample in itertools.islice(dataset, 150):
        samples.append(sample)
        states.append(json.dumps(dataset.state_dict()))
    for count in (0, 1, 2, 3, 9, 14, 40, 100, len(samples) - 2):
        if count >= len(samples):
            continue
        resumed = new()
        resumed.load_state_dict(json.loads(states[count]))
        rest = list(itertools.islice(resumed, len(samples) - count - 1))
        assert equal(rest, samples[count + 1 :]), count
        # A position loaded and saved again is the same.
        again = new()
        again.load_state_dict(json.loads(states[count]))
        assert json.dumps(again.state_dict()) == states[count]


def test_state_is_small_within_a_long_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 100_000}))
    dataset = PackedDataset(TextSource(dataset_path=str(tmp_path)), encode, seq_len=16, infinite=True)
    for _ in itertools.islice(dataset, 1000):
        pass
    assert len(json.dumps(dataset.state_dict())) < 400
    assert dataset.state_dict()["pairs_done"] == 16_000


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_infinite_dataset_divides_documents(folder: Path, world_size: int) -> None:
    source = TextSource(dataset_path=str(folder))
    whole = pairs(list(PackedDataset(source, encode, seq_len=1)))
    together: list[tuple[int, int]] = []
    for rank in range(world_size):
        dataset = PackedDataset(source, encode, seq_len=1, rank=rank, world_size=world_size, infinite=True)
        for sample in dataset:
            if dataset.state_dict()["documents"]["epoch"] == 1:
                break
            together += pairs([sample])
    assert sorted(together) == sorted(whole)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_finite_dataset_divides_sequences_equally(folder: Path, world_size: int) -> None:
    source = TextSource(dataset_path=str(folder))
    whole = list(PackedDataset(source, encode, seq_len=50))
    shares = [
        list(PackedDataset(source, encode, seq_len=50, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert {len(share) for share in shares} == {len(whole) // world_size}
    together = [sample for group in zip(*shares, strict=True) for sample in group]
    assert equal(together, whole[: len(together)])


def test_rest_of_an_epoch_is_carried_over(folder: Path) -> None:
    source = TextSource(dataset_path=str(folder))
    stream = open_documents(source)
    tokens = [encode(text) for _ in range(3) for text in stream]
    expected = [pair for document in tokens for pair in itertools.pairwise(document)]
    dataset = PackedDataset(source, encode, seq_len=33, infinite=True)
    samples = list(itertools.islice(dataset, len(expected) // 33))
    assert pairs(samples) == expected[: len(samples) * 33]


def test_finite_dataset_can_be_iterated_again(folder: Path) -> None:
    dataset = PackedDataset(TextSource(dataset_path=str(folder)), encode, seq_len=50)
    first, second = list(dataset), list(dataset)
    assert len(first) == len(second)
    assert not equal(first, second)


@pytest.mark.parametrize("infinite", [False, True])
def test_too_little_text(tmp_path: Path, infinite: bool) -> None:
    (tmp_path / "a.txt").write_text("x" * 62)
    source = TextSource(dataset_path=str(tmp_path))

    def first(seq_len: int, world_size: int = 1, **kwargs: int) -> Sample:
        dataset = PackedDataset(
            source, encode, seq_len=seq_len, world_size=world_size, rank=world_size - 1,
            infinite=infinite, **kwargs,
        )  # fmt: skip
        return next(iter(dataset))

    assert first(63)[0]["input"].shape == (63,)
    with pytest.raises(UserError, match="fewer than the 1 sequences of 64 tokens"):
        first(64)
    with pytest.raises(UserError, match="each of 2 data-parallel ranks"):
        first(63, world_size=2)


def test_fewer_sequences_than_a_batch(folder: Path) -> None:
    dataset = PackedDataset(
        TextSource(dataset_path=str(folder), split="validation"), encode, seq_len=64, min_samples=100
    )
    with pytest.raises(UserError, match="fewer than the 100 sequences"):
        list(dataset)


def test_position_in_other_data_is_refused(folder: Path) -> None:
    state = PackedDataset(TextSource(dataset_path=str(folder)), encode, seq_len=8).state_dict()
    with pytest.raises(UserError, match=r"position in other data .3 files .* than configured .shakespeare"):
        PackedDataset(TextSource(), encode, seq_len=8).load_state_dict(state)


def test_sequence_length_below_one() -> None:
    with pytest.raises(UserError, match=r"set training.seq_len to 1 or more"):
        PackedDataset(TextSource(), encode, seq_len=0)
