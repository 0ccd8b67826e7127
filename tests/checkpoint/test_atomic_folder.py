"""A folder is created with all its files, or not at all."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from titan_async.checkpoint.atomic_folder import atomic_folder
from titan_async.errors import UserError


def fill(path: Path) -> None:
    with atomic_folder(path) as folder:
        assert folder.parent == path.parent and not any(folder.iterdir())
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("whole")
        assert not (path / "inner").exists()


def test_folder_appears_at_the_end(tmp_path: Path) -> None:
    fill(tmp_path / "deep" / "out")
    assert (tmp_path / "deep/out/inner/file").read_text() == "whole"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_empty_folder_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    fill(Path("out").absolute())
    assert (tmp_path / "out/inner/file").exists()


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_existing_path_is_kept(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if kind == "folder":
        out.mkdir()
        (out / "mine").write_text("mine")
    elif kind == "file":
        out.write_text("mine")
    else:
        out.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"out exists already; remove it, or name another folder"):
        fill(out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_folder_created_meanwhile_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match="exists already"), atomic_folder(out):  # noqa: PT012
        out.mkdir()
        (out / "mine").write_text("mine")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


def test_exception_removes_the_partial_folder(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "out") as folder:  # noqa: PT012
        (folder / "file").write_text("half")
        raise KeyboardInterrupt
    assert not any(tmp_path.iterdir())


def test_full_disk_is_a_user_error(tmp_path: Path) -> None:
    sentence = r"cannot write .*out: No space left on device; free space"
    with pytest.raises(UserError, match=sentence), atomic_folder(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not any(tmp_path.iterdir())
    with pytest.raises(OSError, match="else"), atomic_folder(tmp_path / "out"):
        raise OSError(errno.EIO, "else")


def test_unwritable_path_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*: (Not a directory|File exists)"):
        fill(tmp_path / "file" / "out")


WRITER = """
import sys
from titan_async.checkpoint.atomic_folder import atomic_folder
with atomic_folder(sys.argv[1]) as folder:
    (folder / "half").write_text("half")
    print("writing", flush=True)
    sys.stdin.read()  # until it is killed
"""


def test_concurrent_writer_is_refused_and_a_killed_one_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
        with pytest.raises(UserError, match="another process is writing out in "):
            fill(out)
        assert (tmp_path / ".out.partial" / "half").exists()
        os.kill(writer.pid, signal.SIGKILL)
    finally:
        writer.kill()
        writer.wait()
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    fill(out)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "inner", "out"]
