"""`titan-async convert` on checkpoints that torch has written: the result, and user errors."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageWriter

from tests.support import forks
from tests.support.saved_runs import DENSE, MOE, random_weights, save_run
from tests.support.selection import slow
from titan_async.checkpoint.dcp import SavedTensors
from titan_async.cli.main import main
from titan_async.config.recipe_file import resolve_recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense run with checkpoints of steps 3 and 7."""
    folder = tmp_path_factory.mktemp("runs") / "dense"
    save_run(folder, step=3)
    save_run(folder, step=7)
    return folder


@pytest.fixture(scope="module")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of an MoE model, with averaged parameters."""
    folder = tmp_path_factory.mktemp("runs") / "moe"
    averaged = random_weights(MOE, seed=100)
    save_run(folder, MOE, others={f"train_state.ema_weights.{k}": v for k, v in averaged.items()
                                  if not k.endswith("expert_bias_E")})  # fmt: skip
    return folder


def expected(recipe: Path, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The whole model converted at once by torchtitan's adapter."""
    spec = resolve_recipe([str(recipe)]).config.model_spec
    return spec.state_dict_adapter(spec.model, None).to_hf(weights)


def written(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == value.dtype and torch.equal(ours[name], value) for name, value in theirs.items()
    )


def test_latest_checkpoint_is_converted_in_shards(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "hf"
    assert main(["convert", str(run_dir), str(out), "--max-shard-size", "4MB"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and captured.out == (
        f"{out}: LlamaForCausalLM of 3,443,136 parameters, newest weights of step 7 in float32, "
        "0.01 GB in 4 files\n"
    )
    assert same(written(out), expected(DENSE, random_weights(DENSE, seed=7)))
    assert all(file.stat().st_size < 4e6 + 10_000 for file in out.glob("*.safetensors"))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_named_step_is_converted(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["convert", f"{run_dir}/checkpoint/step-3/", str(tmp_path / "hf")]) == 0
    monkeypatch.chdir(run_dir / "checkpoint")
    assert main(["convert", "step-3", str(tmp_path / "from-there")]) == 0
    for name in ("hf", "from-there"):
        assert same(written(tmp_path / name), expected(DENSE, random_weights(DENSE, seed=3)))


def test_averaged_weights_are_converted_with_the_newest_buffers(moe_dir: Path, tmp_path: Path) -> None:
    assert main(["convert", str(moe_dir), str(tmp_path / "hf"), "--weights", "ema"]) == 0
    newest, averaged = random_weights(MOE, seed=7), random_weights(MOE, seed=100)
    mixed = {k: newest[k] if k.endswith("expert_bias_E") else averaged[k] for k in newest}
    assert same(written(tmp_path / "hf"), expected(MOE, mixed))


def test_tensors_are_not_kept(moe_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    read = SavedTensors.read

    def watched(saved: SavedTensors, key: str) -> torch.Tensor:
        assert not any(reference() is not None for reference in alive), "tensors pile up"
        value = read(saved, key)
        alive.append(weakref.ref(value))
        return value

    monkeypatch.setattr(SavedTensors, "read", watched)
    assert main(["convert", str(moe_dir), str(tmp_path / "hf")]) == 0
    assert len(alive) == 99


def test_dtype_conversion_keeps_routers(moe_dir: Path, tmp_path: Path) -> None:
    assert main(["convert", str(moe_dir), str(tmp_path / "hf"), "--dtype=bf16"]) == 0
    whole = expected(MOE, random_weights(MOE, seed=7))
    found = written(tmp_path / "hf")
    routers = [name for name in whole if ".mlp.gate." in name]
    assert len(routers) == 12
    rounded = {k: v if k in routers else v.to(torch.bfloat16) for k, v in whole.items()}
    assert same(found, rounded)
    assert json.loads((tmp_path / "hf/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_config_tokenizer_recipe_and_card_are_written(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    assert main(["convert", str(run_dir), str(out), "--training.seq_len", "128"]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md", "config.json", "generation_config.json", "model.safetensors", "recipe.toml",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    config = json.loads((out / "config.json").read_text())
    assert config["max_position_embeddings"] == 128
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 0)
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert 'recipe = "debug"' in card and "up to step\n7 of 300" in card
    assert resolve_recipe([str(out / "recipe.toml")]).config.training.seq_len == 128


def test_no_file_contains_a_local_path(tmp_path: Path) -> None:
    run, text = tmp_path / "run", tmp_path / "private" / "letters.txt"
    save_run(
        run, DENSE, "--dump_folder", str(run), "--dataloader.dataset_path", str(text),
        "--validator.dataloader.dataset_path", str(text), "--checkpoint.initial_load_path", str(tmp_path),
    )  # fmt: skip
    out = tmp_path / "hf"
    assert main(["convert", str(run), str(out)]) == 0
    assert str(tmp_path) in (run / "recipe.toml").read_text()
    for file in out.iterdir():
        content = file.read_bytes()
        assert str(tmp_path).encode() not in content and str(ROOT).encode() not in content, file.name
    # The recipe still resolves, and names the data set, because an import would otherwise use the default.
    config = resolve_recipe([str(out / "recipe.toml")]).config
    assert config.dataloader.dataset_path == config.validator.dataloader.dataset_path == "letters.txt"
    assert config.checkpoint.initial_load_path is None
    assert config.dump_folder == resolve_recipe([str(DENSE)]).base.dump_folder
    assert (out / "recipe.toml").read_text().rstrip() in (out / "README.md").read_text()


@pytest.mark.parametrize("recipe", [pytest.param(DENSE, id="dense"), slow(MOE, id="moe")])
def test_last_save_in_hf_format_is_converted(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `checkpoint.last_save_in_hf` torchtitan writes only the weights instead of a checkpoint."""
    run, last = tmp_path / "run", tmp_path / "run" / "checkpoint" / "step-9"
    save_run(run, recipe)
    weights = expected(recipe, random_weights(recipe, seed=9))
    writer = HuggingFaceStorageWriter(str(last), save_distributed=True, enable_consolidation=True)
    dcp.save(weights, storage_writer=writer, no_dist=True)
    assert main(["convert", str(run), str(tmp_path / "hf")]) == 0
    assert "newest weights of step 9 in float32" in capsys.readouterr().out
    assert same(written(tmp_path / "hf"), weights)
    assert main(["convert", str(run / "checkpoint/step-7"), str(tmp_path / "before")]) == 0
    assert same(written(tmp_path / "before"), expected(recipe, random_weights(recipe, seed=7)))
    capsys.readouterr()
    assert main(["convert", str(run), str(tmp_path / "stale"), "--weights", "stale"]) == 2
    assert "no last save of the model alone: use --weights newest" in capsys.readouterr().err
    next(last.glob("*.safetensors")).unlink()
    capsys.readouterr()
    assert main(["convert", str(run), str(tmp_path / "damaged")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_script_converts_as_well(run_dir: Path, tmp_path: Path) -> None:
    done = forks.run([sys.executable, ROOT / "tools/convert_checkpoint.py", run_dir, tmp_path / "hf"])
    assert (done.returncode, done.stderr) == (0, "")
    assert same(written(tmp_path / "hf"), expected(DENSE, random_weights(DENSE, seed=7)))


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["{run}"], "titan-async convert takes RUN_DIR[/checkpoint/step-N] OUT_DIR, not {run} (see"),
        (["{run}/checkpoint/step-5", "{out}"],
         "{run}/checkpoint has no complete checkpoint of step 5: use one of steps 3 and 7"),
        (["{out}", "{out}"], "{out} is not a folder: name that of a run, or of a checkpoint in it"),
        (["{bare}", "{out}"], "{bare} has no recipe.toml, which runs write: name the recipe with --recipe"),
        (["{bare}", "{out}", "--recipe", "{dense}"], "{bare}/checkpoint has no complete checkpoint: train"),
        (["{run}", "{out}", "--recipe", "absent.toml"], "absent.toml: no such file"),
        (["{run}", "{out}", "--recipe", "{moe}"],
         "{run}/checkpoint/step-7 does not match the recipe debug_moe: its tok_embeddings.weight is "
         "[2048, 192], where the recipe's is [2048, 128]; name the recipe that wrote it with --recipe"),
        (["{run}", "{bare}"], "{bare} exists already; remove it, or name another folder"),
        (["{run}", "{out}", "--weights", "stale"], "{run}/checkpoint/step-7 has no stale weights: only"),
        (["{run}", "{out}", "--weights", "ema"], "{run}/checkpoint/step-7 has no ema weights: set [ema]"),
        (["{run}", "{out}", "--weights", "old"], "--weights: invalid choice: 'old' (choose from"),
        (["{run}", "{out}", "--dtype", "int8"], "--dtype: invalid choice: 'int8' (choose from"),
        (["{run}", "{out}", "--max-shard-size", "big"], "--max-shard-size: must be a size such as 5GB"),
        (["{run}", "{out}", "--max-shard-size", "0"], "--max-shard-size: must be a size such as 5GB"),
        (["{run}", "{out}", "--dtpye", "bf16"], "unknown flag --dtpye; did you mean --dtype?"),
        (["{run}", "{out}", "--recipe"], "--recipe: expected one argument (see titan-async convert --help)"),
        (["{run}", "{out}", "--dtype", "bf16", "--dtype", "fp16"], "--dtype: given twice"),
        (["{run}", "{out}", "--hf_assets_path", "{bare}"], "The folder {bare} has no tokenizer.json: set"),
    ],
)  # fmt: skip
def test_user_error_is_one_line(
    argv: list[str], sentence: str, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"run": run_dir, "out": tmp_path / "out", "bare": tmp_path / "bare", "dense": DENSE, "moe": MOE}
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "note").write_text("")
    assert main(["convert", *(word.format(**names) for word in argv)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(sentence.format(**names))
    assert [path.name for path in tmp_path.iterdir()] == ["bare"]


def test_surplus_and_missing_tensors_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {"layers.6.ffn_norm.weight": torch.ones(192)}
    save_run(tmp_path / "run", others=more)
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert (
        "it has layers.6.ffn_norm.weight, which the recipe's model does not have" in capsys.readouterr().err
    )
    dcp.save({"norm.weight": torch.ones(192)}, checkpoint_id=tmp_path / "run/checkpoint/step-8")
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "it has no tok_embeddings.weight;" in capsys.readouterr().err


def test_incomplete_averages_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(
        tmp_path / "run", others={"train_state.ema_weights.tok_embeddings.weight": torch.ones(2048, 192)}
    )
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--weights", "ema"]) == 2
    assert "it has no train_state.ema_weights.layers.0" in capsys.readouterr().err


class Hostile:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("verb", ["convert", "sample"])
def test_pickled_code_is_not_run(
    verb: str, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run_dir, tmp_path / "run")
    index = FileSystemReader(run_dir / "checkpoint/step-7").read_metadata()
    index.planner_data = Hostile(tmp_path / "ran")
    (tmp_path / "run/checkpoint/step-7/.metadata").write_bytes(pickle.dumps(index))
    assert main([verb, str(tmp_path / "run"), *([str(tmp_path / "out")] if verb == "convert" else [])]) == 2
    assert "was not loaded: it names posix.mkdir" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_missing_file_is_a_user_error(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run_dir, tmp_path / "run")
    (tmp_path / "run/checkpoint/step-7/__0_0.distcp").unlink()
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and ": __0_0.distcp is missing; use another" in captured.err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_free_space_is_checked_first(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10**7))
    assert main(["convert", str(run_dir), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        f"{tmp_path}/out needs 0.01 GB, and its disk has 0.01 GB available: free space, or name a folder "
        "on another disk\n"
    )
    assert not any(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from titan_async.config.device import ensure_device
ensure_device()
from titan_async.huggingface.convert import convert
from titan_async.huggingface.saved_model import open_saved
def progress(done, total):
    if done > total / 2:
        os.kill(os.getpid(), signal.SIGKILL)
convert(open_saved(sys.argv[1]), sys.argv[2], max_shard_size=10**6, progress=progress)
"""


def test_killed_conversion_leaves_a_partial_folder_that_the_next_one_replaces(
    run_dir: Path, tmp_path: Path
) -> None:
    done = forks.run([sys.executable, "-c", KILLED, run_dir, tmp_path / "hf"])
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".hf.partial"]
    assert len(list((tmp_path / ".hf.partial").glob("*.safetensors"))) > 1
    assert main(["convert", str(run_dir), str(tmp_path / "hf")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert same(written(tmp_path / "hf"), expected(DENSE, random_weights(DENSE, seed=7)))
    assert len(list((tmp_path / "hf").iterdir())) == 7


FULL = """
import resource, sys
from titan_async.checkpoint.dcp import SavedTensors
from titan_async.cli.main import main
run, out = sys.argv[1:]
assert main(["convert", run, out + "/hf"]) == 0
resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, resource.RLIM_INFINITY))
sys.exit(10 * main(["convert", run, out + "/more"]) + main(["import", out + "/hf", out + "/run"]))
"""


def test_full_disk_is_a_user_error(run_dir: Path, tmp_path: Path) -> None:
    done = forks.run([sys.executable, "-c", FULL, run_dir, tmp_path])
    assert (done.returncode, done.stderr) == (
        22,
        "".join(
            f"cannot write {tmp_path}/{name}: File too large; free space, or name a folder on another disk\n"
            for name in ("more", "run")
        ),
    )
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
