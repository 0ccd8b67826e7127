"""`tools/gpu/check.py` runs without a GPU, and reports failures. Code for CUDA is not run."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import forks

GPU = Path(__file__).parents[1] / "tools" / "gpu"


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    # The script sets both.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def test_the_recurrence_is_checked_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forks.run([sys.executable, "-c", ""])  # starts the fork server that all tests share
    path = tmp_path / "results.json"
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert status_of(monkeypatch, "--cpu", "--only", "recurrence", "gemm", "--json", str(path)) == 0
    verdicts = {row["check"]: row["verdict"] for row in json.loads(path.read_text())}
    assert verdicts.pop("gemm") == "not checked"
    assert len(verdicts) == 3 and set(verdicts.values()) == {"ok"}


@pytest.mark.slow
def test_all_checks_without_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    done = forks.run([sys.executable, GPU / "check.py", "--cpu", "--json", path], timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {row["check"]: row["verdict"] for row in json.loads(path.read_text())}
    assert all(name[:30] in done.stdout for name in verdicts)
    for name in ("clock", "gemm", "calibrate", "waits", "host in step", "host in Muon, error feedback"):
        assert verdicts[name] == "not checked"
    for name in ("Muon, plain", "utilization, Async2BW, receives late"):
        assert verdicts[name] == "noted"  # times are not tested
    assert verdicts["recurrence, overlapped pairs"] == verdicts["recurrence, overlapped pairs, FSDP2"] == "ok"
    assert verdicts["peak memory, 1F1B"] == verdicts["peak memory, Async2BW"] == "ok"


def status_of(monkeypatch: pytest.MonkeyPatch, *flags: str) -> object:
    monkeypatch.setattr(sys, "argv", ["check.py", *flags])
    with pytest.raises(SystemExit) as end:
        importlib.import_module("check").main()
    return end.value.code


def test_the_recurrence_is_distinguished_from_a_synchronous_run(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, ranks = importlib.import_module("_checks"), importlib.import_module("_ranks")
    place = checks.Place(0, 1, 0, 0)

    def synchronous(stages: int, data: Any) -> list[torch.Tensor]:
        model = torch.nn.Sequential(*ranks.layers(stages))
        optimizer = torch.optim.SGD(model.parameters(), lr=ranks.LR)
        for inputs, targets in data:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs[0]), targets[0]).backward()
            optimizer.step()
        return list(model.parameters())

    with checks.joined(place):
        right = ranks._error(place, 1, False)
        monkeypatch.setattr(ranks, "written_out", synchronous)
        wrong = ranks._error(place, 1, False)
    assert right < 1e-14 and wrong > 1e-6
    assert ranks.judge_error("", [right, wrong], place).verdict == "WRONG"
    assert ranks.judge_error("", [right, float("nan")], place).verdict == "WRONG"


def test_hidden_messages_are_measured_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, overlap = importlib.import_module("_checks"), importlib.import_module("_overlap")
    monkeypatch.setattr(overlap, "_SECONDS", 0.0)
    place = checks.Place(0, 1, 0, 0)
    ((name, (one_by_one, together, messages)),) = overlap.hidden(place)
    assert min(one_by_one, together, messages) > 0
    assert overlap.judge_hidden(name, [[1.8, 1.2, 0.6]], place).found.startswith("100%")


def fails(path: str, place: Any) -> Iterator[tuple[str, int]]:
    yield "before", place.rank
    if place.rank == 0:
        Path(path).touch()
        signal.pause()
    while not Path(path).exists():
        time.sleep(0.01)
    raise ValueError("rank 1 has\na reason")


def hangs(path: str, place: Any) -> Iterator[tuple[str, int]]:
    yield "before", place.rank
    signal.pause()


@pytest.mark.parametrize(
    ("measure", "seconds", "found"),
    [
        (fails, 200, ["rank 1: a reason"]),
        (hangs, 2, ["rank 0 did not end within 2 s", "rank 1 did not end within 2 s"]),
    ],
)
def test_ranks_that_fail_or_hang(
    measure: Any, seconds: int, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forks.run([sys.executable, "-c", ""])  # starts the fork server that all tests share
    checks = importlib.import_module("_checks")
    monkeypatch.setattr(checks, "_GRACE", 0.0 if measure is fails else 60.0)

    def judge(name: str, values: list[int], place: Any) -> Any:
        return checks.Row(name, "", str(values), "ok")

    ranks = functools.partial(measure, str(tmp_path / "there"))
    what = checks.Check("", ranks, judge, seconds, lambda gpus: 2, joined=True)
    first, *failures = checks.run("it", what, 0, seconds)
    assert (first.check, first.found, first.verdict) == ("before", "[0, 1]", "ok")
    assert sorted(row.found for row in failures) == found
    assert all(row.check == "it" and row.verdict == "WRONG" for row in failures)
    assert all(any(measure.__name__ in line for line in row.log) for row in failures)


def test_verdicts() -> None:
    kernels, ranks, speed, overlap, checks = (
        importlib.import_module(name) for name in ("_kernels", "_ranks", "_speed", "_overlap", "_checks")
    )
    gpus, gpu = checks.Place(0, 4, 4, 0), checks.Place(0, 4, 1, 0)
    losses = {"2": 0.01, "4": 0.03, "8": 0.07, "16": 0.13, "32": 0.26, "48": 0.4}
    for judge, value, verdict in [
        (kernels.judge_gemm, [132, 700.0, losses], "ok"),
        (kernels.judge_gemm, [132, 700.0, losses | {"4": 0.06}], "differs"),
        (kernels.judge_gemm, [28, 70.0, losses | {"4": 0.2}], "noted"),
        (kernels.judge_gemm, "no kernel that waits: none", "not checked"),
        (kernels.judge_calibrate, [1.3, 1.1, 700.0, 400.0, 3.0, 2.7], "ok"),
        (kernels.judge_calibrate, [1.6, 1.1, 700.0, 400.0, 3.0, 2.7], "differs"),
        (kernels.judge_calibrate, "ImportError: no pydantic", "not checked"),
        (kernels.judge_call, [True, True, 4.0], "ok"),
        (kernels.judge_call, [False, True, 4.0], "differs"),
        (kernels.judge_call, [None, True, 4.0], "noted"),
        (kernels.judge_clock, [3.0, 900.0, 1e-5, True], "ok"),
        (kernels.judge_clock, [300.0, 900.0, 1e-5, True], "WRONG"),
        (kernels.judge_clock, [3.0, 900.0, 1e-5, False], "WRONG"),
        (speed.judge_muon, [0.6, 0.01, None], "ok"),
        (speed.judge_muon, [1.2, 0.01, None], "differs"),
        (speed.judge_muon, [0.6, 0.5, None], "WRONG"),
        (speed.judge_muon, [None, None, "RuntimeError: no"], "WRONG"),
        (ranks.judge_host, [0.31, 0.3, {}], "ok"),
        (ranks.judge_host, [0.31, 0.05, {}], "WRONG"),
        (ranks.judge_host, [0.01, 0.01, {"muon.py:3": 1}], "WRONG"),
        (overlap.judge_hidden, [1.8, 1.25, 0.6], "ok"),
        (overlap.judge_hidden, [1.8, 1.4, 0.6], "differs"),
        (speed.judge_peak, [100, 104], "ok"),
        (speed.judge_peak, [100, 120], "WRONG"),
        (speed.judge_speed, [0.9, 1.0, 1.3, 4], "ok"),
        (speed.judge_speed, [0.9, 1.3, 1.0, 4], "WRONG"),
        (speed.judge_speed, [0.9, 1.3, 1.0, 16], "differs"),
    ]:
        assert judge("name", [value], gpus).verdict == verdict, (judge, value)
    assert kernels.judge_call("cuda.synchronize", [[True, False, 0.0]], gpu).verdict == "WRONG"
    assert speed.judge_speed("name", [[0.9, 1.3, 1.0, 4]], gpu).verdict == "noted"
    assert overlap.judge_hidden("host in step", [[0.31, 0.05, {}]], gpus).verdict == "WRONG"


@pytest.mark.parametrize(
    ("flags", "version", "says"),
    [
        ([], None, "torch finds no CUDA device; --cpu runs the checks that need none"),
        ([], "2.10.0", "torch 2.10.0 is too old: 2.11 or newer is needed"),
        (["--only", "speed", "gemm"], None, "--only speed: the checks are device, recurrence,"),
    ],
)
def test_errors_at_the_start_are_one_sentence(
    flags: list[str], version: str | None, says: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if version:
        monkeypatch.setattr(torch, "__version__", version)
    assert status_of(monkeypatch, *flags) == 2
    assert says in capsys.readouterr().err


def test_no_check_starts_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    script = importlib.import_module("check")
    monkeypatch.setattr(script, "SECONDS", 1)
    rows = list(script.rows_of(script.all_checks(), gpus=4))
    assert len(rows) == len(script.all_checks()) and {row.verdict for row in rows} == {"not checked"}


def test_names_of_torch_exist() -> None:
    """Tests do not run the code for CUDA."""
    names = set()
    for path in sorted(GPU.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and re.fullmatch(r"torch(\.\w+)+", ast.unparse(node)):
                names.add(ast.unparse(node))
    assert {"torch.cuda._sleep", "torch.cuda._compile_kernel", "torch.bfloat16"} < names
    assert [name for name in sorted(names) if not hasattr(*_last(name))] == []


def _last(name: str) -> tuple[Any, str]:
    """The object that a dotted name is looked up in, and its last part."""
    *path, last = name.split(".")[1:]
    return functools.reduce(getattr, path, torch), last


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA")
def test_the_kernel_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.cuda._utils import _nvrtc_compile

    monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda")
    source = importlib.import_module("_kernels")._SOURCE
    for capability in ("80", "90", "100"):
        binary, name = _nvrtc_compile(source, "wait_for", capability)
        assert name == "wait_for" and len(binary) > 1000
