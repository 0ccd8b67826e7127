"""The README's examples do what it says, as they are written there."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    return found


def test_the_python_example_learns(tmp_path):
    script = tmp_path / "example.py"
    script.write_text(block("python"), encoding="utf-8")
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


def test_the_recipe_example_resolves(tmp_path, monkeypatch):
    from titan_async.training.recipe_file import resolve

    monkeypatch.chdir(ROOT)
    (tmp_path / "mine.toml").write_text(block("toml"), encoding="utf-8")
    config = resolve([str(tmp_path / "mine.toml")])
    assert config.parallelism.pipeline_parallel_degree == 4 and config.optimizer.muon.lr == 0.01
    assert config.validator.dataloader.dataset_path == "my_texts/"


def test_the_files_and_commands_it_names_exist():
    for name in ("run_train.sh", "run_tests.sh"):
        assert os.access(ROOT / name, os.X_OK)
    for path in re.findall(r"(?:toml_configs|recipes)/\w+\.\w+", README):
        assert (ROOT / path).is_file(), path
