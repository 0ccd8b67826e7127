"""The layer rule: which layers may import which, and where private names of torch and torchtitan may be used.

The code is parsed, so imports inside functions count as well.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import titan_async

ROOT = Path(titan_async.__file__).parents[1]
PACKAGE = ROOT / "titan_async"

LAYERS = (
    "pipelining",
    "optim",
    "monitor",
    "data",
    "checkpoint",
    "config",
    "training",
    "huggingface",
    "planning",
    "rehearsal",
    "cli",
)
"""Each may import the ones before it."""

BASE = ("errors", "file_io", "local_tensors", "_group_internals")
"""Modules below all layers: the error of users, file I/O, shards of DTensors, process groups."""

BARE_LAYERS = ("pipelining", "optim")
"""These import only torch, and no other layer."""

PRIVATE_NAMES_ALLOWED = {
    # Operations on lists of tensors, which have no public names in torch. The hooks are those of
    # `torch.optim.Optimizer`, the base class.
    "optim/gradient_status.py": {"_foreach_norm"},
    "optim/feedback_history.py": {"_foreach_add_", "_foreach_copy_", "_foreach_sub"},
    "optim/error_feedback.py": {
        "_foreach_copy_",
        "_optimizer_load_state_dict_post_hooks",
        "_optimizer_load_state_dict_pre_hooks",
        "_optimizer_state_dict_post_hooks",
        "_optimizer_state_dict_pre_hooks",
    },
    "optim/lion.py": {"_foreach_add_", "_foreach_mul", "_foreach_mul_", "_foreach_sign_"},
    "pipelining/execution.py": {"_PipelineStageBase", "_foreach_div_"},
    "pipelining/gradient_norm.py": {"_PipelineStageBase", "_foreach_mul_", "_foreach_norm"},
    "pipelining/shape_inference.py": {"_PipelineStageBase"},
    "pipelining/p2p_channels.py": {"_PipelineStageBase"},
    "pipelining/sharded_versions.py": {"_foreach_copy_"},
    "pipelining/tied_parameters.py": {"_PipelineStageBase"},
    "pipelining/weight_versions.py": {"_foreach_copy_"},
    "training/checkpoint/ema.py": {"_foreach_copy_"},
    # Attributes of `PipelineScheduleSingle` for its subclasses, and the type of its stage.
    "pipelining/schedule.py": {
        "_PipelineStageBase",
        "_loss_fn",
        "_merge_outputs",
    },
    # `os._exit` is public.
    "cli/elastic.py": {"_exit"},
    "training/process/preemption.py": {"_exit"},
    # The key of a rank's position in the state of the base class.
    "training/dataloader.py": {"_rank_id"},
    # The type in the annotations of torchtitan's functions.
    "training/pipeline/schedule.py": {"_PipelineSchedule"},
    # The public class is in a private module.
    "rehearsal/rank.py": {"_python_dispatch"},
}
"""Private names of torch or torchtitan that a module other than the `_..._internals` ones may use."""


def sources() -> list[Path]:
    found = sorted(PACKAGE.rglob("*.py"))
    assert len(found) > 20
    return found


def layer_of(path: Path) -> str:
    """The layer of a source file; `BASE` and "" (the package itself) are below all layers."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every module that a file imports anywhere, with its line; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: imports are absolute here"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("importlib.import_module", "__import__")
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, node.args[0].value


def may_import(layer: str, target: str) -> bool:
    if target in BASE or target == "":
        return True
    if layer not in LAYERS:
        return False
    if layer in BARE_LAYERS:
        return target == layer
    return target in LAYERS[: LAYERS.index(layer) + 1]


def wrong_layers(path: Path) -> list[str]:
    wrong = []
    for line, name in imports(path):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top == "titan_async" and not (PACKAGE / target).with_suffix(".py").is_file():
            # `from titan_async import __version__` names no layer; recipes are not a layer.
            target = target if (PACKAGE / target).is_dir() and target else ""
        if top == "titan_async" and not may_import(layer_of(path), target):
            wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    return wrong


def test_every_package_is_a_layer() -> None:
    found = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert found <= set(LAYERS)
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", *BASE}


def test_dependencies_point_to_earlier_layers() -> None:
    assert [line for path in sources() for line in wrong_layers(path)] == []


def test_pipelining_and_optim_import_only_torch() -> None:
    standard = sys.stdlib_module_names
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for layer in BARE_LAYERS
        for path in sorted((PACKAGE / layer).rglob("*.py"))
        for line, name in imports(path)
        if (top := name.partition(".")[0]) not in ("torch", "titan_async")
        and top not in standard
        # An optional extra, imported where it is used.
        and (path.name, top) != ("symmetric_matmul.py", "quack")
    ]
    assert wrong == []


def test_only_upper_layers_import_torchtitan() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources()
        if layer_of(path) not in ("config", "training", "huggingface", "planning", "rehearsal", "cli")
        for line, name in imports(path)
        if name.partition(".")[0] == "torchtitan"
    ]
    assert wrong == []


@pytest.mark.slow
def test_importing_a_bare_layer_loads_only_torch() -> None:
    # Each layer in a fork of an interpreter that has torch, whose import takes seconds.
    program = f"""
import importlib, os, sys, torch

def check(layer):
    before = set(sys.modules)
    importlib.import_module(f"titan_async.{{layer}}")
    others = {{"torchtitan", "datasets", "tokenizers", "pydantic", "rich"}}
    wrong = others & (set(sys.modules) - before)
    for name in sys.modules:
        top, _, rest = name.partition(".")
        if top == "titan_async" and rest and rest.split(".")[0] not in (layer, *{BASE}):
            wrong.add(name)
    return wrong

for layer in {BARE_LAYERS}:
    if not (child := os.fork()):
        wrong = check(layer)
        sys.exit(f"{{layer}} loads {{wrong}}" if wrong else 0)
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def is_private(name: str) -> bool:
    # The methods of named tuples are public despite their underscores.
    return name.startswith("_") and not name.startswith("__") and name not in ("_replace", "_asdict")


def own_private_names() -> set[str]:
    """Private names that the project defines itself, as functions, classes, variables or attributes."""
    own: set[str] = set()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.arg):
                own.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("__setstate__"):
                # `ErrorFeedback` sets its attributes with `__setstate__`.
                own.update(
                    key.value
                    for argument in node.args
                    if isinstance(argument, ast.Dict)
                    for key in argument.keys
                    if isinstance(key, ast.Constant)
                )
    return {name for name in own if is_private(name)}


def foreign_private_names(path: Path, own: set[str]) -> Iterator[tuple[int, str]]:
    """Private names of other packages: imported from torch or torchtitan, or attributes that the project does
    not define."""
    for line, name in imports(path):
        parts = name.split(".")
        if parts[0] in ("torch", "torchtitan"):
            yield from ((line, part) for part in parts if is_private(part))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield node.lineno, node.attr
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("getattr", "hasattr", "setattr")
            and isinstance(node.args[1], ast.Constant)
            and is_private(str(node.args[1].value))
            and node.args[1].value not in own
        ):
            yield node.lineno, node.args[1].value


def test_private_names_of_libraries_are_in_the_internals_modules() -> None:
    own = own_private_names()
    wrong, used = [], {}
    for path in sources():
        if path.stem.startswith("_") and path.stem.endswith("_internals"):
            continue
        shown = path.relative_to(PACKAGE).as_posix()
        for line, name in foreign_private_names(path, own):
            used.setdefault(shown, set()).add(name)
            if name not in PRIVATE_NAMES_ALLOWED.get(shown, set()):
                wrong.append(f"{shown}:{line} uses {name}")
    assert wrong == []
    stale = {shown: names - used.get(shown, set()) for shown, names in PRIVATE_NAMES_ALLOWED.items()}
    assert not any(stale.values()), f"PRIVATE_NAMES_ALLOWED has unused names: {stale}"
