"""The scripts for clusters, with fakes of srun, scontrol, scancel and torchrun."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.waiting import MOST_SECONDS, until

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "tools" / "slurm" / "train.sbatch"

LEFT_OUT = ("NGPU", "VENV", "LOGS", "OMP_NUM_THREADS")

FAKES = {
    # Runs the script's command for one node after another.
    "srun": """
        options=()
        while [[ $1 != bash ]]; do options+=("$1"); shift; done
        echo "${options[*]}" >> "$CALLS/srun"
        for node in 0 1; do SLURM_NODEID=$node "$@" || exit; done
    """,
    "scontrol": """
        echo "$*" >> "$CALLS/scontrol"
        if [[ $1 == show ]]; then printf '%s\\n' gpu07 gpu08; fi
    """,
    # Succeeds if it may bind processes.
    "numactl": "[[ -n ${NUMA:-} ]]",
    "nproc": "echo 96",
    "scancel": 'echo "$*" >> "$CALLS/scancel"',
    "torchrun": """
        [[ $TORCH_DISABLE_SHARE_RDZV_TCP_STORE == 1 ]] || exit 9
        echo "$OMP_NUM_THREADS" >> "$CALLS/threads"
        printf '%q ' "$@" >> "$CALLS/torchrun"
        echo >> "$CALLS/torchrun"
        if [[ -n ${RUNS_UNTIL_CANCELLED:-} ]]; then
            until [[ -e $CALLS/scancel ]]; do sleep 0.05; done
        fi
        exit "${STATUS:-0}"
    """,
}


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a job on two nodes of four GPUs, in whose folder the fakes record their calls."""
    (tmp_path / "calls").mkdir()
    (tmp_path / "recipe.toml").touch()
    for folder, names in (
        ("bin", ("srun", "scontrol", "scancel", "numactl", "nproc")),
        (".venv/bin", ("torchrun",)),
    ):
        (tmp_path / folder).mkdir(parents=True)
        for name in names:
            program = tmp_path / folder / name
            program.write_text(f"#!/usr/bin/env bash\n{FAKES[name]}\n")
            program.chmod(0o755)
    variables = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    return variables | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "gpu[07-08]",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_ON_NODE": "96",
        "SLURM_GPUS_ON_NODE": "4",
    }


def run(folder: Path, job: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", SBATCH, *arguments],
        cwd=folder, env=job, capture_output=True, text=True, timeout=MOST_SECONDS, check=False,
    )  # fmt: skip


def calls(folder: Path, name: str) -> list[list[str]]:
    path = folder / "calls" / name
    return [shlex.split(line) for line in path.read_text().splitlines()] if path.exists() else []


def torchrun(folder: Path, host: str) -> list[str]:
    return [
        "--nnodes", "2", "--nproc-per-node", "4", "--max-restarts", "3", "--shutdown-timeout", "100",
        "--rdzv-id", "1234567", "--rdzv-backend", "c10d", "--rdzv-endpoint", "gpu07:24567",
        "--rdzv-conf", f"is_host={host}",
        "-m", "titan_async.cli", "train", "recipe.toml", "--dump_folder", "my outputs",
    ]  # fmt: skip


def test_each_node_gets_its_torchrun(tmp_path: Path, job: dict[str, str]) -> None:
    done = run(tmp_path, job, "recipe.toml", "--dump_folder", "my outputs")
    assert (done.returncode, done.stderr) == (0, "")
    assert calls(tmp_path, "torchrun") == [torchrun(tmp_path, "true"), torchrun(tmp_path, "false")]
    [srun] = calls(tmp_path, "srun")
    assert srun == [
        "--ntasks-per-node", "1", "--cpus-per-task", "96", "--cpu-bind", "none",
        "--output", "logs/%j-node%n.log", "--open-mode", "append",
    ]  # fmt: skip
    assert (tmp_path / "logs").is_dir()
    assert calls(tmp_path, "scontrol") == [["show", "hostnames", "gpu[07-08]"]]


@pytest.mark.parametrize(("own", "threads"), [({}, "24"), ({"OMP_NUM_THREADS": "3"}, "3")])
def test_ranks_share_the_cores_of_a_node(
    own: dict[str, str], threads: str, tmp_path: Path, job: dict[str, str]
) -> None:
    assert run(tmp_path, job | own | {"NUMA": "1"}, "recipe.toml").returncode == 0
    assert calls(tmp_path, "threads") == [[threads], [threads]]
    for flags in calls(tmp_path, "torchrun"):
        assert flags[flags.index("--numa-binding") :][:3] == ["--numa-binding", "node", "-m"]


def test_torchrun_accepts_these_flags() -> None:
    from torch.distributed.run import get_args_parser

    flags = torchrun(Path(), "true")
    flags[-6:-6] = ["--numa-binding", "node"]
    parsed = get_args_parser().parse_args(flags)
    assert (parsed.module, parsed.training_script, parsed.shutdown_timeout) == (True, "titan_async.cli", 100)
    assert parsed.numa_binding == "node"


def test_a_failed_run_fails_the_job(tmp_path: Path, job: dict[str, str]) -> None:
    assert run(tmp_path, job | {"STATUS": "7"}, "recipe.toml").returncode == 7
    assert ["requeue", "1234567"] not in calls(tmp_path, "scontrol")


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGTERM, True), (signal.SIGUSR1, False)])
def test_a_signal_lets_the_ranks_save(
    number: signal.Signals, requeued: bool, tmp_path: Path, job: dict[str, str]
) -> None:
    script = subprocess.Popen(
        ["bash", SBATCH, "recipe.toml"], cwd=tmp_path, env=job | {"RUNS_UNTIL_CANCELLED": "1"},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        until(lambda: calls(tmp_path, "torchrun"), "torchrun is not called")
        script.send_signal(number)
        out, _ = script.communicate(timeout=MOST_SECONDS)
    finally:
        script.kill()
        (tmp_path / "calls" / "scancel").touch()  # ends the fake torchrun
    assert script.returncode == 0
    assert "stop requested" in out
    assert calls(tmp_path, "scancel") == [["--signal=TERM", "1234567"]]
    assert (["requeue", "1234567"] in calls(tmp_path, "scontrol")) == requeued


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({"SLURM_JOB_ID": ""}, ["recipe.toml"], "this is not a Slurm job; start it with sbatch"),
        ({}, [], "no recipe is named; give a recipe file, then flags of titan-async train"),
        ({}, ["other.toml"], "there is no recipe file other.toml in "),
        ({"VENV": "/nowhere"}, ["recipe.toml"], "there is no torchrun in /nowhere/bin; set VENV, or "),
        ({"SLURM_GPUS_ON_NODE": ""}, ["recipe.toml"], "Slurm allocated no GPUs on "),
    ],
)
def test_missing_variables_are_reported(
    change: dict[str, str], arguments: list[str], message: str, tmp_path: Path, job: dict[str, str]
) -> None:
    done = run(tmp_path, job | change, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"train.sbatch: {message}")
    assert not calls(tmp_path, "torchrun")


def test_slurm_reads_its_options_before_the_first_command() -> None:
    lines = SBATCH.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    options = [line.removeprefix("#SBATCH ") for line in lines[:first] if line.startswith("#SBATCH ")]
    assert {"--requeue", "--signal=B:TERM@120", "--ntasks-per-node=1"} <= set(options)
    assert sum(line.startswith("#SBATCH") for line in lines) == len(options)


def test_the_script_passes_shellcheck() -> None:
    subprocess.run(["bash", "-n", SBATCH], check=True)
    beside = Path(sys.executable).with_name("shellcheck")
    shellcheck = str(beside) if beside.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run([shellcheck, SBATCH], check=True)


def test_kubernetes_rendezvous_is_at_the_first_pod() -> None:
    service, job = yaml.safe_load_all((ROOT / "tools/cluster/kubernetes.yaml").read_text())
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    assert service["metadata"]["name"] == pod["subdomain"]
    assert (service["spec"]["clusterIP"], service["spec"]["selector"]) == ("None", {"job-name": name})
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in pod["containers"][0]["env"]
    command = pod["containers"][0]["command"]
    assert command[0] == "torchrun"
    assert f"--nnodes={spec['completions']}" in command and spec["completions"] == spec["parallelism"]
    environ = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
    resources = pod["containers"][0]["resources"]
    gpus = resources["limits"]["nvidia.com/gpu"]
    assert int(environ["OMP_NUM_THREADS"]) * gpus <= resources["requests"]["cpu"]
    assert f"--nproc-per-node={gpus}" in command
    assert f"--rdzv-endpoint={name}-0.{pod['subdomain']}:29500" in command
    check_torchrun(command[1:], pod["terminationGracePeriodSeconds"])


def test_skypilot_gives_each_node_its_torchrun(tmp_path: Path, job: dict[str, str]) -> None:
    task = yaml.safe_load((ROOT / "tools/cluster/skypilot.yaml").read_text())
    assert (ROOT / task["envs"]["RECIPE"]).is_file()
    for node, host in (("0", "true"), ("1", "false")):
        given = {
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NUM_GPUS_PER_NODE": "8",
            "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
            "SKYPILOT_NODE_RANK": node,
        }
        path = f"{tmp_path}/.venv/bin:{job['PATH']}"
        subprocess.run(
            ["bash", "-c", task["run"]], env=job | task["envs"] | given | {"PATH": path}, check=True
        )
        command = calls(tmp_path, "torchrun")[-1]
        assert calls(tmp_path, "threads")[-1] == ["12"]
        assert ["--rdzv-endpoint", "10.0.0.4:29500", "--rdzv-conf", f"is_host={host}"] == command[12:16]
        check_torchrun(command, 120)


def check_torchrun(flags: list[str], seconds: int) -> None:
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(flags)
    assert (parsed.module, parsed.training_script, parsed.max_restarts) == (True, "titan_async.cli", 3)
    assert parsed.shutdown_timeout < seconds
