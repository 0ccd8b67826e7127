"""The launcher: the number of processes, and the message when one of them fails.

The workers are small scripts without torch, whose argument names a case. The launcher is a fork of a process
that has imported torch. Events are ordered by waiting for a file, a line, or the exit of a process.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

import titan_async
from tests.support import forks
from tests.support.launchers import wait_for_looks
from tests.support.waiting import MOST_SECONDS, has_ended, until
from titan_async.cli import elastic, launch
from titan_async.cli.launch import processes_per_node
from titan_async.errors import UserError
from titan_async.training.process import failures

ROOT = Path(titan_async.__file__).parents[1]

WORKER = """
    import os, signal, sys, time
    from titan_async.training.process import failures
    failures.end_with_launcher()
    case, folder, rank = sys.argv[1], sys.argv[2], int(os.environ["RANK"])

    def write(name, text=""):
        with open(f"{folder}/{name}-{rank}.new", "w") as file:
            file.write(text)
        os.rename(file.name, f"{folder}/{name}-{rank}")

    def wait_for(name):
        while not os.path.exists(f"{folder}/{name}"):
            time.sleep(0.01)

    def state_of_other():  # "" after the launcher has reaped it
        try:
            return open(f"/proc/{other}/stat").read().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return ""

    def wait_for_other(states):
        while state_of_other() not in states:
            time.sleep(0.01)

    def note(*_):
        write("asked")

    def run_forever():
        while True:
            time.sleep(0.01)

    def stop_cleanly():
        open(f"{os.environ[failures.ERROR_DIR]}/stops-cleanly-{rank}", "w").close()

    write("pid", str(os.getpid()))
    wait_for(f"pid-{1 - rank}")  # a process that is stopped before this has not written its pid
    other = int(open(f"{folder}/pid-{1 - rank}").read())
    if case == "fine":
        sys.stdout.write(f"rank {rank} of {os.environ['WORLD_SIZE']}\\n")
    elif case == "killed":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for_other(["Z", ""])  # like gloo, detect that it has exited
        failures.report_failure("lost_peer", "the connection was closed")
        sys.exit(1)
    elif case == "error":
        if rank == 0:
            wait_for_other(["Z", ""])
            failures.report_failure("lost_peer", "the connection was closed")
            sys.exit(1)
        failures.report_failure("error", "RuntimeError: boom\\nsecond line")
        sys.exit(3)
    elif case == "no_answer":
        if rank == 0:
            wait_for_other("T")
            failures.report_failure("no_answer", "rank 1 does not answer")
            sys.exit(1)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case in ("watchdog", "watchdog_error", "aborted"):
        if rank == 0:  # like another rank, whose watchdog has not fired
            run_forever()
        sys.stderr.write(open(f"{folder}/stderr_text").read())
        sys.stderr.flush()
        os.abort()
    elif case == "environment":
        write("threads", os.environ.get("OMP_NUM_THREADS", "none"))
    elif case == "user":
        failures.report_failure("user", "lower the batch size")
        sys.exit(2)
    elif case == "silent":
        if rank == 1:
            os._exit(7)
        run_forever()
    elif case == "stubborn":
        signal.signal(signal.SIGTERM, note)
        write("ready")
        wait_for("ready-0")
        if rank == 1:
            os._exit(7)
        run_forever()
    elif case == "endless":
        run_forever()
    elif case in ("saves", "saves_at_ctrl_c"):
        signal.signal(signal.SIGINT, note if case == "saves_at_ctrl_c" else signal.SIG_IGN)
        signal.signal(signal.SIGTERM, note)
        stop_cleanly()
        write("ready")
        wait_for(f"asked-{rank}")
        wait_for("go")
        if rank == 1:
            wait_for_other([""])  # the launcher must not treat the exit of the first as that of all
        write("saved")
    elif case == "fails_to_save":
        def fail(*_):
            if rank == 1:
                wait_for_other([""])
            failures.report_failure("error" if rank else "lost_peer", "OSError: the disk is full")
            sys.exit(1)
        signal.signal(signal.SIGTERM, fail)
        signal.signal(signal.SIGINT, fail)
        stop_cleanly()
        write("ready")
        run_forever()
    elif case == "never_saves":
        signal.signal(signal.SIGTERM, note)
        signal.signal(signal.SIGINT, note)
        stop_cleanly()
        write("ready")
        run_forever()
"""

LAUNCHER = """
    import os, sys
    from tests.support.launchers import begin_launcher
    from titan_async.cli import elastic, launch
    begin_launcher(sys.argv[-1])
    elastic.SAVE_SECONDS = float(os.environ.get("SAVE_SECONDS", 60))
    for number in elastic._SAME_REQUEST_SECONDS:
        elastic._SAME_REQUEST_SECONDS[number] = float(os.environ["SAME_REQUEST_SECONDS"])
    from torch.numa import binding
    binding._get_numa_node_index_for_device_index = lambda device_index: 0
    command = [sys.executable, *sys.argv[1:]]
    sys.exit(launch.launch(2, command, gpus=int(os.environ.get("GPUS", "0"))))
"""

# The output of torch's ProcessGroupNCCL, by glog, and of std::terminate.
TIMED_OUT = """\
[rank1]:[E1130 03:14:15.926535897 ProcessGroupNCCL.cpp:690] [Rank 1] Watchdog caught collective operation \
timeout: WorkNCCL(SeqNum=812, OpType=RECV, NumelIn=1048576, NumelOut=1048576, Timeout(ms)=100000) ran for \
100042 milliseconds before timing out.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 4 PG GUID 17 Rank 1] Process group watchdog thread terminated with exception: [Rank 1] \
Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812, OpType=RECV, NumelIn=1048576, \
NumelOut=1048576, Timeout(ms)=100000) ran for 100042 milliseconds before timing out.
"""
LOST = """\
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 4 PG GUID 17 Rank 1] Process group watchdog thread terminated with exception: NCCL error: \
remote process exited or there was a network error, NCCL version 2.28.9
Exception raised from checkForNCCLErrorsInternal
"""
STDERR = {
    "watchdog": TIMED_OUT,
    "watchdog_error": LOST,
    "aborted": "terminate called after throwing an instance of 'std::bad_alloc'\n",
}

Start = Callable[..., forks.Forked]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a launcher of two workers of a case.

    A second signal is always the same request as the first; with SAME_REQUEST_SECONDS 0 it is always another
    request.
    """
    (tmp_path / "worker.py").write_text(textwrap.dedent(WORKER))
    left_out = ("NNODES", "NODE_RANK", "NGPU", "RANK", "OMP_NUM_THREADS")
    environment = {k: v for k, v in os.environ.items() if k not in left_out}
    environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "SAME_REQUEST_SECONDS": "600"}
    started = []

    def start(case: str, **variables: str) -> forks.Forked:
        command = [sys.executable, "-c", textwrap.dedent(LAUNCHER), tmp_path / "worker.py", case, tmp_path]
        started.append(forks.Forked(command, cwd=tmp_path, env=environment | variables))
        return started[-1]

    yield start
    for launcher in started:
        launcher.kill()


def wait_for_all(name: str, folder: Path) -> list[str]:
    """Waits until both workers have written a file of this name; returns the contents."""
    files = [folder / f"{name}-{rank}" for rank in range(2)]
    until(lambda: all(file.exists() for file in files), f"not all workers have written {name}")
    return [file.read_text() for file in files]


def pids_of(folder: Path) -> list[int]:
    return [int(text) for text in wait_for_all("pid", folder)]


def wait_for_ready(folder: Path) -> list[int]:
    """Waits until the workers and the launcher have installed their signal handlers."""
    wait_for_all("ready", folder)
    wait_for_looks(folder)
    return pids_of(folder)


def assert_gone(pids: list[int]) -> None:
    for pid in pids:
        until(lambda pid=pid: has_ended(pid), f"process {pid} is still running")


@pytest.mark.parametrize(
    ("case", "status", "message"),
    [
        ("fine", 0, ""),
        ("killed", 1, "rank 1 was killed by SIGKILL; the other ranks were stopped\n"),
        ("error", 1, "rank 1 failed (exit status 3): RuntimeError: boom second line\n"),
        ("user", 2, "lower the batch size\n"),
        ("no_answer", 1, "rank 1 does not answer\n"),
        ("silent", 1, "rank 1 failed (exit status 7)\n"),
        ("stubborn", 1, "rank 1 failed (exit status 7)\n"),
    ],
)
def test_outcomes(case: str, status: int, message: str, start: Start, tmp_path: Path) -> None:
    launcher = start(case)
    out, err = launcher.communicate(timeout=MOST_SECONDS)
    assert (launcher.returncode, err) == (status, message)
    assert sorted(out.split("\n")) == (["", "rank 0 of 2", "rank 1 of 2"] if case == "fine" else [""])
    assert_gone(pids_of(tmp_path))
    assert not list(tmp_path.glob("asked-*")), (
        "a worker was asked to finish its step, which it cannot do without the other"
    )
    assert not list(tmp_path.glob("titan_async_*")), "the folder of reports was not removed"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("watchdog", "rank 1 was ended by NCCL's watchdog after 100 s without an answer\n"),
        (
            "watchdog_error",
            "rank 1 failed (exit status -6): ended by NCCL's watchdog: NCCL error: remote process exited or "
            "there was a network error, NCCL version 2.28.9\n",
        ),
        ("aborted", "rank 1 was killed by SIGABRT; the other ranks were stopped\n"),
    ],
)
def test_the_message_of_nccl_before_it_aborts_a_rank(
    case: str, message: str, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "stderr_text").write_text(STDERR[case])
    launcher = start(case)
    _, err = launcher.communicate(timeout=MOST_SECONDS)
    assert (launcher.returncode, err) == (1, STDERR[case] + message)


@pytest.mark.parametrize(
    ("status", "report", "line"),
    [
        (-signal.SIGKILL, None, "rank 0 was killed by SIGKILL; the other ranks were stopped"),
        (3, "RuntimeError: boom", "rank 0 failed (exit status 3): RuntimeError: boom"),
    ],
)
def test_another_failure_precedes_that_of_the_watchdog(status: int, report: str | None, line: str) -> None:
    exits = [elastic.WorkerExit(1, -signal.SIGABRT), elastic.WorkerExit(0, status)]
    outcome = elastic.Outcome(exits, failed=True, stderr={1: TIMED_OUT})
    reports = [] if report is None else [failures.Failure(0, "error", report, time.time())]
    assert launch._status_and_cause(outcome, reports, lambda rank, seconds: "timed out") == (1, line)


def test_the_message_contains_the_timeout_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "launch", lambda *args, **kwargs: options.update(kwargs) or 0)
    recipe = ROOT / "toml_configs" / "debug_cpu.toml"
    assert launch.train([str(recipe), "--comm.train_timeout_seconds", "90"]) == 0
    assert options["explain"](1, 90.0) == (
        "a rank does not answer: rank 1 was ended by NCCL's watchdog after 90 s (comm.train_timeout_seconds) "
        "without an answer: start the same command again, or raise comm.train_timeout_seconds if ranks are "
        "only slow"
    )


NUMACTL = """#!/bin/sh
echo "$@" >> {calls}
[ -n "$NO_NUMA" ] && exit 1
shift
exec "$@"
"""


@pytest.mark.parametrize(
    ("variables", "threads", "bound"),
    [
        ({}, "1", False),
        ({"GPUS": "2"}, str(max(len(os.sched_getaffinity(0)) // 2, 1)), True),
        ({"GPUS": "2", "OMP_NUM_THREADS": "7"}, "7", True),
        ({"GPUS": "2", "NO_NUMA": "1"}, str(max(len(os.sched_getaffinity(0)) // 2, 1)), False),
    ],
)
@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").exists(), reason="reads Linux's NUMA nodes")
def test_ranks_share_the_cores(
    variables: dict[str, str], threads: str, bound: bool, start: Start, tmp_path: Path
) -> None:
    calls, numactl = tmp_path / "calls", tmp_path / "bin" / "numactl"
    numactl.parent.mkdir()
    numactl.write_text(NUMACTL.format(calls=calls))
    numactl.chmod(0o755)
    launcher = start("environment", PATH=f"{numactl.parent}:{os.environ['PATH']}", **variables)
    assert launcher.communicate(timeout=MOST_SECONDS) == ("", "")
    assert wait_for_all("threads", tmp_path) == [threads, threads]
    ran = calls.read_text().splitlines() if calls.exists() else []
    of_ranks = [line for line in ran if "worker.py" in line]
    assert len(of_ranks) == (2 if bound else 0)
    assert all(line.startswith("--physcpubind=0") for line in of_ranks)


STOPPING = "stopping after this step and saving; press Ctrl-C again to stop at once\n"


# No worker handles SIGINT yet.
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_launcher_stops_every_worker(
    number: signal.Signals, start: Start, tmp_path: Path
) -> None:
    launcher = start("endless")
    pids = pids_of(tmp_path)
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=MOST_SECONDS)
    if number != signal.SIGKILL:
        assert (launcher.returncode, err) == (128 + number, f"stopped by {number.name}\n")
    assert_gone(pids)


def assert_saved(launcher: forks.Forked, status: int, folder: Path) -> None:
    """Asserts that nothing more is printed, and that both workers save and exit."""
    assert not list(folder.glob("saved-*"))
    # The launcher has handled the signals sent so far before it sees the workers exit.
    (folder / "go").touch()
    assert launcher.communicate(timeout=MOST_SECONDS) == ("", "")
    assert launcher.returncode == status
    assert sorted(path.name for path in folder.glob("saved-*")) == ["saved-0", "saved-1"]


def request_stop(launcher: forks.Forked, number: signal.Signals) -> None:
    """Sends the first signal; after SIGINT, the launcher prints that it stops."""
    launcher.send_signal(number)
    if number == signal.SIGINT:
        assert launcher.stderr is not None and launcher.stderr.readline() == STOPPING


@pytest.mark.parametrize(
    ("number", "case", "status"), [(signal.SIGTERM, "saves", 0), (signal.SIGINT, "saves_at_ctrl_c", 130)]
)
def test_after_a_signal_workers_may_save(
    number: signal.Signals, case: str, status: int, start: Start, tmp_path: Path
) -> None:
    launcher = start(case)
    wait_for_ready(tmp_path)
    request_stop(launcher, number)
    wait_for_all("asked", tmp_path)
    launcher.send_signal(number)  # the same request: `timeout` sends SIGTERM twice
    assert_saved(launcher, status, tmp_path)


@pytest.mark.parametrize(("number", "before"), [(signal.SIGTERM, ""), (signal.SIGINT, STOPPING)])
def test_a_save_that_fails_after_a_request_is_reported(
    number: signal.Signals, before: str, start: Start, tmp_path: Path
) -> None:
    launcher = start("fails_to_save")
    pids = wait_for_ready(tmp_path)
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=MOST_SECONDS)
    assert (launcher.returncode, err) == (
        128 + number,
        f"{before}stopped by {number.name}; rank 1 failed: OSError: the disk is full\n",
    )
    assert_gone(pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_kills(number: signal.Signals, start: Start, tmp_path: Path) -> None:
    launcher = start("never_saves", SAME_REQUEST_SECONDS="0")
    pids = wait_for_ready(tmp_path)
    request_stop(launcher, number)
    wait_for_all("asked", tmp_path)
    wait_for_looks(tmp_path, 3)
    assert launcher.poll() is None
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=MOST_SECONDS)
    assert (launcher.returncode, err) == (128 + number, f"stopped by {number.name}\n")
    assert_gone(pids)


def test_ctrl_c_kills_while_one_worker_does_not_handle_it_yet(start: Start, tmp_path: Path) -> None:
    launcher = start("never_saves")
    pids = wait_for_ready(tmp_path)
    (mark,) = tmp_path.glob("titan_async_*/stops-cleanly-1")
    mark.unlink()
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=MOST_SECONDS)
    assert (launcher.returncode, err) == (130, "stopped by SIGINT\n")
    assert_gone(pids)


def test_ctrl_c_after_sigterm_is_a_first_request(start: Start, tmp_path: Path) -> None:
    launcher = start("saves", SAME_REQUEST_SECONDS="0")
    wait_for_ready(tmp_path)
    launcher.send_signal(signal.SIGTERM)
    wait_for_all("asked", tmp_path)
    request_stop(launcher, signal.SIGINT)
    assert_saved(launcher, 130, tmp_path)


def test_workers_that_do_not_save_are_killed(start: Start, tmp_path: Path) -> None:
    launcher = start("never_saves", SAVE_SECONDS="1")
    pids = wait_for_ready(tmp_path)
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=MOST_SECONDS)
    message = "stopped by SIGTERM; ranks that had not saved after 1 s were killed\n"
    assert (launcher.returncode, err) == (143, message)
    assert_gone(pids)


def test_the_time_in_which_signals_are_the_same_request() -> None:
    """`timeout` sends two signals within milliseconds; people press Ctrl-C again after more than a second."""
    assert elastic._SAME_REQUEST_SECONDS.keys() == {signal.SIGTERM, signal.SIGINT}
    assert all(0.2 < seconds < 1.5 for seconds in elastic._SAME_REQUEST_SECONDS.values())


@pytest.mark.covering(1)
@pytest.mark.parametrize("rank", [{"NODE_RANK": "1"}, {}], ids=["given-rank", "agreed-rank"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_launcher_that_waits_for_other_machines(
    number: signal.Signals, rank: dict[str, str], start: Start, tmp_path: Path
) -> None:
    with socket.create_server(("localhost", 0)) as first_machine:
        first_machine.settimeout(MOST_SECONDS)
        port = first_machine.getsockname()[1]
        if not rank:
            first_machine.close()  # this launcher will be the one that listens there
        launcher = start("fine", NNODES="2", MASTER_ADDR="localhost", MASTER_PORT=str(port), **rank)
        assert launcher.stderr is not None
        assert (
            launcher.stderr.readline() == f"waiting for all 2 machines to connect to localhost:{port} ...\n"
        )
        if rank:
            connection, _ = first_machine.accept()  # which it waits for in C++; there is no answer
        else:
            connection = TCPStore("localhost", port, timeout=timedelta(seconds=MOST_SECONDS))
            connection.wait(["torch.rendezvous.titan_async"])  # it has joined the rendezvous
        launcher.send_signal(number)
        _, err = launcher.communicate(timeout=MOST_SECONDS)
        del connection
    assert launcher.returncode == 128 + number
    # The last line: torch's C++ may log before it that its wait was interrupted.
    assert err.endswith(f"stopped by {number.name}\n")
    assert not list(tmp_path.glob("titan_async_*")), "the folder of reports was not removed"


def degrees(pp: int = 1, replicate: int = 1, shard: int = -1, tp: int = 1, cp: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        pipeline_parallel_degree=pp,
        data_parallel_replicate_degree=replicate,
        data_parallel_shard_degree=shard,
        tensor_parallel_degree=tp,
        context_parallel_degree=cp,
    )


@pytest.mark.parametrize(
    ("parallelism", "environ", "gpus", "expected"),
    [
        (degrees(), {}, 0, 1),
        (degrees(pp=4), {}, 0, 4),
        (degrees(pp=2, replicate=2, shard=2), {}, 0, 8),
        (degrees(pp=2, tp=2, cp=2, shard=1), {}, 0, 8),
        # Experts are on the ranks of the shards, and need no additional ones.
        (SimpleNamespace(**vars(degrees(pp=2, shard=2)), expert_parallel_degree=2), {}, 0, 4),
        (degrees(pp=2), {}, 8, 8),  # the shards take the remaining GPUs
        (degrees(pp=3), {}, 8, 6),
        (degrees(pp=2, shard=1), {}, 8, 2),
        (degrees(pp=2), {"NGPU": "4"}, 0, 4),
        (degrees(pp=2), {"NGPU": ""}, 0, 2),
        (degrees(pp=4, shard=1), {"NNODES": "2"}, 0, 2),
        (degrees(pp=4), {"NNODES": "2"}, 4, 4),
        (degrees(pp=4), {"NNODES": "2", "NGPU": "2"}, 0, 2),
    ],
)
def test_processes_per_node(
    parallelism: SimpleNamespace, environ: Mapping[str, str], gpus: int, expected: int
) -> None:
    assert processes_per_node(parallelism, environ, gpus) == expected


@pytest.mark.parametrize(
    ("parallelism", "environ", "gpus", "message"),
    [
        (
            degrees(pp=4, shard=1), {"NGPU": "3"}, 0,
            "NGPU=3 on 1 node(s) makes 3 processes, but the parallel degrees require 4 "
            "(pipeline_parallel_degree 4); change NGPU or the degrees",
        ),
        (
            degrees(pp=2), {"NGPU": "3"}, 0,
            "NGPU=3 on 1 node(s) makes 3 processes, but the parallel degrees require a multiple of 2 "
            "(pipeline_parallel_degree 2); change NGPU or the degrees",
        ),
        (degrees(), {"NGPU": "two"}, 0, "NGPU must be a positive integer, not two: correct it, or unset it"),
        (degrees(), {"NNODES": "0"}, 0, "NNODES must be a positive integer, not 0: correct it, or unset it"),
        (
            degrees(pp=3, shard=1), {"NNODES": "2"}, 0,
            "3 processes (pipeline_parallel_degree 3) cannot be divided over NNODES=2; change the degrees",
        ),
        (
            degrees(pp=4, shard=1), {}, 2,
            "the parallel degrees require 4 processes on this machine (pipeline_parallel_degree 4), "
            "which has 2 GPU(s); lower the degrees",
        ),
        (degrees(pp=0), {}, 0, "parallelism.pipeline_parallel_degree must be at least 1, not 0"),
    ],
)  # fmt: skip
def test_degrees_that_do_not_fit(
    parallelism: SimpleNamespace, environ: Mapping[str, str], gpus: int, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        processes_per_node(parallelism, environ, gpus)
    assert str(caught.value) == message
