"""A rank that hangs: the run ends after the timeout, with a message that names the rank."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.training import processes_of, start
from tests.support.watching import going_on, write_now
from titan_async.pipelining.recording import Kind
from titan_async.training.process.hung_ranks import describe_hung_ranks
from titan_async.training.process.library_errors import timeout_of

COMM = SimpleNamespace(init_timeout_seconds=300, train_timeout_seconds=20)


def test_only_errors_of_timed_out_waits_have_a_timeout() -> None:
    error = RuntimeError("[unbound_buffer.cc:78] Timed out waiting 15000ms for recv operation to complete")
    assert timeout_of(error) == 15
    assert timeout_of(RuntimeError("Connection closed by peer [127.0.0.1]:3982")) is None


def described(seconds: float, rank: int, folder: Path, **options: bool) -> str:
    """The message, without the seconds that the test itself takes."""
    return re.sub(r"of for 2\d s", "of for 21 s", describe_hung_ranks(seconds, rank, folder, COMM, **options))


def test_the_message_names_the_rank_that_does_not_answer(tmp_path: Path) -> None:
    folder = going_on(tmp_path)
    write_now(folder, 0, Kind.RECEIVE, 20.0)
    write_now(folder, 1, Kind.FORWARD, 0.1, ago=21.0)
    assert described(20, 0, folder) == (
        "rank 1 (stage 1) has sent no heartbeat for 21 s, and rank 0 timed out after waiting "
        "for 20 s (comm.train_timeout_seconds): start the same command again, or raise "
        "comm.train_timeout_seconds if ranks are only slow"
    )


def test_the_message_names_the_straggler(tmp_path: Path) -> None:
    folder = going_on(tmp_path)
    write_now(folder, 0, Kind.FORWARD, 301.0, microbatch=2)
    write_now(folder, 1, Kind.RECEIVE, 300.0)
    message = describe_hung_ranks(300, 1, folder, COMM)
    assert re.match(
        r"rank 0 \(stage 0\) computes the forward of microbatch 2 of step 13, since [\d:]{8} \(5 min\), and "
        r"rank 1 timed out after waiting for 300 s \(comm\.init_timeout_seconds\): start the same command "
        r"again, ",
        message,
    )


def test_without_event_files_no_rank_is_named(tmp_path: Path) -> None:
    for folder in (None, tmp_path / "gone"):
        assert describe_hung_ranks(1800, 0, folder, COMM) == (
            "a rank does not answer: rank 0 timed out after waiting for 1800 s: start the same command again"
        )


def test_the_message_for_a_rank_that_nccls_watchdog_has_aborted(tmp_path: Path) -> None:
    folder = going_on(tmp_path)
    write_now(folder, 0, Kind.FORWARD, 21.0)  # by its host, which waits for the device
    write_now(folder, 1, Kind.FORWARD, 21.0, ago=21.0)
    assert described(20, 0, folder, by_watchdog=True) == (
        "rank 1 (stage 1) has sent no heartbeat for 21 s, and rank 0 (stage 0) was ended by NCCL's watchdog "
        "after 20 s (comm.train_timeout_seconds) without an answer: start the same command again, or raise "
        "comm.train_timeout_seconds if ranks are only slow"
    )
    # No other rank is known to hang, and this rank does not.
    write_now(folder, 1, Kind.RECEIVE, 21.0)
    assert describe_hung_ranks(20, 0, folder, COMM, by_watchdog=True).startswith(
        "a rank does not answer: rank 0 (stage 0) was ended by NCCL's watchdog after 20 s "
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_rank_ends_the_run(tmp_path: Path) -> None:
    limit = 8
    run = start(
        tmp_path, "--training.steps", 500, "--metrics.log_freq", 1, "--validator.no-enable",
        "--comm.train_timeout_seconds", limit, "--comm.init_timeout_seconds", 120,
    )  # fmt: skip
    assert run.stdout is not None
    next(line for line in run.stdout if line.startswith("step   4/"))
    ranks = processes_of(run.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    out, err = run.communicate(timeout=100)
    assert (run.returncode, err.count("\n")) == (1, 1)
    # The limit is longer where steps took long.
    assert re.match(
        r"rank 1 \(stage 1\) has sent no heartbeat for \d+ s, and rank 0 timed out after waiting for \d+ s"
        r"( \(comm\.train_timeout_seconds\))?: start the same command again",
        err,
    )
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())
