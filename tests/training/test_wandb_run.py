"""A resumed run continues its Weights & Biases run: tested with a fake wandb module."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from titan_async.config.device import ensure_device

ensure_device()

from titan_async.training.telemetry.metrics import AsyncMetrics  # noqa: E402

pytestmark = pytest.mark.usefixtures("group_of_one")

VARIABLES = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_RESUME_FROM", "WANDB_FORK_FROM")


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, str | None]]:
    """The id of each run that was started or resumed, and its WANDB_RESUME."""
    begun: list[tuple[str | None, str | None]] = []

    def init(id: str | None = None, **options: Any) -> None:
        begun.append((id, os.environ.get("WANDB_RESUME")))

    fake = SimpleNamespace(init=init, run=None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return begun


def start(folder: Path, **options: Any) -> None:
    config = AsyncMetrics.Config(enable_wandb=True, **options)
    config.build(
        parallel_dims=SimpleNamespace(pp_enabled=False, world_size=1, pp=1),
        dump_folder=str(folder),
        config_dict={"checkpoint": {"enable": True, "folder": "checkpoint"}},
    )
    assert not any(name in os.environ for name in ("WANDB_RESUME", "WANDB_RESUME_FROM"))


def save(folder: Path) -> None:
    (folder / "checkpoint/step-5").mkdir(parents=True)
    (folder / "checkpoint/step-5/.metadata").touch()


@pytest.mark.parametrize("all_ranks", [False, True])
def test_a_resumed_run_keeps_its_id(begun: list, tmp_path: Path, all_ranks: bool) -> None:
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        start(folder, save_for_all_ranks=all_ranks)
    # Without a checkpoint training starts from scratch, and its steps would precede those of that run.
    start(folders[0], save_for_all_ranks=all_ranks)
    assert len({run for run, _ in begun}) == 3 and None not in dict(begun)
    for folder in folders:
        save(folder)
    for folder in (*folders, folders[0]):
        start(folder, save_for_all_ranks=all_ranks)
    assert [run for run, _ in begun[3:]] == [begun[2][0], begun[1][0], begun[2][0]]
    assert {resumes for _, resumes in begun} == {"allow"}


def test_environment_variables_of_the_user_take_precedence(
    begun: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    start(tmp_path)
    save(tmp_path)
    monkeypatch.delenv("WANDB_RUN_ID")
    start(tmp_path)  # resumes it
    monkeypatch.setenv("WANDB_FORK_FROM", "other?_step=3")
    start(tmp_path)
    assert begun == [("mine", None), ("mine", "allow"), (None, None)]


def test_a_rank_that_does_not_log_writes_nothing(
    begun: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AsyncMetrics.Config().build(
        parallel_dims=SimpleNamespace(pp_enabled=False, world_size=1, pp=1), dump_folder=str(tmp_path)
    )
    monkeypatch.setattr(dist, "get_rank", lambda: 7)
    start(tmp_path)
    assert begun == [] and list(tmp_path.iterdir()) == []
