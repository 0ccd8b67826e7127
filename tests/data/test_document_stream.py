"""Document streams: all ranks together read each document once per epoch, and any position can be resumed."""

import json
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path

import pytest

from titan_async.data import TextSource, document_stream, open_documents
from titan_async.data.document_stream import DocumentStream
from titan_async.data.readers import is_validation
from titan_async.data.shakespeare import play_scenes


def one_epoch(source: TextSource, rank: int = 0, world_size: int = 1, epoch: int = 0) -> list[str]:
    stream = open_documents(source, rank=rank, world_size=world_size)
    stream.load_state_dict({"epoch": epoch, "position": None})
    return list(stream)


def all_sources(folder: Path) -> list[TextSource]:
    return [
        TextSource(),
        TextSource(split="validation", validation_fraction=0.3, shuffle=False),
        TextSource(dataset_path=str(folder), validation_fraction=0.1),
        TextSource(dataset_path=str(folder), validation_fraction=0.1, shuffle=False),
    ]


def test_format_of_the_plays() -> None:
    scenes = play_scenes()
    assert len({scene.split(", ACT")[0] for scene in scenes if ", ACT" in scene}) == 38
    macbeth = next(scene for scene in scenes if scene.startswith("Macbeth, ACT I, SCENE I."))
    assert macbeth.startswith(
        "Macbeth, ACT I, SCENE I. A desert place.\n\n[Thunder and lightning. Enter three Witches]\n\n"
        "First Witch:\nWhen shall we three meet again\nIn thunder, lightning, or in rain?\n"
    )
    assert not any(mark in scene for scene in scenes for mark in ("**", "\\", "#", "[["))


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.05, 0.1, 0.3, 0.5, 0.9])
def test_validation_documents_are_evenly_spread(fraction: float) -> None:
    chosen = [index for index in range(1000) if is_validation(index, fraction)]
    assert abs(len(chosen) - 1000 * fraction) <= 1
    if fraction:
        assert 0 not in chosen
        assert 1 in chosen
        assert max(b - a for a, b in pairwise(chosen)) <= 1 / fraction + 1


def test_splits_are_disjoint_and_cover_the_data(folder: Path) -> None:
    for path in (None, str(folder)):
        train = one_epoch(TextSource(dataset_path=path))
        validation = one_epoch(TextSource(dataset_path=path, split="validation"))
        everything = one_epoch(TextSource(dataset_path=path, validation_fraction=0))
        assert sorted(train + validation) == sorted(everything)
        assert 0.04 < len(validation) / len(everything) < 0.07


def test_validation_is_spread_over_plays_and_over_short_files(tmp_path: Path) -> None:
    plays = {scene.split(",")[0] for scene in one_epoch(TextSource(split="validation"))}
    assert len(plays) > 25
    for index in range(40):
        (tmp_path / f"{index:02}.txt").write_text(f"text {index}")
    source = TextSource(dataset_path=str(tmp_path), split="validation", shuffle=False)
    assert one_epoch(source) == ["text 1", "text 21"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("epoch", [0, 1])
def test_ranks_together_read_every_document_once(folder: Path, world_size: int, epoch: int) -> None:
    for source in all_sources(folder):
        shares = [one_epoch(source, rank, world_size, epoch) for rank in range(world_size)]
        assert sorted(chain(*shares)) == sorted(one_epoch(source))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_order_of_epochs_is_deterministic(folder: Path) -> None:
    for source in all_sources(folder):
        first, second = one_epoch(source), one_epoch(source, epoch=1)
        assert (first == second) == (not source.shuffle)
        stream = open_documents(source)
        assert list(stream) == first
        assert list(stream) == second


def test_another_seed_gives_another_order(folder: Path) -> None:
    orders = [one_epoch(TextSource(dataset_path=str(folder), seed=seed)) for seed in (0, 1)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


@pytest.mark.parametrize("block", [1, 7, 1024])
def test_resumes_before_any_document(folder: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_stream, "_SHUFFLE_BLOCK", block)
    for source in all_sources(folder)[1:]:
        stream = open_documents(source, rank=1, world_size=2)
        read: list[str] = []
        states = []
        for _ in range(2):
            states.append((len(read), json.dumps(stream.state_dict())))
            for document in stream:
                read.append(document)
                states.append((len(read), json.dumps(stream.state_dict())))
        for count, state in states[:: 5 if len(states) > 50 else 1]:
            resumed = open_documents(source, rank=1, world_size=2)
            resumed.load_state_dict(json.loads(state))
            rest: list[str] = []
            while resumed.epoch < 2:
                rest += list(resumed)
            assert rest == read[count:], (source, count)


def test_shuffle_blocks_cover_an_epoch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = one_epoch(TextSource(dataset_path=str(folder)))
    monkeypatch.setattr(document_stream, "_SHUFFLE_BLOCK", 7)
    assert sorted(one_epoch(TextSource(dataset_path=str(folder)))) == sorted(whole)


def test_identity_depends_on_data_and_order(folder: Path) -> None:
    def identity(**fields: object) -> str:
        return open_documents(TextSource(**fields)).identity  # type: ignore[arg-type]

    files = str(folder)
    identities = [
        identity(),
        identity(seed=1),
        identity(shuffle=False),
        identity(validation_fraction=0.1),
        identity(split="validation"),
        identity(dataset_path=files),
    ]
    (folder / "3.txt").write_text("more")
    identities.append(identity(dataset_path=files))
    assert len(set(identities)) == len(identities)


def test_reading_local_files_creates_no_files(folder: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    one_epoch(TextSource(dataset_path=str(folder)))
    assert sorted(tmp_path.rglob("*")) == before


def test_stream_with_a_custom_reader() -> None:
    class Reader:
        def read(self, epoch: int, position: int | None) -> Iterator[tuple[str, int]]:
            for index in range(position or 0, 3):
                yield f"{epoch}.{index}", index + 1

    stream = DocumentStream(Reader(), "mine")
    assert [*stream, *stream] == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]
