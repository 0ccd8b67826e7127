"""`titan-async calibrate`: the file that plans read, and user errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.planning.test_device_timing import SMALL
from tests.support.calibrations import CORES, H100, make_profile
from titan_async.cli import calibrate, main
from titan_async.planning import device_timing
from titan_async.planning.device_profile import calibrated_cluster, read_profile


def test_a_cpu_is_measured_and_plans_read_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(device_timing, "SIZES", {"cpu": SMALL})
    monkeypatch.setattr(device_timing, "_SAMPLE", 0)
    monkeypatch.setattr(device_timing, "time_messages", lambda: make_profile(CORES).link)
    file = tmp_path / "cpu.json"
    assert main.main(["calibrate", "--device", "cpu", "--out", str(file)]) == 0
    out, err = capsys.readouterr()
    profile = read_profile(file)
    assert f"one core of {profile.device.name}" in out and f"--calibration {file}" in out
    for words in (
        "float32: products",
        "bfloat16: attention",
        "memory: ",
        "times in the backward",
        "messages: 100 us",
    ):
        assert words in out
    assert len(err.splitlines()) == 4
    core = calibrated_cluster(profile, None, str(file)).accelerator
    assert core.product_share("float32", 64, 64, 64) > 0 and core.calibrated_on == profile.device.name


def test_a_gpu_is_the_default_if_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    asked = []

    def found(kind: str, tell: object) -> object:
        asked.append(kind)
        return make_profile(H100)

    monkeypatch.setattr(device_timing, "profile_device", found)
    monkeypatch.chdir(tmp_path)
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert main.main(["calibrate"]) == 0
    assert asked == ["cuda", "cpu"]
    assert read_profile(tmp_path / "calibration.json") == make_profile(H100)
    assert "NVIDIA H100 80GB HBM3, 132 SMs, 85 GB" in capsys.readouterr().out
    assert any("networks are not measured" in line for line in calibrate._lines(make_profile(H100)))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--device", "tpu"], "--device: invalid choice: 'tpu' (choose from"),
        (["--device", "cuda"], "--device is cuda, but torch finds no GPU"),
        (["here.json"], "takes only options, not here.json"),
        (["--out", "."], "--out is ., which is a folder"),
        (["--outt", "x"], "unknown flag --outt; did you mean --out?"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_measured(
    argv: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delattr(device_timing, "profile_device")
    assert main.main(["calibrate", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err


def test_a_file_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(device_timing, "profile_device", lambda kind, tell: make_profile(CORES))
    assert main.main(["calibrate", "--device", "cpu", "--out", "/dev/null/x.json"]) == 2
    assert "cannot write /dev/null/x.json" in capsys.readouterr().err
