"""Saves that the disk does not take, and checkpoints that it has changed, in one process."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from titan_async.config.device import ensure_device
from titan_async.errors import UserError

ensure_device()

from titan_async.training.checkpoint import AsyncCheckpointer, complete_steps  # noqa: E402
from titan_async.training.data import TextDataLoader  # noqa: E402


class Counter:
    """The state of anything else."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Position(TextDataLoader):
    """A place in the data, of one of some data-parallel ranks."""

    def __init__(self, rank: int, degree: int) -> None:
        self.dp_world_size, self._rank_id = degree, f"dp_rank_{rank}"

    def state_dict(self) -> dict[str, Any]:
        return {self._rank_id: "{}", "world_size": self.dp_world_size, "num_workers": 0}


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def checkpointer(folder: Path, mode: str = "disabled") -> tuple[AsyncCheckpointer, nn.Linear]:
    model = nn.Linear(300, 300)
    config = AsyncCheckpointer.Config(enable=True, interval=1, async_mode=mode, keep_latest_k=0)
    made = config.build(
        dataloader=Counter(), model_parts=[model], optimizers=Counter(), lr_schedulers=Counter(),
        states={"others": Counter()}, sd_adapter=None, base_folder=str(folder),
    )  # fmt: skip
    return made, model


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_save_that_finds_no_room(tmp_path: Path, mode: str) -> None:
    made, _ = checkpointer(tmp_path, mode)
    made.save(1)
    made.maybe_wait_for_saving()
    folder = tmp_path / "checkpoint"
    said = rf"cannot save {folder}/step-2: File too large; make room there, and the same command goes on"
    with files_limited_to(100_000):
        if mode == "disabled":
            with pytest.raises(UserError, match=f"{said} from step 1$"):
                made.save(2)
        else:
            made.save(2)
            made.save_future.exception(30)
            with pytest.raises(UserError, match=f"{said} from step 1$"):
                made.maybe_wait_for_staging()
    assert [path.name for path in folder.iterdir()] == ["step-1"]
    assert complete_steps(folder) == [1]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    made, _ = checkpointer(tmp_path)
    (tmp_path / "checkpoint").touch()
    with pytest.raises(UserError, match="step-2: .*; make that folder writable, and the same command starts"):
        made.save(2)


def test_a_checkpoint_that_was_changed(tmp_path: Path) -> None:
    made, model = checkpointer(tmp_path)
    made.save(1)
    made.states["others"].count = 5
    made.save(2)
    weight = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    made.states["others"].count = 0
    assert made.load()
    assert torch.equal(model.weight, weight) and made.states["others"].count == 5

    folder = tmp_path / "checkpoint/step-2"
    file = folder / "__0_0.distcp"
    content = file.read_bytes()
    place = content.index(weight.numpy().tobytes()) + 100
    file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    damaged = f"the checkpoint {folder} is damaged: {{}}; remove that folder to go on from step 1$"
    with pytest.raises(UserError, match=damaged.format("__0_0.distcp is not what was saved")):
        made.load()
    file.unlink()
    with pytest.raises(UserError, match=damaged.format("__0_0.distcp is missing")):
        made.load()
    (folder / ".metadata").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=damaged.format(r"\.metadata is no index of a checkpoint .*")):
        made.load()
    assert made.load(1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_of_fewer_data_parallel_ranks(tmp_path: Path, rank: int) -> None:
    made, _ = checkpointer(tmp_path)
    made.states["dataloader"] = Position(0, 1)
    made.save(1)
    # Nothing was saved of the place of rank 1.
    made.states["dataloader"] = Position(rank, 2)
    with pytest.raises(UserError, match="data position is one of data-parallel degree 1, not 2: resume with"):
        made.load()
