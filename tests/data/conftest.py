import hashlib
import itertools
import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support import forks
from titan_async.data import Sample


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


def equal(a: list[Sample], b: list[Sample]) -> bool:
    """Whether samples, or batches of them, are the same."""
    return len(a) == len(b) and all(
        torch.equal(x["input"], y["input"])
        and torch.equal(x["positions"], y["positions"])
        and torch.equal(labels, other)
        for (x, labels), (y, other) in zip(a, b, strict=True)
    )


def digests(batches: Iterator[Sample]) -> list[str]:
    """Of the next 40 batches."""
    return [
        hashlib.sha256(
            b"".join(rows.numpy().tobytes() for rows in (fields["input"], fields["positions"], labels))
        ).hexdigest()
        for fields, labels in itertools.islice(batches, 40)
    ]


RESUME = """
    import json, sys
    from tests.data import {module} as test
    from tests.data.conftest import digests

    for share, state in json.load(open(sys.argv[2])):
        loader = test.new_loader(sys.argv[1], *share)
        loader.load_state_dict(state)
        print(json.dumps(digests(iter(loader))))
"""


def check_a_new_process_resumes(
    module: str, new_loader: Callable, data: object, shares: list[tuple[int, int, int]], scratch: Path
) -> None:
    """Loads states after 11 batches into loaders of a new process, which must continue with the same batches.

    Args:
        module: in this folder, with `new_loader`.
        new_loader: makes a loader of `data` for a share: rank, ranks and workers.
        data: the first argument of `new_loader`.
        shares: the others.
        scratch: a folder.
    """
    states, expected = [], []
    for share in shares:
        batches = iter(loader := new_loader(data, *share))
        for _ in range(11):
            next(batches)
        states.append(loader.state_dict())
        expected.append(digests(batches))
        assert len(set(expected[-1])) == 40
    (scratch / "states").write_text(json.dumps(list(zip(shares, states, strict=True))))
    program = textwrap.dedent(RESUME).format(module=module)
    done = forks.run([sys.executable, "-c", program, data, scratch / "states"], cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected
