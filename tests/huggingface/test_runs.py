"""Export and import of runs on several ranks.

A run takes seconds to start, so all tests share few of them. The MoE run on four ranks is slow:
checkpoint/test_dcp.py reads sharded tensors, and test_convert.py converts experts.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from tests.support.saved_runs import DENSE, MOE, logits, torchtitan_model
from tests.support.selection import slow
from tests.support.training import train
from titan_async.cli.main import main
from titan_async.config.recipe_file import resolve_recipe

STEPS, LENGTH = 4, 64

FLAGS = ("--training.steps", STEPS, "--validator.no-enable", "--lr_scheduler.warmup_steps", 1,
         "--checkpoint.interval", 1, "--checkpoint.keep_latest_k", 0)  # fmt: skip
SHARDED = ("--parallelism.data_parallel_shard_degree", 2, "--training.local_batch_size", 4,
           "--parallelism.expert_parallel_degree", 2)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run that is trained once.

    "dense" is the default recipe on two stages; "moe" has two ranks on each, with sharded weights and expert
    parallelism.
    """

    @functools.cache
    def trained(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        recipe, flags = {"dense": (DENSE, ()), "moe": (MOE, SHARDED)}[name]
        run = train(folder, *FLAGS, *flags, recipe=recipe)
        assert run.status == 0, run.err
        return folder / "run"

    return trained


@pytest.fixture(scope="module")
def converted(
    trained: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """Converts checkpoints of either run, once."""
    folder = tmp_path_factory.mktemp("converted")

    def convert(name: str, weights: str = "newest", step: int = STEPS) -> Path:
        out = folder / f"{name}-{weights}-{step}"
        if not out.exists():
            run = trained(name) / "checkpoint" / f"step-{step}"
            assert main(["convert", str(run), str(out), "--weights", weights]) == 0
        return out

    return convert


NAMES = pytest.mark.parametrize(
    ("name", "recipe"), [pytest.param("dense", DENSE, id="dense"), slow("moe", MOE, id="moe")]
)


def test_run_saves_its_recipe(trained: Callable[[str], Path]) -> None:
    ours = resolve_recipe([str(trained("dense") / "recipe.toml")]).config
    assert (ours.training.steps, ours.training.seq_len, ours.checkpoint.interval) == (STEPS, LENGTH, 1)
    assert ours.model_spec.flavor == "debug-3.4M"


@NAMES
def test_transformers_computes_the_same_logits_for_a_run(
    name: str,
    recipe: Path,
    trained: Callable[[str], Path],
    converted: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transformers = pytest.importorskip("transformers")
    model = torchtitan_model(resolve_recipe([str(recipe)]).config.model_spec, LENGTH, monkeypatch)
    weights = model.state_dict()
    dcp.load(weights, checkpoint_id=trained(name) / "checkpoint" / f"step-{STEPS}")
    model.load_state_dict(weights)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        converted(name), dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    tokens = torch.randint(2048, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    ours = logits(model, tokens)
    with torch.no_grad():
        theirs = loaded.eval()(tokens).logits
    assert ours.std() > 0.5
    assert float((ours - theirs).abs().max()) < 1e-4


@NAMES
def test_stale_weights_are_one_update_older(name: str, recipe: Path, converted: Callable[..., Path]) -> None:
    stale = load_file(converted(name, "stale") / "model.safetensors")
    before = load_file(converted(name, step=STEPS - 1) / "model.safetensors")
    newest = load_file(converted(name) / "model.safetensors")
    assert stale.keys() == before.keys() == newest.keys()
    assert all(torch.equal(stale[key], value) for key, value in before.items())
    moved = [key for key, value in newest.items() if not torch.equal(stale[key], value)]
    assert len(moved) > 0.9 * len(newest)


def test_transformers_generates_the_text_that_sample_prints(
    trained: Callable[[str], Path], converted: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    write = transformers.pipeline("text-generation", model=str(converted("dense")))
    prompt, count = "ROMEO: I love", 24
    theirs = write(prompt, max_new_tokens=count, do_sample=False)[0]["generated_text"]
    assert theirs.startswith(prompt) and len(theirs) > len(prompt) + count
    capsys.readouterr()
    greedy = ("--temperature", "0", "--tokens", str(count))
    assert main(["sample", str(trained("dense")), "--prompt", prompt, *greedy]) == 0
    assert capsys.readouterr().out == theirs + "\n"


def test_imported_model_trains_from_its_weights(converted: Callable[..., Path], tmp_path: Path) -> None:
    model = converted("dense")
    flags = ("--training.steps", "1", "--training.seq_len", str(LENGTH))
    assert main(["import", str(model), str(tmp_path / "run"), *flags]) == 0
    # One step on the same text as a new run's first step, whose loss is ln(2048) + 0.5.
    run = train(tmp_path, "--checkpoint.keep_latest_k", 0, recipe=tmp_path / "run" / "recipe.toml")
    assert run.status == 0, run.err
    assert run.steps == [1] and run.losses[0] < 7.8
    # The first batch has used the imported weights, and the second would use them.
    stale = ["--weights", "stale"]
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "stale"), *stale]) == 0
    assert (tmp_path / "stale/model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "newest")]) == 0
    newest = load_file(tmp_path / "newest/model.safetensors")
    assert not torch.equal(newest["lm_head.weight"], load_file(model / "model.safetensors")["lm_head.weight"])


def test_a_file_that_a_user_has_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_async.training.process.run_folder import write_recipe

    monkeypatch.chdir(tmp_path)
    resolved = resolve_recipe([str(DENSE), "--dump_folder", "run", "--training.steps", "5"])
    write_recipe(resolved)
    assert [path.name for path in Path("run").iterdir()] == ["recipe.toml"]
    again = resolve_recipe(["run/recipe.toml"])
    assert tomllib.loads(again.to_toml()) == tomllib.loads(resolved.to_toml())
    more = resolve_recipe([str(DENSE), "--dump_folder", "run", "--training.steps", "9"])
    write_recipe(more)
    assert resolve_recipe(["run/recipe.toml"]).config.training.steps == 9
    Path("run/recipe.toml").write_text('recipe = "debug"  # mine\n')
    write_recipe(resolved)
    assert Path("run/recipe.toml").read_text() == 'recipe = "debug"  # mine\n'
