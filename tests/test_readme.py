"""The README's examples do what it says, as they are written there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


PROGRAMS = blocks("python")


def test_there_are_examples():
    assert (len(PROGRAMS), len(blocks("toml"))) == (2, 2)


@pytest.mark.parametrize("program", PROGRAMS, ids=["schedule", "optimizer"])
def test_the_python_examples_learn(tmp_path, program):
    script = tmp_path / "example.py"
    script.write_text(program, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    done = subprocess.run(
        [*command, "--standalone", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    (loss,) = re.findall(r"^loss (\d\.\d+)$", done.stdout, flags=re.MULTILINE)
    assert float(loss) < 0.2  # without having learned, about 1.3


def resolved(tmp_path, monkeypatch, index):
    from titan_async.training.recipe_file import resolve

    monkeypatch.chdir(ROOT)
    (tmp_path / "mine.toml").write_text(blocks("toml")[index], encoding="utf-8")
    return resolve([str(tmp_path / "mine.toml")])


def test_the_recipe_example_resolves(tmp_path, monkeypatch):
    config = resolved(tmp_path, monkeypatch, 0)
    assert config.parallelism.pipeline_parallel_degree == 4 and config.optimizer.muon.lr == 0.01
    assert config.validator.dataloader.dataset_path == "my_texts/"


def test_the_example_of_groups_gives_each_parameter_an_optimizer(tmp_path, monkeypatch):
    import torch

    from titan_async.training.optimizer_preflight import check_optimizer

    config = resolved(tmp_path, monkeypatch, 1)
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

    (sizes,) = re.findall(r"`split_sizes = (\[.*?\])`", README)
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


def test_the_files_and_commands_it_names_exist():
    for name in ("run_train.sh", "run_tests.sh"):
        assert os.access(ROOT / name, os.X_OK)
    for path in re.findall(r"(?:toml_configs|recipes)/\w+\.\w+", README):
        assert (ROOT / path).is_file(), path
