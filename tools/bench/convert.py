"""Memory and time of converting a checkpoint to Hugging Face's format, against torchtitan's way. By hand:

    python tools/bench/convert.py [--folder DIR] [--repetitions 3] [--json results.json]

A checkpoint of a recipe's model with random weights is written by four ranks, each with its shards, and
converted in processes of their own: by `titan-async convert`, and as torchtitan's script does it. Peak is the
most resident memory of the process (with torch and torchtitan imported it has some at the start, which the
first row has alone), seconds are those of the whole process. Both must write the same tensors. `import` is
the way back. It takes five times the checkpoint's size on the disk.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # in the processes too, which inherit it

import torch
from _pool import Pool
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from titan_async.config.device import ensure_device

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "titan_async" / "data" / "assets" / "shakespeare_bpe2048"


def shapes_of(recipe: str) -> dict[str, tuple[int, ...]]:
    """Of the model's weights, by their keys."""
    ensure_device()
    from titan_async.config.recipe_file import resolve
    from titan_async.training.preflight.check import build_on_meta

    return {key: tuple(value.shape) for key, value in build_on_meta(resolve([recipe])).state_dict().items()}


def write_shards(rank: int, group: Any, shapes: dict[str, tuple[int, ...]], folder: str) -> None:
    """This rank's part of a checkpoint in which every tensor is sharded, as under FSDP."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(0)  # all ranks draw the whole, and keep their shards
    weights = {
        key: distribute_tensor(torch.randn(shape), mesh, [Shard(0)], src_data_rank=None).clone()
        for key, shape in shapes.items()
    }
    dcp.save(weights, checkpoint_id=folder, process_group=group)


def measure(argv: list[str]) -> tuple[float, int]:
    """Seconds and peak resident bytes of a process."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen([sys.executable, *argv], stdout=output, stderr=output, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        if status:
            output.seek(0)
            raise SystemExit(f"{' '.join(argv)} failed:\n{output.read()}")
    return seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def cases(recipe: str, run: Path, out: Path, dtypes: list[str]) -> dict[str, list[str]]:
    """What to measure; each but the first writes a folder under `out`."""
    ours = ["-m", "titan_async.cli", "convert", str(run)]
    flags = ["--recipe", recipe, "--hf_assets_path", str(TOKENIZER)]
    theirs = [str(Path(__file__).with_name("_titan_convert.py")), recipe, str(run / "checkpoint" / "step-1")]
    imports = (
        "from titan_async.config.device import ensure_device; ensure_device()\n"
        "import titan_async.training.trainer"
    )
    found = {"imports alone": ["-c", imports]}
    for dtype in dtypes:
        found[f"titan-async convert, {dtype}"] = [*ours, str(out / f"ours-{dtype}"), *flags, "--dtype", dtype]
        found[f"torchtitan's way, {dtype}"] = [*theirs, str(out / f"theirs-{dtype}"), dtype]
    model = str(out / "ours-float32")
    found["titan-async import"] = ["-m", "titan_async.cli", "import", model, str(out / "imported"), recipe]
    return found


def check_equal(ours: Path, theirs: Path) -> int:
    """The number of tensors in both folders, which must be the same ones.

    Raises:
        SystemExit: they differ.
    """
    files = {}
    for folder in (ours, theirs):
        files[folder] = {}
        for path in folder.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                files[folder] |= dict.fromkeys(file.keys(), path)
    if files[ours].keys() != files[theirs].keys():
        raise SystemExit(f"{ours} and {theirs} hold other tensors")
    for name in files[ours]:
        values = []
        for folder in (ours, theirs):
            with safe_open(files[folder][name], "pt") as file:
                values.append(file.get_tensor(name))
        mine, other = values
        if not torch.equal(mine.to(other.dtype), other):  # ours leaves routers in float32
            raise SystemExit(f"{name} differs between {ours} and {theirs}")
    return len(files[ours])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default=str(ROOT / "toml_configs" / "dense_1b.toml"))
    parser.add_argument("--folder", type=Path, help="for the files (default: a temporary one)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small model, by two ranks, in float32, once")
    parser.add_argument("--json", type=Path, help="file for every number")
    arguments = parser.parse_args()
    recipe, dtypes = str(Path(arguments.recipe).absolute()), ["float32", "bfloat16"]
    ranks, repetitions = arguments.ranks, arguments.repetitions
    if arguments.quick:
        recipe, dtypes = str(ROOT / "toml_configs" / "debug_moe_cpu.toml"), ["float32"]
        ranks, repetitions = 2, 1
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        record = run(recipe, Path(folder), dtypes, ranks, repetitions)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


def run(recipe: str, folder: Path, dtypes: list[str], ranks: int, repetitions: int) -> dict[str, Any]:
    shapes, out = shapes_of(recipe), folder / "out"
    parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
    checkpoint = folder / "run" / "checkpoint" / "step-1"
    checkpoint.parent.mkdir(parents=True)
    with Pool([ranks]) as pool:
        pool.run(ranks, write_shards, shapes, str(checkpoint))
    record: dict[str, Any] = {
        "recipe": Path(recipe).name, "parameters": parameters, "ranks": ranks, "bytes": 4 * parameters,
        "load_before": os.getloadavg(), "cases": {},
    }  # fmt: skip
    for _ in range(repetitions):
        shutil.rmtree(out, ignore_errors=True)
        for name, argv in cases(recipe, folder / "run", out, dtypes).items():
            seconds, peak = measure(argv)
            record["cases"].setdefault(name, []).append({"seconds": seconds, "peak": peak})
        # In a process of its own: what this one holds counts to the peak of those that it starts.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as checker:
            for dtype in dtypes:
                folders = out / f"ours-{dtype}", out / f"theirs-{dtype}"
                record["tensors"] = checker.submit(check_equal, *folders).result()
    title = (
        f"{record['recipe']}: {parameters:,} parameters in {record['bytes'] / 1e9:.2f} GB, by {ranks} ranks"
    )
    table = Table("what", "peak GB", "seconds", "seconds, all", title=title)
    for name, runs in record["cases"].items():
        seconds = [each["seconds"] for each in runs]
        peak = max(each["peak"] for each in runs) / 1e9
        table.add_row(name, f"{peak:.2f}", f"{statistics.median(seconds):.1f}",
                      " ".join(f"{each:.1f}" for each in seconds))  # fmt: skip
    console = Console(width=max(Console().width, 110))
    console.print(table)
    console.print(f"load average before {record['load_before'][0]:.1f}, {os.cpu_count()} cores")
    return record


if __name__ == "__main__":
    main()
