"""Memory and time of converting a checkpoint to Hugging Face's format, compared with torchtitan's script.

    python tools/bench/convert.py [--folder DIR] [--repeats 3] [--json results.json]

Four ranks write a sharded checkpoint of a recipe's model with random weights. Separate processes convert it:
`titan-async convert`, and the steps of torchtitan's script. Peak is the maximum resident memory of the
process (the first row only imports torch and torchtitan), seconds are those of the whole process. Both must
write the same tensors. `import` converts back. The files need five times the checkpoint's size on disk.
"""

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from _harness import Bench, Measured, median, table
from safetensors import safe_open

from titan_async.config.device import ensure_device

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "titan_async" / "data" / "assets" / "shakespeare_bpe2048"

BENCH = Bench(__doc__, repeats=3, quick="a small model, by two ranks, in float32, once", width=110)
BENCH.add_argument("--recipe", default=str(ROOT / "toml_configs" / "dense_1b.toml"))
BENCH.add_argument("--folder", type=Path, help="for the files (default: a temporary one)")
BENCH.add_argument("--ranks", type=int, default=4)


def shapes_of(recipe: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the model's weights, by key."""
    ensure_device()
    from titan_async.config.recipe_file import resolve
    from titan_async.training.preflight.check import build_on_meta

    return {key: tuple(value.shape) for key, value in build_on_meta(resolve([recipe])).state_dict().items()}


def write_shards(rank: int, group: Any, shapes: dict[str, tuple[int, ...]], folder: str) -> None:
    """Writes this rank's part of a checkpoint in which every tensor is sharded, as under FSDP."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(0)  # all ranks draw the full tensors, and keep their shards
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
    """The commands to measure; each except the first writes a folder under `out`."""
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
    """The number of tensors in two folders, which must have the same tensors.

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
        raise SystemExit(f"{ours} and {theirs} have different tensors")
    for name in files[ours]:
        values = []
        for folder in (ours, theirs):
            with safe_open(files[folder][name], "pt") as file:
                values.append(file.get_tensor(name))
        mine, other = values
        if not torch.equal(mine.to(other.dtype), other):  # ours leaves routers in float32
            raise SystemExit(f"{name} differs between {ours} and {theirs}")
    return len(files[ours])


def _ranks(bench: Bench) -> int:
    return 2 if bench.quick else bench.arguments.ranks


@BENCH.part("convert", lambda bench: [_ranks(bench)])
def _convert(bench: Bench) -> Measured:
    recipe, dtypes = str(Path(bench.arguments.recipe).absolute()), ["float32", "bfloat16"]
    if bench.quick:
        recipe, dtypes = str(ROOT / "toml_configs" / "debug_moe_cpu.toml"), ["float32"]
    shapes, ranks = shapes_of(recipe), _ranks(bench)
    parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(dir=bench.arguments.folder) as name:
        folder, out = Path(name), Path(name, "out")
        checkpoint = folder / "run" / "checkpoint" / "step-1"
        checkpoint.parent.mkdir(parents=True)
        bench.pool.run(ranks, write_shards, shapes, str(checkpoint))
        for _ in range(bench.repeats):
            shutil.rmtree(out, ignore_errors=True)
            for case, argv in cases(recipe, folder / "run", out, dtypes).items():
                seconds, peak = measure(argv)
                found.setdefault(case, []).append({"seconds": seconds, "peak": peak})
            # In a separate process: the memory of this one counts in the peak of those that it starts.
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as checker:
                for dtype in dtypes:
                    folders = out / f"ours-{dtype}", out / f"theirs-{dtype}"
                    tensors = checker.submit(check_equal, *folders).result()
    columns = {
        "command": str,
        "peak GB": lambda case: f"{max(each['peak'] for each in found[case]) / 1e9:.2f}",
        "seconds": lambda case: f"{median([each['seconds'] for each in found[case]]):.1f}",
        "seconds, all": lambda case: " ".join(f"{each['seconds']:.1f}" for each in found[case]),
    }
    size = 4 * parameters
    title = f"{Path(recipe).name}: {parameters:,} parameters in {size / 1e9:.2f} GB, by {ranks} ranks"
    record = {
        "recipe": Path(recipe).name, "parameters": parameters, "ranks": ranks, "bytes": size, "cases": found,
        "tensors": tensors,
    }  # fmt: skip
    return Measured(record, [table(title, columns, found)])


if __name__ == "__main__":
    BENCH.main()
