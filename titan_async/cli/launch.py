"""Starts the training processes.

Under torchrun or in a cluster's job step, the environment shows that this process already is a worker.
Otherwise the configuration is checked, and then one process is started for each rank on this machine.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_async.errors import UserError
from titan_async.training.process import failures

if TYPE_CHECKING:
    from titan_async.cli.elastic import Outcome

__all__ = ["launch", "processes_per_node", "train"]

FAILED = 1
USER_ERROR = 2

_MAX_PROCESSES = 1024
_MAX_PORT = 2**16 - 1


def train(argv: Sequence[str]) -> int:
    """Trains with `[RECIPE.toml, flags...]` and returns the exit status.

    Raises:
        UserError: the recipe file, a flag or the environment is wrong.
    """
    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if under_torchrun and "--dry-run" not in argv:
        from titan_async.training import worker

        return int(worker.main(list(argv)) or 0)

    from titan_async.cli.command_line import quiet
    from titan_async.config.recipe_file import resolve_recipe

    live = "--live" in argv
    argv = [word for word in argv if word != "--live"]
    with quiet():
        resolved = resolve_recipe(argv)

    from titan_async.training.preflight.check import check, check_messages
    from titan_async.training.preflight.notes import start_notes
    from titan_async.training.process import run_folder

    config = resolved.config
    if not resolved.dry_run:
        run_folder.refuse_locked(config.dump_folder)
    if live:
        from titan_async.cli.live import check_recorded

        check_recorded(config)
    gpus = _gpu_count()
    fake = config.comm.mode == "fake_backend"  # one process, which is rank 0
    if under_torchrun:
        nproc = world_size = int(os.environ["WORLD_SIZE"])
    else:
        nproc = processes_per_node(config.parallelism, os.environ, 0 if fake else gpus)
        world_size = nproc * (_positive(os.environ, "NNODES") or 1)
    check_messages(config)
    with quiet():
        model = check(config, world_size=world_size, make_folder=not resolved.dry_run)
    if resolved.dry_run:
        for line in start_notes(config, (name for name, _ in model.named_parameters())):
            print(line, file=sys.stderr)
        sys.stdout.write(resolved.to_toml())
        return 0
    if fake:
        os.environ["NGPU"], nproc = str(world_size), 1  # from which torchtitan takes the number of ranks
    command = [sys.executable, "-m", "titan_async.training.worker", *argv]
    folder = Path(config.dump_folder)

    def explain(rank: int, seconds: float) -> str:
        from titan_async.monitor.run_folder import runs_in
        from titan_async.training.process.hung_ranks import describe_hung_ranks

        runs = runs_in(folder) if config.monitor.events else []
        return describe_hung_ranks(seconds, rank, runs[-1] if runs else None, config.comm, by_watchdog=True)

    with run_folder.announced(folder):
        return launch(nproc, command, watch=folder if live else None, gpus=gpus, explain=explain)


def _gpu_count() -> int:
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def processes_per_node(parallelism: Any, environ: Mapping[str, str], gpus: int) -> int:
    """Returns the number of processes to start on this machine.

    That is NGPU if set, else the product of the degrees, divided by NNODES. A `data_parallel_shard_degree` of
    -1 takes the remaining GPUs (1 without GPUs).

    Args:
        parallelism: the configuration's `parallelism` section.
        environ: the environment, for NGPU and NNODES.
        gpus: the number of GPUs of this machine.

    Raises:
        UserError: NGPU or NNODES does not match the degrees, or there are too few GPUs.
    """
    nodes = _positive(environ, "NNODES") or 1
    given = _positive(environ, "NGPU")
    degrees = {
        "pipeline_parallel_degree": parallelism.pipeline_parallel_degree,
        "data_parallel_replicate_degree": parallelism.data_parallel_replicate_degree,
        "data_parallel_shard_degree": parallelism.data_parallel_shard_degree,
        "tensor_parallel_degree": parallelism.tensor_parallel_degree,
        "context_parallel_degree": parallelism.context_parallel_degree,
    }
    open_degree = degrees["data_parallel_shard_degree"] == -1
    if open_degree:
        degrees["data_parallel_shard_degree"] = 1
    for name, degree in degrees.items():
        if degree < 1:
            raise UserError(f"parallelism.{name} must be at least 1, not {degree}")
    product = math.prod(degrees.values())
    words = (
        " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "all degrees 1"
    )
    if given is not None:
        world = given * nodes
        if world != product and not (open_degree and world % product == 0):
            required = f"a multiple of {product}" if open_degree else str(product)
            raise UserError(
                f"NGPU={given} on {nodes} node(s) makes {world} processes, but the parallel degrees require "
                f"{required} ({words}); change NGPU or the degrees"
            )
        nproc = given
    else:
        if open_degree and gpus * nodes >= product:
            product *= gpus * nodes // product
        if product % nodes:
            raise UserError(
                f"{product} processes ({words}) cannot be divided over NNODES={nodes}; change the degrees"
            )
        nproc = product // nodes
    if nproc > _MAX_PROCESSES:
        raise UserError(
            f"the parallel degrees require {nproc} processes on this machine ({words}), of at most "
            f"{_MAX_PROCESSES}: lower the degrees, or divide them over machines with NNODES"
        )
    if 0 < gpus < nproc:
        raise UserError(
            f"the parallel degrees require {nproc} processes on this machine ({words}), which has {gpus} "
            "GPU(s); lower the degrees"
        )
    return nproc


def _positive(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise UserError(f"{name} must be a positive integer, not {text}: correct it, or unset it")
    return int(text)


def _rendezvous(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the fields of `LaunchConfig` for the rendezvous of the launchers of a run."""
    nodes = _positive(environ, "NNODES") or 1
    if nodes == 1:
        # A free port, so that two runs on one machine do not join each other.
        return {
            "min_nodes": 1,
            "max_nodes": 1,
            "run_id": uuid.uuid4().hex,
            "rdzv_backend": "c10d",
            "rdzv_endpoint": "localhost:0",
            "local_addr": "localhost",
        }
    address = environ.get("MASTER_ADDR")
    if not address:
        raise UserError(f"NNODES={nodes} needs MASTER_ADDR: the name or address of the first machine")
    if not re.fullmatch(r"[\w.:-]+", address):
        raise UserError(f"MASTER_ADDR is {address}: set it to the name or address of the first machine")
    port = _positive(environ, "MASTER_PORT") or 29500
    if port > _MAX_PORT:
        raise UserError(f"MASTER_PORT is {port}: set it to a free port, at most {_MAX_PORT}")
    config: dict[str, Any] = {
        "min_nodes": nodes,
        "max_nodes": nodes,
        "run_id": environ.get("SLURM_JOB_ID", "titan_async"),
        "rdzv_endpoint": f"{address}:{port}",
        "rdzv_backend": "c10d",
    }
    node_rank = environ.get("NODE_RANK")
    if node_rank is not None:
        if not re.fullmatch(r"[0-9]{1,9}", node_rank) or int(node_rank) >= nodes:
            raise UserError(f"NODE_RANK must be between 0 and {nodes - 1} (NNODES={nodes}), not {node_rank}")
        # Only the static rendezvous takes the ranks of nodes; c10d assigns them itself.
        config |= {"rdzv_backend": "static", "rdzv_configs": {"rank": int(node_rank)}}
    return config


def _share_cores(nproc: int, gpus: int) -> bool:
    """Sets OMP_NUM_THREADS, unless it is set; returns whether to bind a process to the cores near its GPU."""
    # Processes without GPUs compute on the cores: more threads than cores slow each other down.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(cores // nproc, 1) if gpus else 1))
    # torch binds with numactl, which a container may lack or forbid.
    return (
        gpus > 0
        and shutil.which("numactl") is not None
        and not subprocess.run(
            ["numactl", "--physcpubind=+0", "true"], capture_output=True, check=False
        ).returncode
    )


def launch(
    nproc: int,
    command: Sequence[str],
    *,
    watch: Path | None = None,
    gpus: int = 0,
    explain: Callable[[int, float], str] | None = None,
) -> int:
    """Runs `nproc` copies of `command` on this machine, waits, and returns the exit status.

    After a failure, one line on stderr names the cause, and the status is 1, or 2 after a `UserError` of a
    worker. After a signal to this process the status is 128 plus its number; after SIGTERM it is 0 if all
    copies saved and exited with 0. After SIGINT it is 130 in any case, without a line if they did.

    Args:
        nproc: the number of processes on this machine.
        command: the program and its arguments.
        watch: the folder of the run, to show a view of it if there is a terminal.
        gpus: the number of GPUs of this machine.
        explain: returns the sentence for a rank that NCCL's watchdog aborted after a time-out in seconds.

    Raises:
        UserError: the environment lacks the address of the first machine, or the output of a run under a view
            cannot be written.
    """
    rendezvous = _rendezvous(os.environ)

    if rendezvous["max_nodes"] > 1:
        where, nodes = rendezvous["rdzv_endpoint"], rendezvous["max_nodes"]
        print(f"waiting for all {nodes} machines to connect to {where} ...", file=sys.stderr, flush=True)

    from titan_async.cli import live
    from titan_async.cli.elastic import run_workers

    view = contextlib.nullcontext() if watch is None or not live.has_terminal() else live.watched(watch)
    with tempfile.TemporaryDirectory(prefix="titan_async_") as folder, view:
        # Workers inherit the environment.
        os.environ[failures.ERROR_DIR] = folder
        os.environ["TITAN_ASYNC_LAUNCHER_PID"] = str(os.getpid())
        try:
            outcome = run_workers(command, nproc, rendezvous, bind=_share_cores(nproc, gpus))
        finally:
            del os.environ[failures.ERROR_DIR], os.environ["TITAN_ASYNC_LAUNCHER_PID"]
        status, line = _status_and_cause(
            outcome, failures.read_failures(folder), explain or _watchdog_sentence
        )
    if outcome.failed and sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")  # show the cursor, which the progress bar of a killed worker has hidden
        sys.stdout.flush()
    if line:
        print(line, file=sys.stderr, flush=True)
    return status


def _status_and_cause(
    outcome: Outcome, reports: list[failures.Failure], explain: Callable[[int, float], str]
) -> tuple[int, str | None]:
    """Returns the exit status of a run, and a sentence with its cause."""
    if not outcome.failed:
        return (0 if outcome.interrupted is None else 128 + outcome.interrupted), None
    aborted = _aborted_by_watchdog(outcome, explain)
    reports = [*reports, *aborted.values()]
    cause = failures.root_cause(reports)
    if outcome.interrupted is not None:
        line = f"stopped by {outcome.interrupted.name}"
        if outcome.killed_after is not None:
            line += f"; ranks that had not saved after {outcome.killed_after:.0f} s were killed"
        elif cause is not None and cause.kind != "lost_peer":
            line += f"; rank {cause.rank} failed: {' '.join(cause.message.split())}"
        return 128 + outcome.interrupted, line
    # An external signal is the cause of all errors that the other ranks report.
    for exit_ in outcome.exits:
        if exit_.status < 0 and exit_.rank not in aborted:
            name = signal.Signals(-exit_.status).name
            return FAILED, f"rank {exit_.rank} was killed by {name}; the other ranks were stopped"
    if cause is None:
        first = min(outcome.exits, key=lambda exit_: exit_.rank, default=None)
        if first is None:
            return FAILED, "a rank failed without a report"
        return FAILED, f"rank {first.rank} failed (exit status {first.status})"
    if cause.kind == "user":
        return USER_ERROR, " ".join(cause.message.split())
    if cause.kind == "no_answer":
        return FAILED, cause.message
    status = next((exit_.status for exit_ in outcome.exits if exit_.rank == cause.rank), FAILED)
    return FAILED, f"rank {cause.rank} failed (exit status {status}): {' '.join(cause.message.split())}"


def _watchdog_sentence(rank: int, seconds: float) -> str:
    return f"rank {rank} was ended by NCCL's watchdog after {seconds:.0f} s without an answer"


def _aborted_by_watchdog(
    outcome: Outcome, explain: Callable[[int, float], str]
) -> dict[int, failures.Failure]:
    """Returns the failures of ranks that NCCL's watchdog aborted, which could not report them, by rank."""
    ranks = [exit_.rank for exit_ in outcome.exits if exit_.status == -signal.SIGABRT]
    if not ranks:
        return {}
    from titan_async.training.process.hung_ranks import watchdog_failure

    found = {rank: watchdog_failure(rank, outcome.stderr.get(rank, ""), explain) for rank in ranks}
    return {rank: failure for rank, failure in found.items() if failure is not None}
