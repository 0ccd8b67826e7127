"""Tensors of torch's checkpoints, read one at a time without running pickled code."""

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
from titan_async.checkpoint import TensorInfo
from titan_async.checkpoint._dcp_internals import (
    ChecksumReader,
    ChecksumWriter,
    CorruptCheckpointError,
    WeightsOnlyLoadPlanner,
    load_index,
)
from titan_async.checkpoint.dcp import INDEX, SavedTensors, save_tensors
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


def test_tensors_are_read(folder: Path) -> None:
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
    dcp.save({**state, **own}, storage_writer=ChecksumWriter(folder))


def test_sharded_tensors_are_read_unsharded(pools: Pools, tmp_path: Path) -> None:
    pools(4).run(4, save_sharded, str(tmp_path))
    saved = SavedTensors(tmp_path)
    expected = {key: value for key, (value, _) in SHARDED.items()}
    expected |= {f"stage{rank}": torch.full((3,), float(rank)) for rank in range(4)}
    assert saved.tensors.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(saved.read(key), value), key


def test_torch_loads_tensors_saved_one_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[np.ndarray]] = []

    def load(key: str) -> torch.Tensor:
        assert not any(reference() is not None for reference in alive[:-1]), "tensors pile up"
        # A NumPy array has weak references, which end with the last tensor that uses it.
        memory = TENSORS[key].view(torch.uint8).numpy().copy()
        alive.append(weakref.ref(memory))
        return torch.from_numpy(memory).view(TENSORS[key].dtype)

    infos = {key: info for key, info in INFOS.items() if info.shape and info.nbytes}
    save_tensors(tmp_path, infos, load)
    assert len(alive) == len(infos)
    loaded = {key: torch.empty_like(TENSORS[key]) for key in infos}
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert all(torch.equal(value, TENSORS[key]) for key, value in loaded.items())


def test_index_equals_that_of_torch(folder: Path) -> None:
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


def test_index_runs_no_code(folder: Path, tmp_path: Path) -> None:
    index = FileSystemReader(folder).read_metadata()
    index.planner_data = Hostile(tmp_path / "ran")
    (folder / INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match=r"was not loaded: it names (posix|os)\.mkdir, which no checkpoint"):
        SavedTensors(folder)
    assert not (tmp_path / "ran").exists()
    pickle.loads((folder / INDEX).read_bytes())
    assert (tmp_path / "ran").exists(), "the index was harmless"


@pytest.mark.parametrize("name", ["torch.load", "builtins.eval", "torch.distributed.checkpoint.metadata.os"])
def test_index_names_allowed_classes_only(name: str, folder: Path) -> None:
    module, _, word = name.rpartition(".")
    (folder / INDEX).write_bytes(f"c{module}\n{word}\n.".encode())
    with pytest.raises(UserError, match=f"it names {name}"):
        SavedTensors(folder)


def test_tensor_runs_no_code(folder: Path, tmp_path: Path) -> None:
    index = FileSystemReader(folder).read_metadata()
    [place] = [place for key, place in index.storage_data.items() if key.fqn == "matrix"]
    torch.save(Hostile(tmp_path / "ran"), folder / "hostile.distcp")
    place.relative_path, place.offset = "hostile.distcp", 0
    place.length = (folder / "hostile.distcp").stat().st_size
    (folder / INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match="may be damaged"):
        SavedTensors(folder).read("matrix")
    assert not (tmp_path / "ran").exists()


def test_files_outside_the_folder_are_refused(folder: Path) -> None:
    index = FileSystemReader(folder).read_metadata()
    for place in index.storage_data.values():
        place.relative_path = f"../{folder.name}/{place.relative_path}"
    (folder / INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match="outside of its folder"):
        SavedTensors(folder)


def test_missing_and_damaged_files_are_named(folder: Path, tmp_path: Path) -> None:
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
    with pytest.raises(UserError, match="lacks chunks of matrix"):
        SavedTensors(folder).read("matrix")

    (folder / INDEX).write_bytes(b"nonsense")
    with pytest.raises(UserError, match="is not the index of a checkpoint"):
        SavedTensors(folder)
    (folder / INDEX).unlink()
    with pytest.raises(UserError, match="is not a checkpoint, or is incomplete"):
        SavedTensors(folder)


def save_state(folder: Path) -> dict[str, Any]:
    """Writes a checkpoint with the types of a training state, and returns the state."""
    state = {
        "tensor": torch.arange(500.0),
        "values": {"lr": 0.1, "betas": (0.9, 0.95), "name": "Muon", "none": None},
        "generator": torch.get_rng_state(),
    }
    dcp.save(state, storage_writer=ChecksumWriter(folder))
    return state


def load_state(folder: Path) -> dict[str, Any]:
    state = {"tensor": torch.zeros(500), "values": dict.fromkeys(("lr", "betas", "name", "none"))}
    state["generator"] = torch.zeros_like(torch.get_rng_state())
    try:
        dcp.load(state, storage_reader=ChecksumReader(folder), planner=WeightsOnlyLoadPlanner())
    except CheckpointException as error:
        [(cause, _)] = error.failures.values()
        raise cause from None
    return state


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["values"] == other["values"] and all(
        torch.equal(one[key], other[key]) for key in ("tensor", "generator")
    )


def test_flipped_bit_of_data_is_detected(tmp_path: Path) -> None:
    state = save_state(tmp_path)
    assert equal(load_state(tmp_path), state)
    # torch's own reader ignores the checksum.
    assert FileSystemReader(tmp_path).read_metadata().storage_data.keys()
    file, generator = tmp_path / "__0_0.distcp", random.Random(0)
    content, detected = file.read_bytes(), 0
    for _ in range(100):
        flipped = bytearray(content)
        flipped[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        file.write_bytes(flipped)
        try:
            assert equal(load_state(tmp_path), state), "changed data was loaded"
        except CorruptCheckpointError:
            detected += 1
    assert detected > 30  # the others changed member names or padding


def test_flipped_bit_of_the_index_is_detected(tmp_path: Path) -> None:
    save_state(tmp_path)
    index, generator = tmp_path / INDEX, random.Random(0)
    content = index.read_bytes()
    for _ in range(300):
        flipped = bytearray(content)
        flipped[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        index.write_bytes(flipped)
        with pytest.raises(CorruptCheckpointError, match=r"\.metadata .*it is not what was saved"):
            ChecksumReader(tmp_path)


def test_value_runs_no_code(tmp_path: Path) -> None:
    dcp.save({"value": Hostile(tmp_path / "ran")}, storage_writer=ChecksumWriter(tmp_path / "step-1"))
    state: dict[str, Any] = {"value": None}
    with pytest.raises(CheckpointException, match="value holds an object that no checkpoint needs"):
        dcp.load(state, storage_reader=ChecksumReader(tmp_path / "step-1"), planner=WeightsOnlyLoadPlanner())
    assert not (tmp_path / "ran").exists()
    dcp.load(state, checkpoint_id=tmp_path / "step-1")
    assert (tmp_path / "ran").exists(), "the value was harmless"


def test_full_disk_is_an_os_error(tmp_path: Path) -> None:
    program = f"""
import resource, torch
from titan_async.checkpoint.dcp import save_tensors
from titan_async.checkpoint import TensorInfo
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    infos = {{"a": TensorInfo((1000, 1000), torch.float32)}}
    save_tensors({str(tmp_path)!r}, infos, lambda key: torch.zeros(1000, 1000))
except OSError as error:
    print(error.strerror)
"""
    done = forks.run([sys.executable, "-c", program])
    assert done.stdout == "File too large\n", done.stderr
