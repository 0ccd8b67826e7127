"""SIGTERM, as schedulers send it: all ranks stop after the same step, save, and end with status 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.processes import WorkerPool
from tests.support.training import command, environment, processes_of, train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

FLAGS = ("--dump_folder", "run", "--training.steps", 12, "--metrics.log_freq", 1, "--validator.no-enable",
         "--lr_scheduler.warmup_steps", 3, "--checkpoint.last_save_model_only")  # fmt: skip
"""A run whose last checkpoint holds the model alone, which the one after SIGTERM must not."""


def agree(rank: int, group: object, asked: dict[int, tuple[int, str]], steps: int) -> list[bool]:
    """What `end_step` says in each step, with `asked` naming the step and the place of a rank's SIGTERM."""
    from titan_async.training.preemption import Preemption

    preemption = Preemption()
    preemption.listen()
    said = []
    for step in range(steps):
        for place in ("before", "within"):
            if asked.get(rank) == (step, place):
                signal.raise_signal(signal.SIGTERM)
            if place == "before":
                preemption.begin_step()
        said.append(preemption.end_step())
    return said


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("asked", "stop"),
    [
        ({}, None),
        ({0: (1, "before")}, 1),
        ({1: (1, "before")}, 1),
        # Too late for the exchange that is on its way; all learn of it in the next step.
        ({1: (1, "within")}, 2),
        ({0: (1, "within"), 1: (3, "before")}, 2),
        ({0: (1, "before"), 1: (1, "within")}, 1),
    ],
)
def test_all_ranks_stop_after_the_same_step(
    pool: WorkerPool, asked: dict[int, tuple[int, str]], stop: int | None
) -> None:
    expected = [stop is not None and step >= stop for step in range(4)]
    assert pool.run(2, agree, asked, 4) == [expected, expected]


def test_only_its_parent_ends_a_data_worker() -> None:
    program = (
        "import os, signal, subprocess, sys, time\n"
        "from titan_async.training.preemption import shield_data_worker\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    shield_data_worker(0)\n"
        "    while True: time.sleep(0.1)\n"
        "time.sleep(0.5)\n"
        "subprocess.run(['kill', '-TERM', str(child)], check=True)\n"
        "time.sleep(0.5)\n"
        "alive = os.waitpid(child, os.WNOHANG) == (0, 0)\n"
        "os.kill(child, signal.SIGTERM)\n"
        "print(alive, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment()
    )
    assert (done.stdout, done.stderr) == ("True 0\n", "")


def start(folder: Path, *flags: object, argv: list[str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        argv or command(*FLAGS, *flags),
        cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for_step(run: subprocess.Popen[str], number: int) -> None:
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith(f"step {number:>2}/"):
            return
    raise AssertionError(run.stderr and run.stderr.read())


def descendants(pid: int) -> list[int]:
    children = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [pid for child in children for pid in descendants(child)]


def stopped_at(out: str) -> int:
    (line,) = [line for line in out.splitlines() if line.startswith("SIGTERM")]
    before, after = "SIGTERM: saved step ", " of 12 in run/checkpoint; resume with the same command"
    assert line.startswith(before) and line.endswith(after)
    assert out.splitlines()[-1] == line
    return int(line.removeprefix(before).removesuffix(after))


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    file = folder / "weights.pt"
    dcp_to_torch_save(folder / f"run/checkpoint/step-{step}", file)
    state = torch.load(file, weights_only=False)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def assert_resumable(folder: Path, step: int) -> None:
    path = folder / f"run/checkpoint/step-{step}"
    keys = FileSystemReader(path).read_metadata().state_dict_metadata
    assert any(key.startswith("optimizer.") for key in keys)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert train(folder, *FLAGS).status == 0
    return weights(folder, 12)


def test_sigterm_to_the_launcher_saves_and_the_resumed_run_is_the_undisturbed_one(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    run = start(tmp_path)
    wait_for_step(run, 3)
    run.send_signal(signal.SIGTERM)
    run.send_signal(signal.SIGTERM)  # as `timeout` does, to its child and to its group
    out, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (0, "")
    step = stopped_at(out)
    assert 3 < step < 12
    assert_resumable(tmp_path, step)
    resumed = train(tmp_path, *FLAGS)
    assert (resumed.status, resumed.err) == (0, "")
    assert resumed.steps[0] == step + 1
    mine = weights(tmp_path, 12)
    assert mine.keys() == undisturbed.keys()
    for name, value in undisturbed.items():
        assert torch.equal(mine[name], value), name


def test_sigterm_to_every_process_of_a_job_step(tmp_path: Path) -> None:
    run = start(
        tmp_path, "--parallelism.pipeline_parallel_schedule", "1F1B", "--dataloader.num_workers", 1,
        "--checkpoint.async_mode", "async", "--checkpoint.interval", 2,
    )  # fmt: skip
    wait_for_step(run, 3)
    everyone = descendants(run.pid)
    assert len(everyone) >= 4, "two ranks, and a data worker for each"
    for pid in (run.pid, *everyone):
        os.kill(pid, signal.SIGTERM)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (0, "")
    assert_resumable(tmp_path, stopped_at(out))


def test_sigterm_to_torchrun(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", "localhost:0", "-m", "titan_async.training.worker",
            *command(*FLAGS, "--parallelism.pipeline_parallel_degree", 1)[4:]]  # fmt: skip
    run = start(tmp_path, argv=argv)
    wait_for_step(run, 3)
    run.send_signal(signal.SIGTERM)
    out, err = run.communicate(timeout=60)
    # torchrun's own status and traceback are about itself; a worker that did not end with 0 is named there.
    assert "exitcode" not in err
    assert_resumable(tmp_path, stopped_at(out))


def test_sigterm_without_checkpoints_stops_and_says_that_nothing_was_saved(tmp_path: Path) -> None:
    run = start(tmp_path, "--checkpoint.no-enable", "--training.steps", 500)
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith("step   3/"):
            break
    run.send_signal(signal.SIGTERM)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (143, "stopped by SIGTERM\n")
    assert out.splitlines()[-1].startswith("SIGTERM: stopped after step ")
    assert out.endswith(" of 500 without saving, because of checkpoint.no-enable\n")


def test_sigterm_before_the_first_step_ends_at_once(tmp_path: Path) -> None:
    run = start(tmp_path)
    deadline = time.monotonic() + 60
    while len(processes_of(run.pid)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1)
    sent = time.monotonic()
    run.send_signal(signal.SIGTERM)
    out, err = run.communicate(timeout=60)
    assert time.monotonic() - sent < 8
    assert (run.returncode, out, err) == (143, "", "stopped by SIGTERM\n")
    assert not (tmp_path / "run/checkpoint").exists()
