"""Hub datasets, with a local folder in the layout of FineWeb-Edu instead of the hub."""

import functools
import io
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.data.conftest import check_a_new_process_resumes
from titan_async.data import PackedDataset, TextSource, document_stream, hub, open_documents, parquet
from titan_async.errors import UserError

README = """\
---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
---
"""
ROWS = {
    "data/CC-MAIN-2013-20/train-00000-of-00002.parquet": 120,
    "data/CC-MAIN-2013-20/train-00001-of-00002.parquet": 95,
    "data/CC-MAIN-2024-10/train-00000-of-00001.parquet": 101,
    "sample/10BT/000_00000.parquet": 40,
    "sample/10BT/001_00000.parquet": 60,
}
ROW_GROUP = 20
FINEWEB = TextSource(dataset="HuggingFaceFW/fineweb-edu", validation_fraction=0)
SAMPLE = TextSource(
    dataset="HuggingFaceFW/fineweb-edu", dataset_config="sample-10BT", validation_fraction=0, shuffle=False
)


def text_of(file: str, row: int) -> str:
    return f"{file} {row} " + "word " * (row % 7)


def documents_of(prefix: str) -> list[str]:
    return [
        text_of(file, row) for file, rows in ROWS.items() if file.startswith(prefix) for row in range(rows)
    ]


def write_fineweb(folder: Path) -> None:
    (folder / "README.md").write_text(README)
    for name, rows in ROWS.items():
        table = pyarrow.table(
            {
                "text": [text_of(name, row) for row in range(rows)],
                "id": [f"<urn:uuid:{row}>" for row in range(rows)],
                "dump": ["CC-MAIN"] * rows,
                "url": [f"https://example.org/{row}" for row in range(rows)],
                "file_path": ["s3://commoncrawl/x.warc.gz"] * rows,
                "language": ["en"] * rows,
                "language_score": [0.9] * rows,
                "token_count": list(range(rows)),
                "score": [3.1] * rows,
                "int_score": [3] * rows,
            }
        )
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(table, path, row_group_size=ROW_GROUP)


def stand_for_the_hub(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / ".cache"))

    @functools.cache
    def load(dataset: str, config: str | None, revision: str | None) -> datasets.DatasetBuilder:
        return datasets.load_dataset_builder(str(folder), config)

    patch.setattr(hub, "_load", load)


@pytest.fixture(scope="module")
def fineweb_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fineweb")
    write_fineweb(folder)
    return folder


@pytest.fixture
def fineweb(fineweb_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stand_for_the_hub(fineweb_folder, monkeypatch)
    monkeypatch.setattr(document_stream, "_SHUFFLE_BLOCK", 16)
    return fineweb_folder


def share(source: TextSource, rank: int, world_size: int, epoch: int = 0) -> list[str]:
    stream = open_documents(source, rank=rank, world_size=world_size)
    stream.load_state_dict({"epoch": epoch, "position": None})
    return list(stream)


def test_configuration_selects_files(fineweb: Path) -> None:
    assert share(SAMPLE, 0, 1) == documents_of("sample/")
    assert sorted(share(FINEWEB, 0, 1)) == sorted(documents_of("data/"))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 64, 400])
@pytest.mark.parametrize("epoch", [0, 1])
def test_ranks_read_every_document_once_in_similar_shares(fineweb: Path, world_size: int, epoch: int) -> None:
    shares = [share(FINEWEB, rank, world_size, epoch) for rank in range(world_size)]
    assert sorted(chain(*shares)) == sorted(documents_of("data/"))
    # The files have 120, 95 and 101 rows, and are counted as equal.
    assert max(map(len, shares)) <= 120 * 3 / world_size + 1


def test_rank_opens_its_own_files_only(fineweb: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def open_file(file: str) -> io.FileIO:
        opened.append(file)
        return io.FileIO(file)

    monkeypatch.setattr(parquet, "open_file", open_file)
    for rank in range(3):
        share(FINEWEB, rank, 3)
    assert len(opened) == len(set(opened)) == 3


def test_validation_split_does_not_depend_on_the_number_of_ranks(fineweb: Path) -> None:
    def split(name: str, world_size: int) -> list[str]:
        source = TextSource(dataset="owner/name", split=name, validation_fraction=0.2)
        return sorted(chain(*(share(source, rank, world_size) for rank in range(world_size))))

    assert split("validation", 1) == split("validation", 5)
    assert sorted(split("train", 5) + split("validation", 5)) == sorted(documents_of("data/"))
    assert 30 < len(split("validation", 1)) < 95


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2), (4, 5)])
def test_resumes_before_any_document(fineweb: Path, shuffle: bool, rank: int, world_size: int) -> None:
    source = TextSource(dataset="owner/name", shuffle=shuffle)
    stream = open_documents(source, rank=rank, world_size=world_size)
    read: list[str] = []
    states = [json.dumps(stream.state_dict())]
    for _ in range(2):
        for document in stream:
            read.append(document)
            states.append(json.dumps(stream.state_dict()))
    for count in range(0, len(states) - 1, 7):
        resumed = open_documents(source, rank=rank, world_size=world_size)
        resumed.load_state_dict(json.loads(states[count]))
        rest: list[str] = []
        while resumed.epoch < 2:
            rest += list(resumed)
        assert rest == read[count:]
    assert max(map(len, states)) < 60


def new_loader(folder: str | Path, rank: int, world_size: int, workers: int) -> StatefulDataLoader:
    stand_for_the_hub(Path(folder), pytest.MonkeyPatch())
    dataset = PackedDataset(
        TextSource(dataset="HuggingFaceFW/fineweb-edu"),
        lambda text: [0, *text.encode(), 0],
        seq_len=64,
        rank=rank,
        world_size=world_size,
        infinite=True,
    )
    return StatefulDataLoader(dataset, batch_size=4, num_workers=workers)


def test_resumes_in_a_new_process(fineweb: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the other process has blocks of the usual size
    monkeypatch.setattr(hub, "_load", hub._load)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", datasets.config.HF_DATASETS_CACHE)
    shares = [(0, 2, 0), (1, 2, 0), (3, 4, 2), (4, 5, 1)]
    check_a_new_process_resumes("test_hub", new_loader, fineweb, shares, tmp_path)


def test_resuming_reads_at_most_two_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 20_000
    table = pyarrow.table({"text": [f"{row} " + "words " * 50 for row in range(rows)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100, compression="none")
    read = Counter()

    class Counting(io.FileIO):
        def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
            count = super().readinto(buffer)
            read["bytes"] += count
            return count

        def read(self, size: int = -1) -> bytes:
            data = super().read(size)
            read["bytes"] += len(data)
            return data

    monkeypatch.setattr(parquet, "open_file", Counting)
    source = TextSource(dataset_path=str(tmp_path), validation_fraction=0, shuffle=False)
    stream = open_documents(source)
    stream.load_state_dict({"epoch": 0, "position": [0, rows - 150]})
    assert next(iter(stream)).startswith(f"{rows - 150} ")
    assert 0 < read["bytes"] < (tmp_path / "a.parquet").stat().st_size / 20


def test_local_copy_gives_the_same_documents(fineweb: Path) -> None:
    def local(split: str, world_size: int = 3) -> list[list[str]]:
        source = TextSource(dataset_path=str(fineweb / "data"), split=split, validation_fraction=0.1)
        return [share(source, rank, world_size) for rank in range(world_size)]

    shares = local("train")
    assert sorted(chain(*shares, *local("validation", 2))) == sorted(documents_of("data/"))
    assert max(map(len, shares)) <= 120
    assert len(list(chain(*local("validation")))) == pytest.approx(31.6, abs=3)


def test_packing_does_not_mix_documents(fineweb: Path) -> None:
    texts = documents_of("sample/")
    dataset = PackedDataset(SAMPLE, lambda text: [0, *text.encode(), 1], seq_len=100)
    pieces: list[bytes] = []
    for fields, labels in dataset:
        positions = fields["positions"].tolist()
        starts = [index for index, position in enumerate(positions) if position == 0]
        assert starts[0] == 0
        for start, end in itertools.pairwise([*starts, 100]):
            assert positions[start:end] == list(range(end - start))
            tokens = [*fields["input"][start:end].tolist(), int(labels[end - 1])]
            assert tokens[1:] == labels[start:end].tolist()
            assert 0 not in tokens[1:] and 1 not in tokens[:-1]
            pieces.append(bytes(token for token in tokens if token > 1))
    assert all(any(piece.decode() in text for text in texts) for piece in pieces)


class Flaky(io.FileIO):
    """A file whose connection breaks at certain reads, counted over all files."""

    reads = 0
    breaks: Callable[[int], bool] = staticmethod(lambda read: False)

    def read(self, size: int = -1) -> bytes:
        Flaky.reads += 1
        if Flaky.breaks(Flaky.reads):
            raise ConnectionError("Connection reset by peer")
        return super().read(size)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    waited: list[int] = []
    monkeypatch.setattr(parquet, "open_file", Flaky)
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setattr(Flaky, "reads", 0)
    return waited


def test_short_disconnection_is_retried(
    fineweb: Path, waits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Flaky, "breaks", staticmethod(lambda read: read % 3 == 2))
    assert share(SAMPLE, 0, 1) == documents_of("sample/")
    assert len(waits) > 1
    assert set(waits) == {1}


def test_long_disconnection_is_a_user_error(
    fineweb: Path, waits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Flaky, "breaks", staticmethod(lambda read: read > 6))
    with pytest.raises(
        UserError, match=r"connection was lost while reading .*parquet \(Connection reset"
    ) as e:
        share(SAMPLE, 0, 1)
    assert "resumes from its last checkpoint" in str(e.value)
    assert waits == [1, 2, 4, 8, 15, 30]


def test_is_disconnection() -> None:
    import httpx

    def status(code: int) -> httpx.HTTPStatusError:
        request = httpx.Request("GET", "https://example.org")
        return httpx.HTTPStatusError("", request=request, response=httpx.Response(code, request=request))

    passing = [ConnectionError(), TimeoutError(), httpx.ReadTimeout(""), status(429), status(503)]
    lasting = [status(403), status(404), FileNotFoundError(), ValueError(), UserError("")]
    assert [parquet.is_disconnection(error) for error in passing + lasting] == [True] * 5 + [False] * 5


def test_user_errors_of_the_hub(fineweb: Path) -> None:
    def message(**fields: str) -> str:
        with pytest.raises(UserError) as caught:
            share(TextSource(dataset="owner/name", **fields), 0, 1)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no split 'test': set split to one of 'train'" in message(split="test")
    assert "no column 'body': set text_column to a column of text; its columns are 'text', 'id'" in message(
        text_column="body"
    )
    assert "holds int instead of text" in message(text_column="int_score")


def test_unknown_configuration(fineweb_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = datasets.load_dataset_builder
    monkeypatch.setattr(
        datasets, "load_dataset_builder", lambda name, config, revision: whole(str(fineweb_folder), config)
    )
    with pytest.raises(UserError, match=r"sample-1TB.*sample-10BT.*set dataset and dataset_config"):
        open_documents(TextSource(dataset="owner/name", dataset_config="sample-1TB"))


def test_identity_depends_on_the_configuration(fineweb: Path) -> None:
    names = [
        open_documents(TextSource(dataset="owner/name", dataset_config=config)).identity
        for config in ("default", "sample-10BT")
    ]
    assert names[0] != names[1]
    assert "owner/name/sample-10BT, 2 files" in names[1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_json_lines_are_streamed(tmp_path: Path, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for shard in range(3):
        records = [{"text": f"shard {shard} document {index}", "id": index} for index in range(50)]
        (tmp_path / f"{shard}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    stand_for_the_hub(tmp_path, monkeypatch)
    monkeypatch.setattr(document_stream, "_SHUFFLE_BLOCK", 16)
    train = TextSource(dataset="owner/name", validation_fraction=0.2)
    validation = TextSource(dataset="owner/name", validation_fraction=0.2, split="validation")
    shares = [share(train, rank, world_size) for rank in range(world_size)]
    apart = [share(validation, rank, world_size) for rank in range(world_size)]
    everything = [f"shard {shard} document {index}" for shard in range(3) for index in range(50)]
    assert sorted(chain(*shares, *apart)) == sorted(everything)
    assert 15 < sum(map(len, apart)) < 45

    stream = open_documents(train, rank=world_size - 1, world_size=world_size)
    assert len(list(zip(range(20), stream, strict=False))) == 20
    resumed = open_documents(train, rank=world_size - 1, world_size=world_size)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert list(resumed) == shares[-1][20:]
    assert resumed.epoch == 1
    assert len(list(resumed)) == len(shares[-1])
    with pytest.raises(UserError, match="no column 'body'"):
        share(TextSource(dataset="owner/name", text_column="body"), 0, 1)


@pytest.mark.parametrize(
    ("last_line", "error", "said"),
    [
        ('{"text": "ha', None, r"a file is damaged \(.*\); fix it, or set dataset_revision"),
        ("", ConnectionError("reset by peer"), r"the connection was lost \(reset by peer\); start again"),
    ],
)
def test_truncated_stream_is_a_user_error(
    tmp_path: Path, last_line: str, error: Exception | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [json.dumps({"text": f"document {index}"}) + "\n" for index in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (tmp_path / "b.jsonl").write_text("".join(lines) + last_line)
    stand_for_the_hub(tmp_path, monkeypatch)
    whole = datasets.IterableDataset.__iter__

    def read(self: datasets.IterableDataset) -> Iterator[object]:
        yield from itertools.islice(whole(self), 27)
        if error is not None:
            raise error

    monkeypatch.setattr(datasets.IterableDataset, "__iter__", read)
    source = TextSource(dataset="owner/name", validation_fraction=0, shuffle=False)
    with pytest.raises(
        UserError, match=f"^The dataset 'owner/name' could not be read to its end: {said}"
    ) as e:
        list(open_documents(source))
    assert str(e.value).endswith("the run resumes from its last checkpoint.") and "\n" not in str(e.value)
