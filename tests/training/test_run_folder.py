"""Two runs in one folder: the second is refused, unless the first was killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.training import RECIPE
from titan_async.errors import UserError
from titan_async.monitor.processes import is_starting
from titan_async.training.process.run_folder import LOCK, locked, refuse_locked

HOLDER = """
import os, sys, time
from titan_async.training.process.run_folder import locked
with locked(sys.argv[1]):
    if os.fork() == 0:  # as a data loader's worker is
        os.close(1)
        time.sleep(60)
        os._exit(0)
    print("locked", flush=True)
    time.sleep(60)
"""


@contextmanager
def another_run(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has locked the folder, in a session with its forked child."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout.readline() == "locked\n"
    try:
        yield process
    finally:
        subprocess.run(["kill", "-KILL", "--", f"-{process.pid}"], check=True)
        process.communicate()


def test_another_run_is_refused_until_it_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with another_run(folder) as process:
        line = rf"another run is writing to {folder} \(process {process.pid} on .+\): wait until it ends, or"
        with pytest.raises(UserError, match=line):
            refuse_locked(folder)
        with pytest.raises(UserError, match=line), locked(folder):
            pass
        assert is_starting(folder)
        process.kill()
        process.wait()
        # Its child is still there.
        refuse_locked(folder)
        with locked(folder):
            pass


def test_a_folder_without_a_run_is_not_locked(tmp_path: Path) -> None:
    refuse_locked(tmp_path / "none")
    assert not (tmp_path / "none").exists() and not is_starting(tmp_path / "none")
    assert not is_starting(tmp_path)
    with locked(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK).is_file()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*file/\.lock: "), locked(tmp_path / "file"):
        pass


def test_a_launcher_announces_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds before rank 0 can, which has to import torch first."""
    from titan_async.cli import launch

    seen = []
    monkeypatch.setattr(launch, "launch", lambda *args, **kwargs: seen.append(is_starting(tmp_path)) or 0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which a launcher sets
    assert launch.train([str(RECIPE), "--dump_folder", str(tmp_path)]) == 0
    assert seen == [True] and not is_starting(tmp_path)
