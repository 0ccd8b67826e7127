"""A full disk loses a run's output, recording and measured times, but does not end the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from titan_async.errors import UserError
from titan_async.monitor.journal import Journal, journal_path
from titan_async.training.preflight.check import _check_folders
from titan_async.training.telemetry import stage_times

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")

PROGRAM = """
import sys
from titan_async.training import worker
from titan_async.training.telemetry.reporter import Reporter

def train(argv, until_end):
    reporter = Reporter(is_logging_rank=True, steps=3)
    for number in range(3):
        reporter.log("a line " * 100)
    return 0

worker._train = train
sys.exit(worker.main([]))
"""


def test_lines_to_a_full_disk(tmp_path: Path) -> None:
    # Python then flushes once more, at its end.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            env=environment,
        )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr == (
        "cannot write the lines of this run to its output: No space left on device; training continues\n"
    )


def test_a_journal_on_a_full_disk(tmp_path: Path) -> None:
    journal_path(tmp_path).symlink_to("/dev/full")
    journal = Journal(tmp_path)
    journal.write("log", text="a line")
    journal.close()
    journal.close()


def test_stage_times_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(
        dist, "all_gather_object", lambda everyone, mine, group=None: everyone.__setitem__(0, mine)
    )
    parallelism = SimpleNamespace(pipeline_parallel_microbatch_size=1, pipeline_parallel_schedule="1F1B")
    training = SimpleNamespace(local_batch_size=4, global_batch_size=-1, seq_len=8)
    config = SimpleNamespace(dump_folder=str(tmp_path / "run"), parallelism=parallelism, training=training)
    mesh = SimpleNamespace(get_group=lambda: None)
    dims = SimpleNamespace(get_mesh=lambda name: mesh, pp=1, dp_replicate=1, dp_shard=1, tp=1, ep=1)
    warnings: list[str] = []
    timer = stage_times.StageTimer([], torch.device("cpu"), warn=warnings.append)

    timer.write(config, dims)
    file = tmp_path / "run" / stage_times.MEASURED_FILE
    assert json.loads(file.read_text())["microbatches"] == 4 and not warnings

    file.with_name(f".{file.name}.partial").symlink_to("/dev/full")
    timer.write(config, dims)
    [warning] = warnings
    assert warning.startswith(f"cannot write the stages' times to {file}: ")


def test_a_checkpoint_folder_that_is_not_writable_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").touch()
    checkpoint = SimpleNamespace(
        enable=True, load_only=False, folder="checkpoint/mine", load_step=-1, initial_load_path=None
    )
    config = SimpleNamespace(dump_folder=str(tmp_path), checkpoint=checkpoint)
    folder = tmp_path / "checkpoint/mine"
    with pytest.raises(UserError, match=rf"^cannot write to the folder {folder}: .*--checkpoint\.folder$"):
        _check_folders(config)
    checkpoint.load_only = True
    _check_folders(config)
    checkpoint.load_only, checkpoint.folder = False, "elsewhere/mine"
    _check_folders(config)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
