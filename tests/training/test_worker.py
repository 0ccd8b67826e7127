"""Output and environment of a training process."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from titan_async.errors import UserError
from titan_async.training import worker
from titan_async.training.telemetry.reporter import Reporter


@pytest.fixture
def loggers() -> Iterator[None]:
    libraries = ("torch.utils.cpp_extension", "torch.distributed.tensor._redistribute")
    there = [logging.getLogger(name) for name in (None, "titan_async", *libraries)]
    levels = [logger.level for logger in there]
    yield
    for logger, level in zip(there, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.parametrize(
    ("rank", "wanted", "own", "others"),
    [
        ("0", None, True, False),
        ("1", None, False, False),
        ("0", "ERROR", False, False),
        ("0", "info", True, True),
    ],
)
def test_warnings_of_the_project_are_printed_once(
    rank: str, wanted: str | None, own: bool, others: bool, loggers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("TITAN_ASYNC_LOG", raising=False)
    if wanted:
        monkeypatch.setenv("TITAN_ASYNC_LOG", wanted)
    worker._quiet()
    assert logging.getLogger("titan_async.data.empty_records").isEnabledFor(logging.WARNING) == own
    assert logging.getLogger("torchtitan").isEnabledFor(logging.WARNING) == others


@pytest.mark.parametrize(
    ("own", "found"),
    [
        ({}, "expandable_segments:True None"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64 None"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "None max_split_size_mb:64"),
    ],
)
def test_expandable_segments_unless_the_user_configures_the_allocator(
    own: dict[str, str], found: str
) -> None:
    program = """
import os, sys
from titan_async.training import worker

def train(*_):
    print(*map(os.environ.get, ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")), "torch" in sys.modules)
    return 0

worker._train = train
sys.exit(worker.main([]))
"""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment | own, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{found} False\n"  # before torch is imported, which reads it once


@pytest.mark.parametrize(
    ("enable", "load_only", "setting"),
    [(True, False, None), (False, False, "no-enable"), (True, True, "load_only")],
)
def test_a_seed_checkpoint_is_reported(
    enable: bool, load_only: bool, setting: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = []

    def save(curr_step: int, last_step: bool) -> bool:
        saved.append((curr_step, last_step))
        return enable and not load_only

    checkpoint = SimpleNamespace(enable=enable, load_only=load_only, folder="checkpoint")
    trainer = SimpleNamespace(
        config=SimpleNamespace(checkpoint=checkpoint, dump_folder=str(tmp_path)),
        checkpointer=SimpleNamespace(save=save),
        reporter=Reporter(is_logging_rank=True, steps=9),
    )
    if setting is None:
        worker._save_seed_checkpoint(trainer)
        assert capsys.readouterr().out == f"saved the seed checkpoint: {tmp_path}/checkpoint/step-0\n"
    else:
        with pytest.raises(UserError, match=f"saves nothing because of checkpoint.{setting}: remove one"):
            worker._save_seed_checkpoint(trainer)
    assert saved == [(0, True)]
