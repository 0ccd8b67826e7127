"""Tensors of torch's checkpoints, one at a time, and nothing run that an index may contain."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from titan_async.checkpoint._dcp_internals import load_index
from titan_async.checkpoint.distributed import INDEX, SavedTensors, save_tensors
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
    with pytest.raises(UserError, match=r"cannot read matrix of .*step-1: __0_0.distcp may be damaged"):
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


def test_a_full_disk_is_the_disks_error(tmp_path: Path) -> None:
    program = f"""
import resource, torch
from titan_async.checkpoint.distributed import save_tensors
from titan_async.checkpoint.tensors import TensorInfo
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    infos = {{"a": TensorInfo((1000, 1000), torch.float32)}}
    save_tensors({str(tmp_path)!r}, infos, lambda key: torch.zeros(1000, 1000))
except OSError as error:
    print(error.strerror)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "File too large\n", done.stderr
