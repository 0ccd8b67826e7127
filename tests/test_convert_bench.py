"""The comparison of converters runs, and detects files that differ; its times are not tested."""

from pathlib import Path

import pytest
import torch
from convert import check_equal
from safetensors.torch import save_file

from tests.support.tools import measured


@pytest.mark.slow
def test_both_ways_write_the_same(tmp_path: Path) -> None:
    found = measured(tmp_path, "bench/convert.py", "--quick", "--folder", tmp_path)["convert"]
    assert (found["ranks"], found["tensors"], found["parameters"]) == (2, 225, 3_481_648)
    assert list(found["cases"]) == [
        "imports alone",
        "titan-async convert, float32",
        "torchtitan's way, float32",
        "titan-async import",
    ]
    assert all(runs[0]["seconds"] > 0 and runs[0]["peak"] > 10**8 for runs in found["cases"].values())
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_a_difference_is_found(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        (tmp_path / name).mkdir()
        save_file({"x": torch.tensor([value])}, tmp_path / name / "model.safetensors")
    assert check_equal(tmp_path / "a", tmp_path / "b") == 1
    with pytest.raises(SystemExit, match="x differs between"):
        check_equal(tmp_path / "a", tmp_path / "c")
    save_file({"y": torch.tensor([1.0])}, tmp_path / "c" / "model.safetensors")
    with pytest.raises(SystemExit, match="have different tensors"):
        check_equal(tmp_path / "a", tmp_path / "c")
