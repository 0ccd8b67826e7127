"""Folders of safetensors: compatibility with the safetensors package in both directions."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from titan_async.checkpoint import TensorInfo
from titan_async.checkpoint.safetensors_files import INDEX, SafetensorsFolder, plan_shards, write_folder
from titan_async.errors import UserError

TENSORS = {
    "a": torch.randn(8, 4),
    "b": torch.randn(3).bfloat16(),
    "c": torch.arange(5),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 2),
    "views": torch.randn(6, 4).half().T,
    "yes": torch.tensor([True, False]),
}
INFOS = {name: TensorInfo(tuple(value.shape), value.dtype) for name, value in TENSORS.items()}


def test_safetensors_loads_a_single_file(tmp_path: Path) -> None:
    assert write_folder(tmp_path, INFOS, TENSORS.items(), limit=10**9) == ["model.safetensors"]
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert loaded[name].dtype == value.dtype and torch.equal(loaded[name], value)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # required by transformers


def test_shards_have_an_index(tmp_path: Path) -> None:
    files = write_folder(tmp_path, INFOS, TENSORS.items(), limit=60)
    shards = [name for name in files if name != INDEX]
    assert shards == [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    assert len(shards) > 2
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in TENSORS.values())
    assert index["weight_map"].keys() == TENSORS.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], TENSORS[name])


def test_shards_are_limited_in_bytes() -> None:
    infos = {
        name: TensorInfo((size,), torch.uint8)
        for name, size in zip("abcdef", (4, 6, 1, 20, 9, 1), strict=True)
    }
    assert plan_shards(infos, 10) == [["a", "b"], ["c"], ["d"], ["e", "f"]]


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in TENSORS.items():
            assert not any(reference() is not None for reference in alive), "tensors pile up"
            new = value.clone()
            alive.append(weakref.ref(new))
            yield name, new
            del new

    write_folder(tmp_path, INFOS, values(), limit=10**9)
    assert len(alive) == len(TENSORS)


def test_single_files_and_shards_are_read(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    save_file(
        {name: value.contiguous() for name, value in TENSORS.items()}, tmp_path / "one/model.safetensors"
    )
    (tmp_path / "several").mkdir()
    write_folder(tmp_path / "several", INFOS, TENSORS.items(), limit=100)
    for folder in ("one", "several"):
        opened = SafetensorsFolder(tmp_path / folder)
        assert opened.tensors == INFOS
        for name, value in TENSORS.items():
            assert torch.equal(opened.read(name), value)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    files = write_folder(tmp_path, INFOS, TENSORS.items(), limit=100)
    first, second = (tmp_path / name for name in files[:2])
    content = second.read_bytes()
    second.write_bytes(content[:40])
    with pytest.raises(UserError, match=f"{second.name} cannot be read .*; fetch it again"):
        SafetensorsFolder(tmp_path)
    second.write_bytes(first.read_bytes())
    with pytest.raises(UserError, match=f"{second.name} lacks \\w+, which .*{INDEX} lists"):
        SafetensorsFolder(tmp_path)
    second.unlink()
    with pytest.raises(UserError, match=f"{second.name}, which .*{INDEX} names, is missing"):
        SafetensorsFolder(tmp_path)
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(UserError, match="cannot be read; fetch it again"):
        SafetensorsFolder(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(UserError, match="has no model.safetensors"):
        SafetensorsFolder(tmp_path)
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="only pickled weights, which can run code"):
        SafetensorsFolder(tmp_path)


def test_index_names_files_of_its_folder_only(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "outside.safetensors")
    (tmp_path / "model" / INDEX).write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    with pytest.raises(UserError, match=r"names \.\./outside.safetensors, which is not a file in its folder"):
        SafetensorsFolder(tmp_path / "model")
