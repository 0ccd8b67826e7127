"""Two nodes with one torchrun each and a common rendezvous, both on this machine."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.forks import Forked
from tests.support.training import command, environment, processes_of
from titan_async.errors import UserError
from titan_async.training import worker
from titan_async.training.checkpoint.folders import complete_steps

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

STEPS = 5

FLAGS = (
    "--dump_folder", "run", "--training.steps", STEPS, "--checkpoint.interval", 2,
    "--metrics.log_freq", 1, "--validator.no-enable", "--checkpoint.keep_latest_k", 0,
    "--lr_scheduler.warmup_steps", 3, "--training.local_batch_size", 4,
)  # fmt: skip


def start_nodes(folder: Path, restarts: int) -> list[Forked]:
    """Starts a torchrun for each of two nodes; on each, one rank trains one stage."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    folder.mkdir()
    words = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1,
        "--max-restarts", restarts, "--rdzv-id", "two_nodes", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"localhost:{port}", "--monitor-interval", 0.1,
        *command(*FLAGS)[1:],
    ]  # fmt: skip
    nodes = []
    for node in range(2):
        with (folder / f"node-{node}.out").open("w") as out, (folder / f"node-{node}.err").open("w") as err:
            variables = environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            nodes.append(Forked(words, cwd=folder, env=variables, stdout=out, stderr=err))
    return nodes


def wait_for(nodes: list[Forked], folder: Path) -> str:
    """Waits for success, and returns the output of rank 0, which may be on either node."""
    try:
        statuses = [node.wait(timeout=120) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    output = [(folder / f"node-{node}.err").read_text() for node in range(2)]
    assert statuses == [0, 0], "\n".join(output)
    return "".join((folder / f"node-{node}.out").read_text() for node in range(2))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / "run/checkpoint" / f"step-{STEPS}"
    shapes = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    values = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in shapes.items()
        if not name.startswith(("optimizer.", "dataloader.", "lr_scheduler.")) and hasattr(entry, "size")
    }
    dcp.load(values, checkpoint_id=path, no_dist=True)
    return values


def logged_steps(out: str) -> list[int]:
    return [int(number) for number in re.findall(r"^step +(\d+)/", out, re.MULTILINE)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nodes") / "undisturbed"
    out = wait_for(start_nodes(folder, restarts=0), folder)
    assert logged_steps(out) == list(range(1, STEPS + 1))
    return folder


def test_two_nodes_train_together(undisturbed: Path) -> None:
    assert complete_steps(undisturbed / "run/checkpoint") == [2, 4, STEPS]


@pytest.mark.slow
def test_a_killed_worker_loses_only_the_steps_since_the_last_checkpoint(
    undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "disturbed"
    nodes = start_nodes(folder, restarts=1)
    while not complete_steps(folder / "run/checkpoint"):
        assert all(node.poll() is None for node in nodes)
        time.sleep(0.01)
    workers = {rank: pid for node in nodes for rank, pid in processes_of(node.pid).items()}
    assert sorted(workers) == [0, 1]
    os.kill(workers[1], signal.SIGKILL)
    out = wait_for(nodes, folder)
    # Logged lines of killed processes may be lost; those of restarted processes are not.
    assert logged_steps(out)[-2:] == [STEPS - 1, STEPS]
    assert re.search(r"resumed at step [24]\b", out)
    mine, theirs = weights(folder), weights(undisturbed)
    assert mine.keys() == theirs.keys() and any(".next_weights." in name for name in mine)
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name


def test_restarts_that_wait_for_dead_nodes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    worker.check_restarts()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(UserError, match="set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"):
        worker.check_restarts()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    worker.check_restarts()
