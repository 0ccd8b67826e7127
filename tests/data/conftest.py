import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of 40 documents each, "f-d ..." for document d of file f, of uneven lengths."""
    write_jsonl = jsonl_writer(tmp_path)
    for file in range(3):
        write_jsonl(f"{file}.jsonl", [f"{file}-{index} " + "word " * (index % 7) for index in range(40)])
    return tmp_path


def jsonl_writer(folder: Path) -> Callable[[str, list[str]], Path]:
    def write(name: str, texts: list[str]) -> Path:
        path = folder / name
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return path

    return write
