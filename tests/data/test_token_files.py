"""Token files: content, reproducibility, and user errors for damaged files."""

import json
import os
import pickle
import runpy
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.data.conftest import jsonl_writer
from tests.support import forks
from tests.support.selection import slow
from tests.support.waiting import has_ended, until
from titan_async.data import (
    TextSource,
    TokenFiles,
    load_tokenizer,
    open_documents,
    prepare_tokens,
    shakespeare_tokenizer_folder,
)
from titan_async.data.prepare import estimate_documents
from titan_async.errors import UserError

TOOL = Path(__file__).parents[2] / "tools" / "prepare_data.py"
TOKENIZER = shakespeare_tokenizer_folder()
SHARD = 15_000
DOCUMENTS = 1200


def text_files(folder: Path) -> TextSource:
    for file in range(3):
        texts = [
            f"{file}-{index} " + "what light through yonder window " * (index % 40) for index in range(400)
        ]
        jsonl_writer(folder)(f"{file}.jsonl", texts)
    return TextSource(dataset_path=str(folder))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TextSource:
    return text_files(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def made(source: TextSource, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of about 15000 tokens each."""
    folder = tmp_path_factory.mktemp("made")
    prepare_tokens(source, TOKENIZER, folder, shard_tokens=SHARD)
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != ".lock"}


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in this process; returns its status, stdout and stderr."""
    main = runpy.run_path(str(TOOL))["main"]

    def run(*arguments: object) -> tuple[int, str, str]:
        return (main([*map(str, arguments)]), *capsys.readouterr())

    return run


def test_files_contain_the_documents_in_order(source: TextSource, made: Path) -> None:
    files = TokenFiles(made)
    texts = list(
        open_documents(TextSource(dataset_path=source.dataset_path, shuffle=False, validation_fraction=0))
    )
    tokenizer = load_tokenizer(TOKENIZER)
    read: list[str] = []
    for number in range(len(files.index.shards)):
        tokens, ends = files.map(number)
        assert tokens.dtype == np.uint16
        for document in np.split(tokens, ends[:-1]):
            assert document[0] == document[-1] == 0
            read.append(tokenizer.decode(document[1:-1].tolist()))
    assert read == texts
    assert len(files.index.shards) > 4
    index = files.index
    assert (index.documents, index.vocab_size, index.bos_id, index.eos_id) == (DOCUMENTS, 2048, 0, 0)
    assert index.tokens == sum(shard.tokens for shard in index.shards)
    assert files.first_documents[-1] == DOCUMENTS


def test_files_do_not_depend_on_the_number_of_processes(
    source: TextSource, made: Path, tmp_path: Path
) -> None:
    prepare_tokens(source, TOKENIZER, tmp_path, shard_tokens=SHARD, processes=3)
    assert contents(tmp_path) == contents(made)


def children_of(process: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, _, rest = status.read_text().partition(" ")
            parent = int(rest.rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        if parent == process:
            found += [int(number), *children_of(int(number))]
    return found


STOPPED_TOOL = """
import runpy, signal, sys
from titan_async.data import prepare
write = prepare.write_json
def write_and_stop(file, value):
    write(file, value)
    signal.pause()
prepare.write_json = write_and_stop
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""The tool, but its first process stops after it has recorded the first complete file."""


def test_resuming_after_a_kill_gives_the_same_files(source: TextSource, made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    arguments = (folder, "--tokenizer", TOKENIZER, "--dataset_path", source.dataset_path)
    options = ("--shard_tokens", SHARD, "--processes", 2)
    process = forks.Forked([sys.executable, "-c", STOPPED_TOOL, TOOL, *arguments, *options])
    progress = folder / "progress.json"
    try:
        until(lambda: progress.exists() or process.poll() is not None, "nothing is written")
        assert process.poll() is None
        workers = children_of(process.pid)
    finally:
        process.kill()
        process.wait()
    assert not (folder / "index.json").exists()
    with pytest.raises(UserError, match=r"incomplete: run tools/prepare_data.py again"):
        TokenFiles(folder)
    assert len(workers) >= 2
    until(lambda: all(map(has_ended, workers)), "workers outlive a killed parent")
    # A process can also be killed before it records a file, or while it writes one.
    (folder / ".tokens-00002.safetensors.partial").write_bytes(b"half")
    kept = [shard["name"] for shard in json.loads(progress.read_text())["shards"]]
    times = {name: (folder / name).stat().st_mtime_ns for name in kept}
    prepare_tokens(source, TOKENIZER, folder, shard_tokens=SHARD)
    assert contents(folder) == contents(made)
    assert times == {name: (folder / name).stat().st_mtime_ns for name in kept}


@pytest.mark.parametrize("stop", [1, 2, slow(3), slow(4)])
def test_resumes_after_any_file(
    source: TextSource, made: Path, tmp_path: Path, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from titan_async.data import prepare

    write, written = prepare.write_json, []

    def write_and_die(file: Path, value: object) -> None:
        written.append(file.name)
        # Odd cases fail before the file is recorded, even ones after it.
        if len(written) == stop and stop % 2:
            raise KeyboardInterrupt
        write(file, value)
        if len(written) == stop:
            raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "write_json", write_and_die)
    with pytest.raises(KeyboardInterrupt):
        prepare_tokens(source, TOKENIZER, tmp_path, shard_tokens=SHARD)
    monkeypatch.setattr(prepare, "write_json", write)
    counts: list[int] = []
    prepare_tokens(
        source,
        TOKENIZER,
        tmp_path,
        shard_tokens=SHARD,
        on_progress=lambda documents, _: counts.append(documents),
    )
    assert contents(tmp_path) == contents(made)
    assert (counts[0] == 0) == (stop == 1)
    assert counts[-1] == DOCUMENTS


def test_finished_folder_is_unchanged(source: TextSource, copy: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in copy.iterdir() if file.name != ".lock"}
    prepare_tokens(source, TOKENIZER, copy, shard_tokens=SHARD)
    assert before == {file: file.stat().st_mtime_ns for file in before}


def test_files_of_other_settings_are_refused(source: TextSource, copy: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"whose source is '3 files .*, not 'shakespeare.*name another folder"
    ):
        prepare_tokens(TextSource(), TOKENIZER, copy)
    shutil.copytree(TOKENIZER, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text() + " ")
    with pytest.raises(UserError, match="whose tokenizer_sha256 is"):
        prepare_tokens(source, tmp_path / "other", copy)


def test_concurrent_writers_are_refused(source: TextSource, tmp_path: Path) -> None:
    def second(documents: int, tokens: int) -> None:
        with pytest.raises(UserError, match="Another process is writing"):
            prepare_tokens(source, TOKENIZER, tmp_path)

    prepare_tokens(source, TOKENIZER, tmp_path, on_progress=second)


def test_large_vocabulary_needs_four_bytes(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "a").mkdir()
    vocabulary = {f"w{index}": index for index in range(70_000)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "a" / "tokenizer.json"))
    jsonl_writer(tmp_path / "text")("a.jsonl", ["w69999 w65536", "w1"])
    index = prepare_tokens(TextSource(dataset_path=str(tmp_path / "text")), tmp_path / "a", tmp_path / "made")
    assert (index.dtype, index.vocab_size, index.bos_id, index.eos_id) == ("U32", 70_000, None, None)
    tokens, ends = TokenFiles(tmp_path / "made").map(0)
    assert (tokens.tolist(), ends.tolist()) == ([69999, 65536, 1], [2, 3])


def flip(file: Path, offset: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        byte = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte[0] ^ 0x10]))


def test_verify_detects_flipped_bits(copy: Path, tool: Callable[..., tuple[int, str, str]]) -> None:
    for offset in (20, 500, 9000, -1):
        flip(copy / "tokens-00001.safetensors", offset)
        with pytest.raises(UserError, match=r"SHA-256 of tokens-00001.safetensors does not match the index"):
            TokenFiles(copy).verify()
        flip(copy / "tokens-00001.safetensors", offset)
    TokenFiles(copy).verify()
    flip(copy / "tokens-00000.safetensors", 700)
    flip(copy / "tokens-00002.safetensors", 700)
    status, _, said = tool(copy, "--verify")
    assert status == 2
    assert "SHA-256 of tokens-00000.safetensors, tokens-00002.safetensors does not match" in said


def edit(name: str, change: Callable[[dict], object]) -> Callable[[Path], object]:
    def edit_index(folder: Path) -> None:
        index = json.loads((folder / name).read_text())
        change(index)
        (folder / name).write_text(json.dumps(index))

    return edit_index


class Bomb:
    def __reduce__(self) -> tuple:
        return os.kill, (os.getpid(), signal.SIGKILL)


SECOND = "tokens-00001.safetensors"


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (lambda folder: (folder / SECOND).unlink(), f"{SECOND} is missing: copy the folder again"),
        (lambda folder: os.truncate(folder / SECOND, 1000), f"{SECOND} has 1000 bytes instead of"),
        (lambda folder: shutil.rmtree(folder), "has no token files: create them"),
        (lambda folder: (folder / "index.json").unlink(), "has no token files: create them"),
        (lambda folder: (folder / "index.json").write_text("{"), "index.json can't be read"),
        (lambda folder: (folder / "index.json").write_text("[]"), "is not an index of token files"),
        (edit("index.json", lambda index: index.pop("shards")), "is not an index of token files"),
        (edit("index.json", lambda index: index.update(format="x 2")), "have the format 'x 2', not"),
        (
            edit("index.json", lambda index: index["shards"][0].update(name="../../etc/passwd")),
            "'../../etc/passwd' is not the name of a token file",
        ),
        (lambda folder: shutil.copy(folder / SECOND, folder / "index.json"), "index.json can't be read"),
        (lambda folder: (folder / "index.json").write_bytes(pickle.dumps(Bomb())), "can't be read"),
    ],
)
def test_damage_detected_on_opening(copy: Path, damage: Callable, part: str) -> None:
    damage(copy)
    with pytest.raises(UserError) as caught:
        TokenFiles(copy)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def overwrite(content: bytes) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        with file.open("r+b") as opened:
            opened.write(content)

    return write


@pytest.mark.parametrize(
    "damage",
    [
        overwrite(b"\xff" * 8),
        overwrite(bytes(200)),
        overwrite(pickle.dumps(Bomb())),
        lambda file: flip(file, 30),
        lambda file: flip(file, 8 + 144 + 8 * 100 + 7),  # the highest byte of a document's end
    ],
)
def test_damage_detected_on_mapping(copy: Path, damage: Callable[[Path], None]) -> None:
    damage(copy / SECOND)
    files = TokenFiles(copy)
    files.map(0)
    with pytest.raises(UserError, match=rf"{SECOND} (can't be read|does not match the index)"):
        files.map(1)


def test_files_of_another_dtype_are_refused(copy: Path) -> None:
    edit("index.json", lambda index: index.update(dtype="U32"))(copy)
    with pytest.raises(UserError, match="does not match the index"):
        TokenFiles(copy).map(0)


def test_user_errors_of_prepare_tokens(source: TextSource, made: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contain no text: name the text"):
        prepare_tokens(TextSource(dataset="tokens", dataset_path=str(made)), TOKENIZER, tmp_path)
    with pytest.raises(UserError, match='contains token files, not text: set dataset to "tokens"'):
        open_documents(TextSource(dataset_path=str(made)))
    with pytest.raises(UserError, match="has no tokenizer.json"):
        prepare_tokens(source, tmp_path, tmp_path)
    with pytest.raises(UserError, match="processes is 0"):
        prepare_tokens(source, TOKENIZER, tmp_path, processes=0)
    (tmp_path / "a.txt").write_text(" ")
    with pytest.raises(UserError, match="has no document"):
        prepare_tokens(TextSource(dataset_path=str(tmp_path / "a.txt")), TOKENIZER, tmp_path / "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't be written to"):
        prepare_tokens(source, TOKENIZER, tmp_path / "file")


def test_command_line_of_prepare_data(tmp_path: Path, tool: Callable[..., tuple[int, str, str]]) -> None:
    jsonl_writer(tmp_path)("a.jsonl", ["To be or not to be"] * 10)
    made = tmp_path / "made"
    status, out, err = tool(
        made, "--tokenizer", TOKENIZER, "--dataset_path", tmp_path / "a.jsonl", "--processes", 1
    )
    assert (status, "tokens of 10 documents in 1 files" in out) == (0, True), err
    status, out, err = tool(made, "--verify")
    assert (status, "the SHA-256 of all 1 files is correct" in out) == (0, True), err
    status, out, err = tool(made, "--tokenizer", TOKENIZER, "--dataset_path", tmp_path / "nowhere")
    assert (status, out) == (2, "")
    assert err.strip().endswith("nowhere does not exist: set dataset_path to a file or folder of text.")
    with pytest.raises(SystemExit):
        tool(made)


def test_estimate_documents(source: TextSource, tmp_path: Path) -> None:
    assert estimate_documents(source) == DOCUMENTS
    assert estimate_documents(TextSource()) == 783
    (tmp_path / "a.txt").write_text("a line of text\n\n" * 10_000)
    documents = list(open_documents(TextSource(dataset_path=str(tmp_path), validation_fraction=0)))
    assert estimate_documents(TextSource(dataset_path=str(tmp_path))) == pytest.approx(len(documents), abs=1)
    (tmp_path / "b.jsonl.gz").write_bytes(b"")
    assert estimate_documents(TextSource(dataset_path=str(tmp_path))) is None
