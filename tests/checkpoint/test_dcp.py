"""Tensors of torch's checkpoints, one at a time, and nothing run that an index may contain."""

from __future__ import annotations

import os
import pickle
import random
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

from tests.support import forks
from tests.support.processes import Pools
from titan_async.checkpoint._dcp_internals import load_index
from titan_async.checkpoint._dcp_io_internals import (
    CheckingReader,
    DamagedError,
    SealingWriter,
    ValueLoadPlanner,
)
from titan_async.checkpoint.dcp import INDEX, SavedTensors, save_tensors
from titan_async.checkpoint.tensors import TensorInfo
from titan_async.errors import UserError

TENSORS = {
    "matrix": torch.randn(40, 30),
    "other": torch.randn(4, 30),
    "experts": torch.randn(4, 3, 5).bfloat16(),
    "scalar": torch.tensor(3),
    "empty": torch.zeros(0, 4),
}
INFOS = {key: TensorInfo(tuple(value.shape), value.dtype) for key, value in TENSORS.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save({**TENSORS, "state": {"step": 3}}, checkpoint_id=tmp_path / "step-1")
    return tmp_path / "step-1"


def test_every_tensor_is_read_whole(folder: Path) -> None:
    saved = SavedTensors(folder)
    assert saved.tensors == INFOS
    for key, value in TENSORS.items():
        assert torch.equal(saved.read(key), value)
    with pytest.raises(KeyError):
        saved.read("state.step")


SHARDED = {
    "matrix": (torch.arange(35.0).view(7, 5), [Shard(0), Shard(1)]),
    "experts": (torch.arange(120.0).view(8, 5, 3).bfloat16(), [Shard(0), Shard(0)]),
    "norm": (torch.arange(5.0), [Replicate(), Shard(0)]),
}


def save_sharded(rank: int, group: object, folder: str) -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2))
    state = {key: distribute_tensor(value, mesh, places) for key, (value, places) in SHARDED.items()}
    own = {f"stage{rank}": torch.full((3,), float(rank))}
    dcp.save({**state, **own}, storage_writer=SealingWriter(folder))


def test_tensors_of_several_ranks_are_read_whole(pools: Pools, tmp_path: Path) -> None:
    pools(4).run(4, save_sharded, str(tmp_path))
    saved = SavedTensors(tmp_path)
    expected = {key: value for key, (value, _) in SHARDED.items()}
    expected |= {f"stage{rank}": torch.full((3,), float(rank)) for rank in range(4)}
    assert saved.tensors.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(saved.read(key), value), key


def test_torch_reads_what_is_written_one_tensor_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[np.ndarray]] = []

    def load(key: str) -> torch.Tensor:
        assert not any(reference() is not None for reference in alive[:-1]), "tensors pile up"
        # Memory that tells when no tensor has it any more.
        memory = TENSORS[key].view(torch.uint8).numpy().copy()
        alive.append(weakref.ref(memory))
        return torch.from_numpy(memory).view(TENSORS[key].dtype)

    infos = {key: info for key, info in INFOS.items() if info.shape and info.nbytes}
    save_tensors(tmp_path, infos, load)
    assert len(alive) == len(infos)
    loaded = {key: torch.empty_like(TENSORS[key]) for key in infos}
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert all(torch.equal(value, TENSORS[key]) for key, value in loaded.items())


def test_the_index_is_what_torch_reads(folder: Path) -> None:
    theirs = FileSystemReader(folder).read_metadata()
    ours = load_index(folder / INDEX)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.version == theirs.version


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.file),)


def test_an_index_runs_nothing(folder: Path, tmp_path: Path) -> None:
    index = FileSystemReader(folder).read_metadata()
    index.planner_data = Hostile(tmp_path / "ran")
    (folder / INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match=r"was not loaded: it names (posix|os)\.mkdir, which no checkpoint"):
        SavedTensors(folder)
    assert not (tmp_path / "ran").exists()
    pickle.loads((folder / INDEX).read_bytes())
    assert (tmp_path / "ran").exists(), "the index was harmless"


@pytest.mark.parametrize("name", ["torch.load", "builtins.eval", "torch.distributed.checkpoint.metadata.os"])
def test_an_index_names_nothing_else(name: str, folder: Path) -> None:
    module, _, word = name.rpartition(".")
    (folder / INDEX).write_bytes(f"c{module}\n{word}\n.".encode())
    with pytest.raises(UserError, match=f"it names {name}"):
        SavedTensors(folder)


def test_a_tensor_runs_nothing(folder: Path, tmp_path: Path) -> None:
    index = FileSystemReader(folder).read_metadata()
    [place] = [place for key, place in index.storage_data.items() if key.fqn == "matrix"]
    torch.save(Hostile(tmp_path / "ran"), folder / "hostile.distcp")
    place.relative_path, place.offset = "hostile.distcp", 0
    place.length = (folder / "hostile.distcp").stat().st_size
    (folder / INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match="may be damaged"):
        SavedTensors(folder).read("matrix")
    assert not (tmp_path / "ran").exists()


def test_files_outside_of_the_folder_are_not_read(folder: Path) -> None:
    index = FileSystemReader(folder).read_metadata()
    for place in index.storage_data.values():
        place.relative_path = f"../{folder.name}/{place.relative_path}"
    (folder / INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match="outside of its folder"):
        SavedTensors(folder)


def test_what_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    index = FileSystemReader(folder).read_metadata()
    saved = SavedTensors(folder)
    file = folder / "__0_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:100])
    with pytest.raises(
        UserError, match=r"cannot read matrix of .*step-1: __0_0.distcp is not what was saved"
    ):
        saved.read("matrix")
    file.unlink()
    with pytest.raises(UserError, match=r"cannot read matrix of .*: __0_0.distcp is missing"):
        saved.read("matrix")

    index.state_dict_metadata["matrix"].chunks.clear()
    (folder / INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match="lacks parts of matrix"):
        SavedTensors(folder).read("matrix")

    (folder / INDEX).write_bytes(b"nonsense")
    with pytest.raises(UserError, match="is no index of a checkpoint"):
        SavedTensors(folder)
    (folder / INDEX).unlink()
    with pytest.raises(UserError, match="is no checkpoint, or one that was cut off"):
        SavedTensors(folder)


def sealed(folder: Path) -> dict[str, Any]:
    """Writes a checkpoint with what training states hold, and returns that."""
    state = {
        "tensor": torch.arange(500.0),
        "values": {"lr": 0.1, "betas": (0.9, 0.95), "name": "Muon", "none": None},
        "generator": torch.get_rng_state(),
    }
    dcp.save(state, storage_writer=SealingWriter(folder))
    return state


def load_checked(folder: Path) -> dict[str, Any]:
    state = {"tensor": torch.zeros(500), "values": dict.fromkeys(("lr", "betas", "name", "none"))}
    state["generator"] = torch.zeros_like(torch.get_rng_state())
    try:
        dcp.load(state, storage_reader=CheckingReader(folder), planner=ValueLoadPlanner())
    except CheckpointException as error:
        [(cause, _)] = error.failures.values()
        raise cause from None
    return state


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["values"] == other["values"] and all(
        torch.equal(one[key], other[key]) for key in ("tensor", "generator")
    )


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    state = sealed(tmp_path)
    assert equal(load_checked(tmp_path), state)
    # torch's own reader takes no notice of the checksum.
    assert FileSystemReader(tmp_path).read_metadata().storage_data.keys()
    file, generator = tmp_path / "__0_0.distcp", random.Random(0)
    content, noticed = file.read_bytes(), 0
    for _ in range(100):
        flipped = bytearray(content)
        flipped[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        file.write_bytes(flipped)
        try:
            assert equal(load_checked(tmp_path), state), "a change was noticed only in what it has changed"
        except DamagedError:
            noticed += 1
    assert noticed > 30  # the others changed names of files in archives and what pads them


def test_a_flipped_bit_of_the_index_is_noticed(tmp_path: Path) -> None:
    sealed(tmp_path)
    index, generator = tmp_path / INDEX, random.Random(0)
    content = index.read_bytes()
    for _ in range(300):
        flipped = bytearray(content)
        flipped[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        index.write_bytes(flipped)
        with pytest.raises(DamagedError, match=r"\.metadata .*it is not what was saved"):
            CheckingReader(tmp_path)


def test_a_value_runs_nothing(tmp_path: Path) -> None:
    dcp.save({"value": Hostile(tmp_path / "ran")}, storage_writer=SealingWriter(tmp_path / "step-1"))
    state: dict[str, Any] = {"value": None}
    with pytest.raises(CheckpointException, match="value holds what no checkpoint needs"):
        dcp.load(state, storage_reader=CheckingReader(tmp_path / "step-1"), planner=ValueLoadPlanner())
    assert not (tmp_path / "ran").exists()
    dcp.load(state, checkpoint_id=tmp_path / "step-1")
    assert (tmp_path / "ran").exists(), "the value was harmless"


def test_a_full_disk_is_the_disks_error(tmp_path: Path) -> None:
    program = f"""
import resource, torch
from titan_async.checkpoint.dcp import save_tensors
from titan_async.checkpoint.tensors import TensorInfo
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    infos = {{"a": TensorInfo((1000, 1000), torch.float32)}}
    save_tensors({str(tmp_path)!r}, infos, lambda key: torch.zeros(1000, 1000))
except OSError as error:
    print(error.strerror)
"""
    done = forks.run([sys.executable, "-c", program])
    assert done.stdout == "File too large\n", done.stderr
