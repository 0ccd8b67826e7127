"""The launcher: how many processes, and what is said when one of them fails.

The workers here are small scripts without torch; what they do is named by their argument.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

import titan_async
from titan_async.cli.launch import processes_per_node
from titan_async.errors import UserError

ROOT = Path(titan_async.__file__).parents[1]

WORKER = """
    import os, signal, sys, time
    from titan_async.training import failures
    failures.end_with_launcher()
    case, folder, rank = sys.argv[1], sys.argv[2], int(os.environ["RANK"])
    open(f"{folder}/pid-{rank}", "w").write(str(os.getpid()))
    while not os.path.exists(f"{folder}/pid-{1 - rank}"):
        time.sleep(0.01)  # who is stopped before it has begun leaves no number behind
    if case == "fine":
        sys.stdout.write(f"rank {rank} of {os.environ['WORLD_SIZE']}\\n")
    elif case == "killed":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)  # as gloo does, notice at once that the other is gone
        failures.report_failure("lost_peer", "the connection was closed")
        sys.exit(1)
    elif case == "error":
        if rank == 0:
            time.sleep(0.3)
            failures.report_failure("lost_peer", "the connection was closed")
            sys.exit(1)
        failures.report_failure("error", "RuntimeError: boom\\nsecond line")
        sys.exit(3)
    elif case == "no_answer":
        if rank == 0:
            failures.report_failure("no_answer", "rank 1 does not answer")
            sys.exit(1)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case == "user":
        failures.report_failure("user", "lower the batch size")
        sys.exit(2)
    elif case == "silent":
        if rank == 1:
            os._exit(7)
        time.sleep(300)
    elif case == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 1:
            time.sleep(0.5)
            os._exit(7)
        time.sleep(300)
    elif case == "endless":
        time.sleep(300)
    elif case == "saves":
        signal.signal(signal.SIGTERM, lambda *_: requests.append(rank))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        requests = []
        open(f"{folder}/ready-{rank}", "w").close()
        while not requests:
            time.sleep(0.01)
        time.sleep(1 + rank)
        open(f"{folder}/saved-{rank}", "w").close()
    elif case in ("ctrl_c", "ctrl_c_hangs"):
        signal.signal(signal.SIGINT, lambda *_: requests.append(rank))
        requests = []
        open(f"{os.environ[failures.ERROR_DIR]}/stops-cleanly-{rank}", "w").close()
        open(f"{folder}/ready-{rank}", "w").close()
        while not requests or case == "ctrl_c_hangs":
            time.sleep(0.01)
        time.sleep(1 + rank)
        open(f"{folder}/saved-{rank}", "w").close()
    elif case == "fails_to_save":
        def fail(*_):
            time.sleep(rank / 2)
            failures.report_failure("error" if rank else "lost_peer", "OSError: the disk is full")
            sys.exit(1)
        signal.signal(signal.SIGTERM, fail)
        signal.signal(signal.SIGINT, fail)
        open(f"{os.environ[failures.ERROR_DIR]}/stops-cleanly-{rank}", "w").close()
        open(f"{folder}/ready-{rank}", "w").close()
        time.sleep(300)
    elif case == "never_saves":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"{folder}/ready-{rank}", "w").close()
        time.sleep(300)
"""

LAUNCHER = """
    import os, signal, sys
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
    from titan_async.cli import elastic, launch
    elastic.SAVE_SECONDS = float(os.environ.get("SAVE_SECONDS", 60))
    sys.exit(launch.launch(2, [sys.executable, *sys.argv[1:]]))
"""


def start(case: str, folder: Path, **variables: str) -> subprocess.Popen[str]:
    (folder / "worker.py").write_text(textwrap.dedent(WORKER))
    environment = {k: v for k, v in os.environ.items() if k not in ("NNODES", "NODE_RANK", "NGPU", "RANK")}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LAUNCHER), folder / "worker.py", case, folder],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)} | variables,
    )  # fmt: skip


def pids_of(folder: Path) -> list[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        written = [path.read_text() for path in folder.glob("pid-*")]
        if len(written) == 2 and all(written):
            return [int(text) for text in written]
        time.sleep(0.05)
    raise AssertionError("the workers did not start")


def wait_for_ready(folder: Path) -> list[int]:
    pids, deadline = pids_of(folder), time.monotonic() + 60
    while len(list(folder.glob("ready-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return pids


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    for pid in pids:
        while Path(f"/proc/{pid}").exists():
            # One that nobody has waited for yet is dead too.
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                break
            assert time.monotonic() < deadline, f"process {pid} is left over"
            time.sleep(0.05)


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
def test_outcomes(case: str, status: int, message: str, tmp_path: Path) -> None:
    launcher = start(case, tmp_path)
    out, err = launcher.communicate(timeout=120)
    assert (launcher.returncode, err) == (status, message)
    assert sorted(out.split("\n")) == (["", "rank 0 of 2", "rank 1 of 2"] if case == "fine" else [""])
    assert_gone(pids_of(tmp_path))
    assert not list(tmp_path.glob("titan_async_*")), "the folder of reports is left over"


STOPPING = "stopping after this step and saving; press Ctrl-C again to stop at once\n"


# No worker has said yet that it stops cleanly at SIGINT.
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_launcher_ends_every_worker(number: signal.Signals, tmp_path: Path) -> None:
    launcher = start("endless", tmp_path)
    pids = pids_of(tmp_path)
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=60)
    if number != signal.SIGKILL:
        assert (launcher.returncode, err) == (128 + number, f"stopped by {number.name}\n")
    assert_gone(pids)


def test_after_sigterm_workers_may_save_and_end_with_0(tmp_path: Path) -> None:
    launcher = start("saves", tmp_path)
    wait_for_ready(tmp_path)
    launcher.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    launcher.send_signal(signal.SIGTERM)  # the same request once more, as `timeout` sends it
    assert launcher.communicate(timeout=30) == ("", "")
    assert launcher.returncode == 0
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]


@pytest.mark.parametrize(("number", "before"), [(signal.SIGTERM, ""), (signal.SIGINT, STOPPING)])
def test_a_save_that_fails_after_a_request_is_told(
    number: signal.Signals, before: str, tmp_path: Path
) -> None:
    launcher = start("fails_to_save", tmp_path)
    pids = wait_for_ready(tmp_path)
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=30)
    assert (launcher.returncode, err) == (
        128 + number,
        f"{before}stopped by {number.name}; rank 1 failed: OSError: the disk is full\n",
    )
    assert_gone(pids)


def test_after_ctrl_c_workers_may_save_and_the_status_is_130(tmp_path: Path) -> None:
    launcher = start("ctrl_c", tmp_path)
    wait_for_ready(tmp_path)
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.1)
    launcher.send_signal(signal.SIGINT)  # the same press, come by another way
    assert launcher.communicate(timeout=30) == ("", STOPPING)
    assert launcher.returncode == 130
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    launcher = start("ctrl_c_hangs", tmp_path)
    pids = wait_for_ready(tmp_path)
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.6)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=20)
    assert (launcher.returncode, err) == (130, f"{STOPPING}stopped by SIGINT\n")
    assert_gone(pids)


def test_ctrl_c_ends_at_once_while_one_worker_does_not_stop_cleanly_yet(tmp_path: Path) -> None:
    launcher = start("ctrl_c_hangs", tmp_path)
    pids = wait_for_ready(tmp_path)
    (mark,) = tmp_path.glob("titan_async_*/stops-cleanly-1")
    mark.unlink()
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=20)
    assert (launcher.returncode, err) == (130, "stopped by SIGINT\n")
    assert_gone(pids)


def test_sigterm_and_then_ctrl_c_is_the_first_of_each(tmp_path: Path) -> None:
    launcher = start("saves", tmp_path)
    wait_for_ready(tmp_path)
    for name in ("0", "1"):
        (reports,) = tmp_path.glob("titan_async_*")
        (reports / f"stops-cleanly-{name}").touch()
    launcher.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    launcher.send_signal(signal.SIGINT)
    assert launcher.communicate(timeout=30) == ("", STOPPING)
    assert launcher.returncode == 130
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]


def test_workers_that_do_not_save_are_killed(tmp_path: Path) -> None:
    launcher = start("never_saves", tmp_path, SAVE_SECONDS="2")
    pids = wait_for_ready(tmp_path)
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=30)
    said = "stopped by SIGTERM; ranks that had not saved after 2 s were killed\n"
    assert (launcher.returncode, err) == (143, said)
    assert_gone(pids)


def test_a_second_sigterm_ends_at_once(tmp_path: Path) -> None:
    launcher = start("never_saves", tmp_path)
    pids = wait_for_ready(tmp_path)
    launcher.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=30)
    assert (launcher.returncode, err) == (143, "stopped by SIGTERM\n")
    assert_gone(pids)


@pytest.mark.parametrize("rank", [{"NODE_RANK": "1"}, {}], ids=["given-rank", "agreed-rank"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_launcher_that_waits_for_other_machines(
    number: signal.Signals, rank: dict[str, str], tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    launcher = start("fine", tmp_path, NNODES="2", MASTER_ADDR="localhost", MASTER_PORT=port, **rank)
    assert launcher.stderr is not None
    assert launcher.stderr.readline() == f"waiting for all 2 machines to meet at localhost:{port} ...\n"
    time.sleep(4)  # torch is imported, and the wait has begun
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=20)
    assert launcher.returncode == 128 + number
    # The last line: torch's C++ may remark before it that its wait was interrupted.
    assert err.endswith(f"stopped by {number.name}\n")
    assert not list(tmp_path.glob("titan_async_*")), "the folder of reports is left over"


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
        # Experts lie on the ranks of the shards and take none of their own.
        (SimpleNamespace(**vars(degrees(pp=2, shard=2)), expert_parallel_degree=2), {}, 0, 4),
        (degrees(pp=2), {}, 8, 8),  # the shards take what is left
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
            "NGPU=3 on 1 node(s) makes 3 processes, but parallelism asks for 4 "
            "(pipeline_parallel_degree 4); change NGPU or the degrees",
        ),
        (
            degrees(pp=2), {"NGPU": "3"}, 0,
            "NGPU=3 on 1 node(s) makes 3 processes, but parallelism asks for a multiple of 2 "
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
            "parallelism asks for 4 processes on this machine (pipeline_parallel_degree 4), "
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
