"""After SIGTERM or Ctrl-C all ranks stop after the same step, save, and exit."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.forks import Forked
from tests.support.processes import Pools, WorkerPool
from tests.support.selection import slow
from tests.support.training import command, environment, processes_of, start, train
from tests.support.waiting import until
from titan_async.training.process.preemption import SAME_PRESS_SECONDS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

FLAGS = ("--training.steps", 500, "--lr_scheduler.total_steps", 500, "--lr_scheduler.warmup_steps", 3,
         "--metrics.log_freq", 1, "--validator.no-enable", "--checkpoint.last_save_model_only")  # fmt: skip
"""A run that does not end before its signal, and whose last checkpoint would hold only the model."""

TERM, INT = signal.SIGTERM, signal.SIGINT
NAMES = {TERM: "SIGTERM", INT: "Ctrl-C"}
STOPPING = "stopping after this step and saving; press Ctrl-C again to stop at once"


def agree(
    rank: int, group: object, asked: dict[int, tuple[int, str, signal.Signals]], steps: int
) -> list[signal.Signals | None]:
    """The result of `end_step` in each step; `asked` has the step, place and number of a rank's signal."""
    from titan_async.training.process.preemption import Preemption

    preemption = Preemption()
    preemption.listen()
    preemption.listen_to_interrupts()
    requests = []
    for step in range(steps):
        for place in ("before", "within"):
            if rank in asked and asked[rank][:2] == (step, place):
                signal.raise_signal(asked[rank][2])
            if place == "before":
                preemption.begin_step()
        requests.append(preemption.end_step())
    return requests


@pytest.fixture(scope="module")
def pool(pools: Pools) -> WorkerPool:
    return pools(2)


@pytest.mark.parametrize(
    ("asked", "stop"),
    [
        ({}, [None, None, None, None]),
        ({0: (1, "before", TERM)}, [None, TERM, TERM, TERM]),
        ({1: (1, "before", INT)}, [None, INT, INT, INT]),
        # Too late for the pending all-reduce; the next step's includes it.
        ({1: (1, "within", TERM)}, [None, None, TERM, TERM]),
        ({0: (1, "within", INT), 1: (3, "before", INT)}, [None, None, INT, INT]),
        ({0: (1, "before", TERM), 1: (1, "within", TERM)}, [None, TERM, TERM, TERM]),
        ({0: (1, "before", INT), 1: (2, "before", TERM)}, [None, INT, INT, INT]),
        ({0: (1, "before", TERM), 1: (2, "before", INT)}, [None, TERM, INT, INT]),
    ],
)
def test_all_ranks_stop_after_the_same_step(
    pool: WorkerPool,
    asked: dict[int, tuple[int, str, signal.Signals]],
    stop: list[signal.Signals | None],
) -> None:
    assert pool.run(2, agree, asked, 4) == [stop, stop]


def ask_at_every_instruction(rank: int, group: object) -> list[signal.Signals | None]:
    """The result of a step that begins after SIGTERM, with SIGINT after each number of its instructions."""
    from titan_async.training.process.preemption import Preemption

    preemption = Preemption()
    preemption._launcher = "any"  # which prints the messages
    answers, count = [], 0

    def trace(frame: FrameType, event: str, arg: object) -> Callable:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        if event == "opcode" and count == len(answers):
            preemption._on_signal(INT, frame)
        return trace

    while count >= len(answers) - 1:
        preemption._received, count = {}, 0
        preemption._on_signal(TERM, None)
        sys.settrace(trace)
        try:
            preemption.begin_step()
        finally:
            sys.settrace(None)
        answers.append(preemption.end_step())
    return answers


def test_a_signal_may_come_at_any_instruction_of_a_step(pools: Pools) -> None:
    [answers] = pools(1).run(1, ask_at_every_instruction)
    assert set(answers) == {TERM, INT} and len(answers) > 20


def wait_until_timeout(rank: int, group: object, given_up: Path) -> str:
    from titan_async.training.process.preemption import Preemption

    preemption = Preemption()
    preemption.set_timeout(timedelta(seconds=1))
    if rank == 1:
        until(given_up.exists, "rank 0 waits forever")
        return ""
    preemption.begin_step()
    with pytest.raises(RuntimeError) as caught:
        preemption.end_step()
    given_up.touch()
    return str(caught.value)


def test_the_wait_for_a_rank_has_a_timeout(pool: WorkerPool, tmp_path: Path) -> None:
    error, _ = pool.run(2, wait_until_timeout, tmp_path / "given up")
    assert "Timed out waiting 1000ms" in error


@pytest.mark.parametrize("second", [INT, slow(TERM)])
def test_without_our_launcher_a_process_ends_at_its_second_signal(second: signal.Signals) -> None:
    program = (
        "import signal, sys, time\n"
        "import torch.distributed as dist\n"
        "from titan_async.training.process.preemption import Preemption\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "preemption = Preemption()\n"
        "preemption.listen()\n"
        "preemption.listen_to_interrupts()\n"
        "signal.raise_signal(signal.SIGINT)\n"
        "signal.raise_signal(signal.SIGINT)\n"  # the same press
        "time.sleep(0.4)\n"
        "preemption.begin_step()\n"
        "print(preemption.end_step().name, flush=True)\n"
        f"signal.raise_signal({int(second)})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, env=environment()
    )
    assert (done.returncode, done.stdout, done.stderr) == (-second, "SIGINT\n", f"{STOPPING}\n")


def test_only_the_parent_can_terminate_a_data_worker() -> None:
    program = (
        "import os, signal, subprocess, sys, time\n"
        "from titan_async.training.process.preemption import shield_data_worker\n"
        "asks, answers = os.pipe(), os.pipe()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    shield_data_worker(0)\n"
        "    os.write(answers[1], b'.')\n"
        "    while True: os.write(answers[1], os.read(asks[0], 1))\n"
        "os.close(answers[1])\n"
        "received = [os.read(answers[0], 1)]\n"
        "for name in ('-INT', '-TERM'):\n"
        "    subprocess.run(['kill', name, str(child)], check=True)\n"
        "    time.sleep(0.5)\n"  # for one that is wrong to end in
        "    os.write(asks[1], b'!')\n"
        "    received.append(os.read(answers[0], 1))\n"
        "os.kill(child, signal.SIGTERM)\n"
        "print(received, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, env=environment()
    )
    assert (done.stdout, done.stderr) == ("[b'.', b'!', b'!'] 0\n", "")


def wait_for_step(run: Forked, number: int) -> None:
    assert run.stdout is not None
    for line in run.stdout:
        if re.match(rf"step +{number}/", line):
            return
    raise AssertionError(run.stderr and run.stderr.read())


def descendants(pid: int) -> list[int]:
    try:
        children = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return []
    return children + [pid for child in children for pid in descendants(child)]


def stopped_at(out: str, number: signal.Signals = TERM) -> int:
    (line,) = [line for line in out.splitlines() if line.startswith(NAMES[number])]
    before = f"{NAMES[number]}: saved step "
    after = " of 500 in run/checkpoint; resume with the same command"
    assert line.startswith(before) and line.endswith(after)
    assert out.rstrip().splitlines()[-1] == line
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


def test_sigterm_to_the_launcher_saves_and_the_run_resumes_bit_for_bit(
    tmp_path: Path,
) -> None:
    run = start(tmp_path, *FLAGS)
    wait_for_step(run, 3)
    run.send_signal(signal.SIGTERM)
    run.send_signal(signal.SIGTERM)  # as `timeout` does, to its child and to its group
    out, err = run.communicate(timeout=100)
    assert (run.returncode, err) == (0, "")
    step = stopped_at(out)
    assert 3 < step < 500
    end = ("--training.steps", step + 3)
    resumed = train(tmp_path, *FLAGS, *end)
    assert (resumed.status, resumed.err) == (0, "")
    assert resumed.steps == [step + 1, step + 2, step + 3]
    (tmp_path / "undisturbed").mkdir()
    assert train(tmp_path / "undisturbed", *FLAGS, *end).status == 0
    mine, other = weights(tmp_path, step + 3), weights(tmp_path / "undisturbed", step + 3)
    assert mine.keys() == other.keys()
    for name, value in other.items():
        assert torch.equal(mine[name], value), name


def begin_as_a_user(folder: Path) -> tuple[Callable[[], int], int]:
    """Start a run in its own terminal, through a shell script's exec.

    Returns:
        A function that waits for its end and returns its status, and the terminal.
    """
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(folder)
        program = ["bash", "-c", 'exec "$@"', "bash", *command("--dump_folder", "run", *FLAGS)]
        os.execvpe("bash", program, environment() | {"TERM": "dumb"})
    return lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), terminal


def begin_as_a_fork(folder: Path) -> tuple[Callable[[], int], int]:
    terminal, other_end = pty.openpty()
    words, env = command("--dump_folder", "run", *FLAGS), environment() | {"TERM": "dumb"}
    return Forked(words, cwd=folder, env=env, terminal=other_end).wait, terminal


def read_until(terminal: int, text: str | None, seconds: float = 150) -> str:
    """The output of a terminal up to `text`, or up to the end of the processes in it."""
    shown, deadline = b"", time.monotonic() + seconds
    while text is None or text.encode() not in shown:
        assert time.monotonic() < deadline, shown.decode()
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                shown += os.read(terminal, 4096)
            except OSError:  # on Linux, when no process has it open any more
                break
    return shown.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("begin", [slow(begin_as_a_user), begin_as_a_fork])
def test_ctrl_c_saves(tmp_path: Path, begin: Callable[[Path], tuple]) -> None:
    wait, terminal = begin(tmp_path)
    read_until(terminal, "step   3/500")
    os.write(terminal, b"\x03")
    out = read_until(terminal, None)
    assert wait() == 130
    assert f"^C\n{STOPPING}\n" in out
    assert_resumable(tmp_path, stopped_at(out, INT))


def test_a_second_ctrl_c_ends_at_once_without_an_incomplete_checkpoint(tmp_path: Path) -> None:
    terminal, other_end = pty.openpty()
    run = start(tmp_path, *FLAGS, "--checkpoint.interval", 10, terminal=other_end)
    read_until(terminal, "step  11/500")
    ranks = processes_of(run.pid)
    os.kill(ranks[1], signal.SIGSTOP)  # so that the step that the first press lets finish does not
    os.write(terminal, b"\x03")
    read_until(terminal, STOPPING)
    time.sleep(SAME_PRESS_SECONDS + 0.1)
    os.write(terminal, b"\x03")
    out = read_until(terminal, None)
    assert run.wait(100) == 130
    assert out.endswith("stopped by SIGINT\n")
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks.values())
    assert [path.name for path in (tmp_path / "run/checkpoint").iterdir()] == ["step-10"]


@pytest.mark.parametrize(
    ("number", "status", "err"),
    [(TERM, 0, ""), slow(INT, 130, f"{STOPPING}\n")],
)
def test_a_signal_to_every_process_of_a_job_step(
    number: signal.Signals, status: int, err: str, tmp_path: Path
) -> None:
    run = start(
        tmp_path, *FLAGS, "--parallelism.pipeline_parallel_schedule", "1F1B", "--dataloader.num_workers", 1,
        "--checkpoint.async_mode", "async", "--checkpoint.interval", 2,
    )  # fmt: skip
    wait_for_step(run, 3)
    everyone = descendants(run.pid)
    assert len(everyone) >= 4, "two ranks, and a data worker for each"
    for pid in (run.pid, *everyone):
        os.kill(pid, number)
    out, stderr = run.communicate(timeout=100)
    assert (run.returncode, stderr) == (status, err)
    assert_resumable(tmp_path, stopped_at(out, number))


@pytest.mark.parametrize("number", [slow(TERM), INT])
def test_a_signal_to_torchrun(number: signal.Signals, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", "localhost:0", "-m", "titan_async.training.worker",
            *command("--dump_folder", "run", *FLAGS, "--parallelism.pipeline_parallel_degree", 1)[4:],
            "--dataloader.num_workers", "1"]  # fmt: skip
    run = Forked(argv, cwd=tmp_path, env=environment(), start_new_session=True)
    wait_for_step(run, 3)
    os.killpg(run.pid, number)
    out, err = run.communicate(timeout=100)
    # torchrun's own status and traceback are about itself; a worker that failed is named there.
    assert "exitcode" not in err
    assert (STOPPING in err) == (number == INT)
    assert_resumable(tmp_path, stopped_at(out, number))


def test_sigterm_without_checkpoints_stops_and_reports_that_nothing_was_saved(tmp_path: Path) -> None:
    run = start(tmp_path, *FLAGS, "--checkpoint.no-enable")
    wait_for_step(run, 3)
    run.send_signal(signal.SIGTERM)
    out, err = run.communicate(timeout=100)
    assert (run.returncode, err) == (143, "stopped by SIGTERM\n")
    assert out.splitlines()[-1].startswith("SIGTERM: stopped after step ")
    assert out.endswith(" of 500 without saving, because of checkpoint.no-enable\n")


@pytest.mark.parametrize("number", [slow(TERM), INT])
def test_a_signal_before_the_first_step_ends_at_once(number: signal.Signals, tmp_path: Path) -> None:
    run = start(tmp_path, *FLAGS)
    until(lambda: len(processes_of(run.pid)) == 2, "ranks are not started")
    run.send_signal(number)
    out, err = run.communicate(timeout=100)
    assert (run.returncode, out, err) == (128 + number, "", f"stopped by {number.name}\n")
    assert not (tmp_path / "run/checkpoint").exists()
