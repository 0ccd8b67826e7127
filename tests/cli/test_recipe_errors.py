"""Errors of recipe files and flags: one line with the place, the cause and the fix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import RECIPE
from titan_async.config.recipe_file import Resolved, resolve_recipe
from titan_async.errors import UserError

WRONG_FILES = [
    ("[training]\nstesp = 3", "x.toml:3: unknown key training.stesp; did you mean training.steps?"),
    ("[traning]\nsteps = 3", "x.toml:2: unknown section traning; did you mean training?"),
    ("stepz = 3", "x.toml:2: unknown key stepz"),
    (
        "[training]\npipeline_parallel_degree = 2",
        "x.toml:3: unknown key training.pipeline_parallel_degree; "
        "did you mean parallelism.pipeline_parallel_degree?",
    ),
    (
        "[loss.loss_fn]\nglobal_vocab = 2",
        "x.toml:3: unknown key loss.loss_fn.global_vocab; did you mean loss.loss_fn.global_vocab_size?",
    ),
    ("training = 3", "x.toml:2: training is a section, and cannot be set to a value (3)"),
    ("[training.steps]\na = 1", "x.toml:2: training.steps is a table: input should be a valid integer"),
    ('[training]\nsteps = "abc"', 'x.toml:3: training.steps is "abc": input should be a valid integer'),
    ('[training]\nsteps = "3"', 'x.toml:3: training.steps is "3": input should be a valid integer'),
    ("[training]\nsteps = 3.5", "x.toml:3: training.steps is 3.5: input should be a valid integer"),
    ("[training]\nsteps = true", "x.toml:3: training.steps is true: input should be a valid integer"),
    (
        "[training]\nmax_norm = true",
        "x.toml:3: training.max_norm is true: input should be a valid number or "
        "input should be a valid integer",
    ),
    ("[compile]\nenable = 1", "x.toml:3: compile.enable is 1: input should be a valid boolean"),
    (
        "[debug]\nseed = 1979-05-27",
        'x.toml:3: debug.seed is 1979-05-27: input should be a valid integer, or "none"',
    ),
    (
        '[training]\ndtype = "fp8"',
        """x.toml:3: training.dtype is "fp8": input should be 'bfloat16' or 'float32\'""",
    ),
    (
        '[compile]\ncomponents = "model"',
        'x.toml:3: compile.components is "model": input should be a valid array',
    ),
    (
        '[compile]\ncomponents = [\n  "model",\n  3,\n]\nenable = true',
        "x.toml:3: compile.components has the item 3: input should be a valid string",
    ),
    (
        '[optimizer.param_groups.0.optimizer_kwargs]\n# comment\nlr = "x"',
        'x.toml:4: optimizer.param_groups.0.optimizer_kwargs.lr is "x": '
        "input should be a valid integer or input should be a valid number",
    ),
    (
        '[optimizer.param_groups.1]\npattern = "x"',
        "x.toml:2: optimizer.param_groups.1 does not exist: there are 1, counted from 0",
    ),
    ('[[optimizer.param_groups]]\npattern = ".*"', "x.toml:2: optimizer.param_groups.0 lacks optimizer_name"),
    (
        '[[optimizer.param_groups]]\npattern = ".*"\noptimizer_name = "AdamW"\n'
        '[[optimizer.param_groups]]\npatern = ".*"',
        "x.toml:6: unknown key optimizer.param_groups.1.patern; "
        "did you mean optimizer.param_groups.1.pattern?",
    ),
    (
        "[optimizer]\nparam_groups = 3",
        "x.toml:3: optimizer.param_groups is a list of tables: in the file, write [[optimizer.param_groups]]",
    ),
    (
        '[override]\nimports = ["os.system"]',
        "x.toml:3: override.imports names code to run, which a recipe file may not do; "
        "give it as the flag --override.imports",
    ),
    ('module = "os"', "x.toml:2: module names code to import; give it as the flag --module"),
    ("model_spec = 1", "x.toml:2: model_spec is the model itself and cannot be set; choose another recipe"),
    (
        '[profiler]\ntrace_post_processor = "x"',
        "x.toml:3: profiler.trace_post_processor cannot be set here; choose another recipe",
    ),
    (
        '[activation_checkpoint]\nmode = "ful"',
        'x.toml:3: activation_checkpoint.mode must be one of "selective", "full", "memory_budget", "none", '
        'not "ful"',
    ),
    (
        "[activation_checkpoint]\nmemory_budget = 0.3",
        "x.toml:3: activation_checkpoint.memory_budget belongs to activation_checkpoint.mode "
        '"memory_budget", which is not set',
    ),
    (
        'activation_checkpoint = "memory_budget"',
        "x.toml: Memory budget activation checkpointing requires the model to be compiled: "
        "set --compile.enable and include 'model' in --compile.components.",
    ),
    (
        "[parallelism]\npipeline_parallel_degree = 2\n[training]\ndisable_cuda_graphs = false",
        "x.toml: CUDA graphs do not support pipeline parallelism yet. Set --training.disable_cuda_graphs.",
    ),
    ("x = [1,", "x.toml:2: not valid TOML: invalid value at the end of the file"),
    ("[training]\nsteps = \nx = 1", "x.toml:3: not valid TOML: invalid value"),
    ("recipe = 3", "x.toml:2: not valid TOML: cannot overwrite a value at the end of the file"),
    ("include = 3", 'x.toml:2: include must be a string, as in include = "..."'),
    ('include = "x.toml"', "x.toml:2: x.toml includes this file again; remove one of the includes"),
    ('include = "other.toml"', "x.toml:2: the included file other.toml does not exist"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_FILES)
def test_wrong_file(recipe_in: Callable[..., Resolved], text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        recipe_in(RECIPE + text)
    assert str(caught.value) == message


WRONG_FLAGS = [
    ("--training.stesp 3", "unknown flag --training.stesp; did you mean --training.steps?"),
    ("--traning.steps 3", "unknown flag --traning.steps; did you mean --training.steps?"),
    ("--training.steps.x 3", "unknown flag --training.steps.x; did you mean --training.steps?"),
    ("--zzz 3", "unknown flag --zzz"),
    ("--training.steps", "--training.steps needs a value of type int"),
    (
        "--training.steps=abc",
        '--training.steps is "abc": input should be a valid integer, unable to parse string as an integer',
    ),
    ("--training.steps 5 6", "--training.steps takes one value, not 2: 5 6"),
    ("--training.steps=5 6", "unexpected argument 6; every field is set by --section.key value"),
    ("-x", "unknown flag -x; flags start with two dashes"),
    (
        "--compile.enable maybe",
        '--compile.enable is "maybe": input should be a valid boolean, unable to interpret input',
    ),
    ("--compile.no-enable true", "unknown flag --compile.no-enable; did you mean --compile.enable?"),
    ("--training.no-steps", "unknown flag --training.no-steps; did you mean --training.steps?"),
    ("--training.dtype fp8", """--training.dtype is "fp8": input should be 'bfloat16' or 'float32\'"""),
    ("--training 3", '--training is a section, and cannot be set to a value ("3")'),
    ("--dryrun", "unknown flag --dryrun; did you mean --dry-run?"),
    ("--dry-run yes", "--dry-run takes no value, not yes"),
    ("--model_spec x", "--model_spec is the model itself and cannot be set; choose another recipe"),
    (
        "--optimizer.param_groups.0.optimizer_kwargs.lr fast",
        '--optimizer.param_groups.0.optimizer_kwargs.lr is "fast": '
        "input should be a valid integer or input should be a valid number",
    ),
    (
        "--activation_checkpoint.memory_budget 0.2 --activation_checkpoint none",
        "--activation_checkpoint.memory_budget has no use while --activation_checkpoint.mode is "
        '"none"; set --activation_checkpoint.mode to one of "selective", "full", "memory_budget"',
    ),
]


@pytest.mark.parametrize(("flags", "message"), WRONG_FLAGS)
def test_wrong_flags(recipe_in: Callable[..., Resolved], flags: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        recipe_in(RECIPE, *flags.split())
    assert str(caught.value) == message


def test_file_that_is_not_utf8(recipe_in: Callable[..., Resolved]) -> None:
    with pytest.raises(UserError, match=r"^x\.toml:2: not UTF-8 text; save the file as UTF-8$"):
        recipe_in(RECIPE.encode() + b'dump_folder = "\xff"')


def test_missing_file_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    with pytest.raises(UserError, match=r"^absent\.toml: no such file$"):
        resolve_recipe(["absent.toml"])
    with pytest.raises(UserError, match=r"^folder: this is a directory; name a recipe file \(\.toml\)$"):
        resolve_recipe(["folder"])
    with pytest.raises(
        UserError, match=r"^the first argument must be a recipe file \(\.toml\), not --training"
    ):
        resolve_recipe(["--training.steps", "3"])
    with pytest.raises(UserError, match="^the first argument must be a recipe file"):
        resolve_recipe([])


def test_no_recipe_named(recipe_in: Callable[..., Resolved]) -> None:
    with pytest.raises(UserError, match='^x.toml: no recipe is named; add recipe = "..."$'):
        recipe_in("[training]\nsteps = 3")


@pytest.mark.parametrize(
    "name", ["llama3_debugmodle", "_private", "Trainer", "os.system", "model_registry:x"]
)
def test_unknown_recipe(recipe_in: Callable[..., Resolved], name: str) -> None:
    with pytest.raises(UserError) as caught:
        recipe_in(f'\nrecipe = "{name}"')
    assert str(caught.value).startswith(f'x.toml:2: unknown recipe "{name}";')
    if name == "llama3_debugmodle":
        assert "did you mean llama3_debugmodel?" in str(caught.value)


def test_unknown_module(recipe_in: Callable[..., Resolved]) -> None:
    with pytest.raises(UserError, match="^--module not_there: there is no such Python module$"):
        recipe_in(RECIPE, "--module", "not_there")


def test_cycle_of_includes(recipe_in: Callable[..., Resolved]) -> None:
    Path("a.toml").write_text('include = "b.toml"')
    Path("b.toml").write_text('include = "./a.toml"')
    with pytest.raises(UserError, match=r"^b\.toml:1: \./a\.toml includes this file again"):
        recipe_in('include = "a.toml"\n' + RECIPE)


def test_error_in_an_included_file_names_that_file(recipe_in: Callable[..., Resolved]) -> None:
    Path("base").mkdir()
    Path("base/b.toml").write_text("\n[training]\nstesp = 3")
    with pytest.raises(UserError, match=r"^base/b\.toml:3: unknown key training\.stesp"):
        recipe_in('include = "base/b.toml"\n' + RECIPE)
