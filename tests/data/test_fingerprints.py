"""Fingerprints of files: the changes that they detect, and how much they read."""

from pathlib import Path

import pytest

from titan_async.data.fingerprints import changed_files, fingerprints_of_files

MIB = 2**20


def fingerprint(file: Path, content: bytes) -> str:
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    return fingerprints_of_files([file], [len(content)])[0]


@pytest.mark.parametrize("size", [1, 1000, MIB])
def test_fingerprint_covers_a_short_file(tmp_path: Path, size: int) -> None:
    content = bytes(size)
    same = fingerprint(tmp_path / "a", content)
    assert fingerprint(tmp_path / "elsewhere/a", content) == same
    others = {content + b"x", content[:-1], b""}
    others |= {content[:place] + b"x" + content[place + 1 :] for place in (0, size // 3, size // 2, size - 1)}
    assert same not in {fingerprint(tmp_path / "a", other) for other in others}


def test_fingerprint_covers_blocks_of_a_long_file(tmp_path: Path) -> None:
    content = bytes(40 * MIB)
    same = fingerprint(tmp_path / "a", content)
    places = [0, 2**16 - 1, len(content) - 2**16, len(content) - 1]
    others = [content[:place] + b"x" + content[place + 1 :] for place in places]
    others += [content + b"x", content[:-1], content[: 20 * MIB] + bytes([1]) * 3 * MIB + content[23 * MIB :]]
    assert same not in {fingerprint(tmp_path / "a", other) for other in others}


def test_fingerprint_reads_little_of_a_huge_file(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.truncate(2**40)  # a sparse file, which would take minutes to read
    assert fingerprints_of_files([tmp_path / "a"], [2**40])[0].endswith(" a")


def test_fingerprint_has_the_size_at_opening(tmp_path: Path) -> None:
    fingerprint(tmp_path / "a", b"grown")
    assert fingerprints_of_files([tmp_path / "a"], [3]) != fingerprints_of_files([tmp_path / "a"], [5])


def test_changed_files_are_named() -> None:
    saved = ["1 aa one", "2 bb two", "2 bb two", "3 cc a name with spaces"]
    assert changed_files(saved, saved) == []
    assert changed_files(saved, saved[:-1]) == ["a name with spaces"]
    assert changed_files(saved, ["1 ab one", *saved[1:], "4 dd four"]) == ["four", "one"]
    assert changed_files(saved, [saved[0], *saved[2:]]) == ["two"]
    assert changed_files(saved[:2], saved[1::-1]) == ["one", "two"]


def test_missing_file_does_not_raise(tmp_path: Path) -> None:
    there = fingerprint(tmp_path / "a", b"there")
    (tmp_path / "a").unlink()
    assert changed_files([there], fingerprints_of_files([tmp_path / "a"], [5])) == ["a"]
