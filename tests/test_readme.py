"""The examples in the README and docs/ work as written."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.support import forks
from titan_async.cli.main import VERBS

ROOT = Path(__file__).parent.parent
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
}
README = PAGES["README.md"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], flags=re.DOTALL)


(SCHEDULE,) = blocks("docs/loop.md", "python")
OPTIMIZER, SHARDED = blocks("docs/optimizers.md", "python")
(OVERLAP,) = blocks("docs/overlap.md", "python")


@pytest.mark.parametrize(
    ("program", "processes"),
    [(SCHEDULE, 2), (OPTIMIZER, 1), (SHARDED, 2), (OVERLAP, 2)],
    ids=["schedule", "optimizer", "sharded", "overlap"],
)
def test_python_examples_train(tmp_path, program, processes):
    assert ("torchrun --nproc-per-node 2" in program.partition("\n")[0]) == (processes == 2)
    script = tmp_path / "example.py"
    script.write_text(program, encoding="utf-8")
    command = [sys.executable]
    if processes > 1:
        command += [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--master-port",
            "0",
            "--standalone",
        ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = forks.run([*command, script], env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    (loss,) = re.findall(r"^loss (\d\.\d+)$", done.stdout, flags=re.MULTILINE)
    assert float(loss) < 0.2  # about 1.3 without training


def resolved(tmp_path, monkeypatch, text, *flags):
    from titan_async.config.recipe_file import resolve

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    return resolve(["mine.toml", *flags])


def test_the_recipe_example_resolves(tmp_path, monkeypatch):
    text, _, _ = blocks("docs/recipes.md", "toml")
    config = resolved(tmp_path, monkeypatch, text)
    assert config.parallelism.pipeline_parallel_degree == 4 and config.optimizer.muon.lr == 0.01
    assert config.validator.dataloader.dataset_path == "my_texts/"


def test_the_example_of_a_recipe_function_resolves(tmp_path, monkeypatch):
    (program,) = blocks("docs/recipes.md", "python")
    _, _, text = blocks("docs/recipes.md", "toml")
    (module,) = re.findall(r"titan-async train wide.toml --module (\w+)`", PAGES["docs/recipes.md"])
    assert f"`{module}.py`" in PAGES["docs/recipes.md"]
    (tmp_path / f"{module}.py").write_text(program, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    config = resolved(tmp_path, monkeypatch, text, "--module", module)
    assert (config.model_spec.flavor, config.training.steps) == ("wide", 100)
    assert len(config.model_spec.model.layers) == 4


def test_the_examples_of_torchtitans_configurations_resolve(tmp_path, monkeypatch):
    as_it_is, with_muon = blocks("docs/torchtitan.md", "toml")
    (module,) = re.findall(r"^titan-async train my.toml --module (\w+)$", PAGES["docs/torchtitan.md"], re.M)
    config = resolved(tmp_path, monkeypatch, as_it_is, "--module", module)
    assert config.parallelism.pipeline_parallel_schedule == "Async2BW"
    assert (
        config.optimizer.error_feedback.enable and config.optimizer.param_groups[0].optimizer_name == "AdamW"
    )
    groups = resolved(tmp_path, monkeypatch, with_muon, "--module", module).optimizer.resolved_groups()
    assert [group.optimizer_name for group in groups] == ["Muon", "AdamW"]


def test_the_example_of_own_text_resolves(tmp_path, monkeypatch):
    (text,) = blocks("docs/data.md", "toml")
    config = resolved(tmp_path, monkeypatch, text)
    assert config.dataloader.dataset_path == config.validator.dataloader.dataset_path == "my_texts/"
    assert config.dataloader.validation_fraction == 1 / 20  # "of every 20 documents one"


def test_the_example_of_groups_covers_all_parameters(tmp_path, monkeypatch):
    import torch

    from titan_async.training.preflight.optimizer import check_optimizer

    _, text, _ = blocks("docs/recipes.md", "toml")
    config = resolved(tmp_path, monkeypatch, text)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    check_optimizer(config.optimizer, model)
    groups = {
        (type(getattr(optimizer, "optimizer", optimizer)).__name__, name)
        for optimizer in config.optimizer.build(model_parts=[model])
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    assert len(groups) == len(list(model.parameters()))
    for optimizer, name in groups:
        last = "AdamW" if name in ("tok_embeddings.weight", "lm_head.weight") else "Muon"
        assert optimizer == ("Lion" if "norm" in name else last)


def test_the_split_of_a_fused_projection_is_that_of_torchtitan():
    import torch
    from torchtitan.models.common import Linear
    from torchtitan.models.common.attention import FusedQKVLinear

    (sizes,) = re.findall(r"`split_sizes = (\[.*?\])`", PAGES["docs/recipes.md"])
    config = FusedQKVLinear.Config(
        head_dim=64, n_heads=4, n_kv_heads=2, wqkv=Linear.Config(in_features=8, out_features=512)
    )
    fused = config.build()
    with torch.no_grad():
        fused.wqkv.weight.copy_(torch.randn(512, 8))
    parts = fused.wqkv.weight.split(json.loads(sizes))
    saved = fused.state_dict()
    for name, numbers in (("wq", (0, 3)), ("wk", (1, 4)), ("wv", (2, 5))):
        assert torch.equal(saved[f"{name}.weight"], torch.cat([parts[number] for number in numbers]))


def test_named_files_and_commands_exist():
    for name in ("run_train.sh", "run_tests.sh", "tools/build_docs.sh"):
        assert os.access(ROOT / name, os.X_OK)
    for page, text in PAGES.items():
        for path in re.findall(r"\b(?:toml_configs|recipes|tools|tests|titan_async)/[\w/]+\.\w+", text):
            assert (ROOT / path).is_file(), f"{page} names {path}"
        for verb in re.findall(r"^ +titan-async ([\w-]+)", text, re.MULTILINE):
            assert verb in VERBS, f"{page} names titan-async {verb}"


def test_results_in_the_readme_equal_those_of_other_pages():
    def rows(text):
        cells = (line.strip("|").split("|") for line in text.splitlines() if line.startswith("|"))
        return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in cells}

    told = rows(README.partition("trains the synchronous baseline")[2].partition("\n## ")[0])
    studied = PAGES["docs/study.md"]
    for optimizer in ("AdamW", "Muon"):
        cells = [
            re.search(
                rf"\| {optimizer} \| {arm} \|(?: [^|]+ \|){{2}} ([^|]+?)(?: \(\d seeds\))? \|", studied
            )[1]
            for arm in ("synchronous, loss", "delayed, gap", r"delayed \+ EF, gap")
        ]
        start = re.search(
            rf"\| {optimizer} \| 3000 \| synchronous, EF \|.*\| ([^|]+?)(?: \(\d seeds\))? \|\n", studied
        )[1]
        assert told[optimizer] == [*cells, start]
    recipe = " ".join((ROOT / "recipes" / "debug.py").read_text(encoding="utf-8").split())
    for losses in (told["1F1B"][0], told["Async2BW, error feedback"][0]):
        assert losses in recipe

    # The benchmark of sleeping stages, with the lookahead of each column.
    benchmark = PAGES["docs/benchmarks.md"]
    slept, shown = rows(benchmark.partition("## Lookahead")[0]), rows(README.partition("## Two commands")[0])
    others = [row for name, row in slept.items() if name not in ("", "---", "1F1B", "Async2BW")]
    best = [max(cell for cell in column if cell != "-") for column in zip(*others, strict=True)]
    for name, found in (
        ("1F1B", slept["1F1B"]),
        ("best other schedule of torch", best),
        ("Async2BW", slept["Async2BW"]),
    ):
        for rounded, exact in zip(shown[name], found, strict=True):
            assert abs(float(rounded) - float(exact)) <= 0.00501
    assert re.search(r"`lookahead` 0, 0, (\d), 0 and (\d)", benchmark).groups() == (
        re.search(r"`lookahead` of (\d) and (\d)", README).groups()
    )


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_have_targets(page):
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", PAGES[page]):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page} links to {target}"
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), f"{page} links to {target}"


def test_named_flags_of_recipes_exist(monkeypatch):
    from titan_async.config.recipe_file import resolve

    config = resolve(["debug_cpu.toml"])
    flags = {
        (page, flag)
        for page, text in PAGES.items()
        for flag in re.findall(r"--([a-z_]+(?:\.[a-z_-]+)+)", text)
    }
    assert len({flag for _, flag in flags}) >= 5
    for page, flag in flags:
        section = config
        for part in flag.replace(".no-", ".").split("."):
            assert hasattr(section, part), f"{page} names --{flag}"
            section = getattr(section, part)
