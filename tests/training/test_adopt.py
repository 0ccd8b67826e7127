"""torchtitan's configurations, trained unchanged by `AsyncTrainer`."""

import dataclasses
import importlib
import inspect
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torchtitan.models
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.validate import Validator
from torchtitan.trainer import Trainer

from tests.support.selection import slow
from tests.support.trainer_loop import Trained, Trainers, arguments, distance, loop, merged
from tests.support.training import train
from titan_async.config.recipe_file import resolve
from titan_async.data import shakespeare_tokenizer_folder
from titan_async.errors import UserError
from titan_async.training.adopt import adopt
from titan_async.training.checkpoint.checkpointer import AsyncCheckpointer
from titan_async.training.optimizer.container import AsyncOptimizers
from titan_async.training.preflight.check import check, check_messages
from titan_async.training.preflight.notes import start_notes
from titan_async.training.telemetry.metrics import AsyncMetrics
from titan_async.training.trainer import AsyncTrainer

PIPELINE = (
    "--parallelism.pipeline_parallel_degree", 2, "--parallelism.pipeline_parallel_schedule", "Async2BW",
)  # fmt: skip
SHARDED = ("--parallelism.data_parallel_shard_degree", 2)
TENSOR = ("--parallelism.tensor_parallel_degree", 2)
EXPERT = (*SHARDED, "--parallelism.expert_parallel_degree", 2)
CONTEXT = ("--parallelism.context_parallel_degree", 2)


def as_dict(section: Any) -> dict[str, Any]:
    return {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}


def test_torchtitans_sections_become_ours_with_their_settings() -> None:
    from tests.support.recipes import titan_llama

    config = titan_llama()
    before = dataclasses.replace(config)
    ours = adopt(config, recipe="x")
    assert type(ours) is AsyncTrainer.Config
    assert config == before
    for name, value in as_dict(config).items():
        kept = getattr(ours, name)
        if dataclasses.is_dataclass(value):
            assert as_dict(value).items() <= as_dict(kept).items() or name == "training"
        else:
            assert kept is value
    assert ours.training == dataclasses.replace(config.training, disable_cuda_graphs=True)
    assert isinstance(ours.optimizer, AsyncOptimizers.Config) and ours.optimizer.error_feedback.enable
    assert isinstance(ours.metrics, AsyncMetrics.Config)
    assert isinstance(ours.checkpoint, AsyncCheckpointer.Config)
    assert adopt(ours, recipe="x") is ours


@pytest.mark.parametrize(
    ("field", "stock"),
    [
        ("optimizer", OptimizersContainer),
        ("lr_scheduler", LRSchedulersContainer),
        ("metrics", MetricsProcessor),
        ("checkpoint", CheckpointManager),
        ("validator", Validator),
    ],
)
def test_sections_of_users_are_kept(field: str, stock: Any) -> None:
    from tests.support.recipes import titan_llama

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(stock.Config):  # type: ignore[misc]
        pass

    own = Config()
    assert getattr(adopt(dataclasses.replace(titan_llama(), **{field: own}), recipe="x"), field) is own


def test_other_configurations_are_refused() -> None:
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    with pytest.raises(UserError, match="^the recipe x is for its own trainer .* derive it from"):
        adopt(Config(), recipe="x")
    with pytest.raises(UserError, match="^the recipe x returns a dict: name a function that returns"):
        adopt({}, recipe="x")


def test_start_notes_name_the_changed_settings(tmp_path: Path) -> None:
    def notes(*flags: object) -> list[str]:
        return start_notes(resolve(arguments(tmp_path, "titan_llama", *flags)), ["layers.0.w.weight"])

    (line,) = notes(*PIPELINE)
    assert "disable_cuda_graphs is set" in line and line.endswith("optimizer.error_feedback is on")
    (line,) = notes()  # one stage
    assert line.endswith("which pipelines need")
    assert notes("--training.no-disable_cuda_graphs") == []


def test_it_follows_the_recurrence_with_feedback(runs: Trainers, tmp_path: Path) -> None:
    # With a loss by chunks, which computes the head's gradient in its forward, and with validations and
    # checkpoints in between, after which a batch reads weights that are not the newest.
    argv = arguments(tmp_path, "titan_llama", *PIPELINE)
    results = runs(2, argv)
    before, after = merged([r.before for r in results]), merged([r.after for r in results])
    wanted = loop(argv, before)
    assert distance(after, wanted.after) < 3e-6
    for other in ({"delay": 0}, {"strength": 0.0}):
        assert distance(after, loop(argv, before, **other).after) > 1e-3
    for result in results:
        assert result.losses == pytest.approx(wanted.losses, abs=1e-5)


def note_lines(trainer: Any, trained: Trained) -> None:
    trained.extra["lines"] = trainer.metrics_processor.lines = []
    log = trainer.metrics_processor.log

    def noting(*args: Any, **kwargs: Any) -> None:
        log(*args, **kwargs)
        trained.extra["lines"] = trainer.metrics_processor.lines

    trainer.metrics_processor.log = noting


def test_metrics_of_users_get_numbers(runs: Trainers, tmp_path: Path) -> None:
    first, _ = runs(2, arguments(tmp_path, "titan_metrics", *PIPELINE, "--training.steps", 2), note_lines)
    assert [line.split()[0] for line in first.extra["lines"]] == ["1", "2"]
    assert [line.split()[2] == "nan" for line in first.extra["lines"]] == [True, False]


TAKEN = {
    "llama3": ("llama3_debugmodel", "llama3_debugmodel_varlen_attn", "llama3_debugmodel_dist_gemm",
               "llama3_debugmodel_ce_loss"),
    "qwen3": ("qwen3_debugmodel_moe_param_groups", "qwen3_moe_debug"),
    "deepseek_v3": ("deepseek_v3_debugmodel",),
    "gpt_oss": ("gpt_oss_debugmodel", "gpt_oss_debugmodel_flex"),
    "muse_glimmer": ("muse_glimmer_debugmodel",),
}  # fmt: skip
"""The small models that train in a pipeline on any machine, by `--module`."""

REFUSED = {
    "deepseek_v3_debugmodel_mtp": "MTP does not support pipeline parallelism",
    "deepseek_v3_debugmodel_hybridep": "requires expert parallelism",
    "deepseek_v3_debugmodel_minimal_async_ep": "requires expert parallelism",
    "flux_debugmodel": "for its own trainer",
    "sft_debugmodel": "tests/assets/sft_test/data.json",
    "llama3_8b": "set training.local_batch_size to at least 2",
}
"""Parts of the errors of some others."""


def registries() -> Iterator[tuple[str, str]]:
    """Each recipe of torchtitan whose packages are installed, behind its `--module`."""
    for found in pkgutil.iter_modules(torchtitan.models.__path__):
        try:
            registry = importlib.import_module(f"torchtitan.models.{found.name}.config_registry")
        except ModuleNotFoundError:
            continue
        for name, value in vars(registry).items():
            own = inspect.isfunction(value) and value.__module__ == registry.__name__ and name[0] != "_"
            if own and str(value.__annotations__.get("return")).rstrip("'>").endswith("Trainer.Config"):
                yield found.name, name


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that replaces c4_test for the loader of torchtitan's small recipes."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "texts"
    folder.mkdir()
    lines = [json.dumps({"text": f"{n} bottles of beer on the wall, " * (1 + n % 9)}) for n in range(150)]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    return folder


def outcome(folder: Path, module: str, name: str, texts: Path) -> str:
    """The error before a run of two stages, or an empty string."""
    file = folder / "x.toml"
    file.write_text(f'recipe = "{name}"\n')
    argv = [str(file), "--module", module, "--hf_assets_path", str(shakespeare_tokenizer_folder())]
    argv += map(str, PIPELINE)
    try:
        config = resolve(argv)
        if getattr(config.dataloader, "dataset", "") in ("c4", "c4_test"):
            argv += ["--dataloader.dataset", "c4_test", "--dataloader.dataset_path", str(texts)]
            config = resolve(argv)
        degrees = config.parallelism
        world = 2 * degrees.tensor_parallel_degree * degrees.expert_parallel_degree
        check(config, world_size=world, make_folder=False)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("small", [True, slow(False)])
def test_every_torchtitan_recipe_is_accepted_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: Path, small: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    messages = {
        (module, name): outcome(tmp_path, module, name, texts)
        for module, name in registries()
        if ("debug" in name) is small
    }
    assert len(messages) > 20
    if small:
        assert {(module, name) for module, names in TAKEN.items() for name in names} <= {
            recipe for recipe, sentence in messages.items() if not sentence
        }
    for (_, name), sentence in messages.items():
        assert "\n" not in sentence and len(sentence) < 500
        assert REFUSED.get(name, "") in sentence


@pytest.mark.parametrize(
    ("module", "recipe", "flags", "sentence"),
    [
        ("llama3", "llama3_debugmodel_varlen_attn", CONTEXT, "VarlenAttention does not support it"),
        ("llama3", "llama3_debugmodel", (*CONTEXT, "--parallelism.context_parallel_load_balancer", "ptrr"),
         'load_balancer "ptrr" needs block masks'),
        ("llama3", "llama3_debugmodel_dist_gemm", TENSOR, "AllGatherFusedFeedForward needs GPUs"),
        ("deepseek_v3", "deepseek_v3_debugmodel_hybridep", EXPERT, "HybridEPTokenDispatcher needs GPUs"),
        ("llama3", "llama3_debugmodel", ("--loss.num_chunks", 3), "does not divide the 2048 tokens"),
        ("llama3", "llama3_debugmodel", (*CONTEXT, "--training.seq_len", 12), "divide the 6 tokens"),
        ("llama3", "llama3_debugmodel", ("--dataloader.dataset", "c5"), "Dataset c5 is not supported"),
        ("llama3", "llama3_debugmodel", ("--dataloader.dataset_path", "gone"), "gone"),
        ("llama3", "llama3_debugmodel", ("--comm.mode", "local_tensor"), "is not for training"),
        ("llama3", "llama3_debugmodel", ("--comm.mode", "fake_backend"), "titan-async rehearse"),
        (
            "llama3",
            "llama3_debugmodel",
            ("--comm.mode", "fake_backend", "--checkpoint.enable"),
            "turn checkpoint.enable off",
        ),
        ("llama3", "llama3_debugmodel", ("--debug.spmd_typechecking",), "SPMD typechecking is not supported"),
    ],
)  # fmt: skip
def test_unsupported_settings_are_refused(
    tmp_path: Path, texts: Path, module: str, recipe: str, flags: tuple[object, ...], sentence: str
) -> None:
    ranks = 4 if any(str(flag).endswith("_degree") for flag in flags) else 2
    with pytest.raises(UserError) as caught:
        checked(command(tmp_path, texts, module, recipe, *flags), ranks)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def checked(argv: list[str], world_size: int) -> None:
    config = resolve(argv)
    check_messages(config)
    check(config, world_size=world_size, make_folder=False)


def command(folder: Path, texts: Path, module: str, recipe: str, *flags: object) -> list[str]:
    file = folder / "x.toml"
    file.write_text(f'recipe = "{recipe}"\n')
    tokenizer = shakespeare_tokenizer_folder()
    words = [file, "--module", module, "--hf_assets_path", tokenizer, "--dataloader.dataset_path", texts]
    return [str(word) for word in (*words, *PIPELINE, *flags)]


def test_torchtitans_smallest_recipe_trains_unchanged(tmp_path: Path, texts: Path) -> None:
    run = trained(tmp_path, texts, "llama3", "llama3_debugmodel", "--training.steps", 3)
    assert "training llama3 debugmodel on 2 stages under Async2BW for 3 steps" in run.out
    assert "optimizer.error_feedback is on" in run.out
    assert run.steps == [1, 2, 3] and run.losses[-1] < run.losses[0]


def trained(folder: Path, texts: Path, module: str, recipe: str, *flags: object, pipeline=PIPELINE) -> Any:
    (folder / "x.toml").write_text(f'recipe = "{recipe}"\n')
    run = train(
        folder, "--module", module, "--hf_assets_path", shakespeare_tokenizer_folder(),
        "--dataloader.dataset_path", texts, "--training.local_batch_size", 4, "--training.seq_len", 32,
        "--training.mixed_precision_param", "float32", "--activation_checkpoint", "none",
        *pipeline, *flags, recipe="x.toml",
    )  # fmt: skip
    assert (run.status, run.err) == (0, ""), run.err
    return run


LAYOUTS = {
    "alone": (),
    "FSDP": SHARDED,
    "TP": TENSOR,
    "EP": EXPERT,
    "CP": CONTEXT,
}
MODELS = [
    ("llama3", "llama3_debugmodel", "TP"),
    ("qwen3", "qwen3_debugmodel", "alone"),
    ("deepseek_v3", "deepseek_v3_debugmodel", "EP"),
    ("gpt_oss", "gpt_oss_debugmodel", "alone"),
]
"""One layout of docs/torchtitan.md for each family. `qwen3_moe_debug` takes three minutes and 7 GB per rank;
`test_hub_models` trains a small one."""


@pytest.mark.slow
@pytest.mark.parametrize(("module", "recipe", "layout"), MODELS)
def test_torchtitans_models_train_in_two_stages(
    tmp_path: Path, texts: Path, module: str, recipe: str, layout: str
) -> None:
    run = trained(tmp_path, texts, module, recipe, "--training.steps", 3, *LAYOUTS[layout])
    assert run.steps == [1, 2, 3] and run.losses[-1] < run.losses[0]


def test_the_fake_backend_needs_no_variable(tmp_path: Path) -> None:
    # One process stands for rank 0 of four.
    run = train(
        tmp_path, "--comm.mode", "fake_backend", "--parallelism.pipeline_parallel_degree", 1,
        "--parallelism.data_parallel_shard_degree", 4, "--training.steps", 1, "--validator.no-enable",
        "--checkpoint.no-enable",
    )  # fmt: skip
    assert run.status == 0, run.err
    assert len(list((tmp_path / "run" / "comm_traces").glob("*"))) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [(*PIPELINE[:3], "1F1B"), ()], ids=["1F1B", "one stage"])
def test_it_trains_without_a_delay(tmp_path: Path, texts: Path, pipeline: tuple[object, ...]) -> None:
    run = trained(tmp_path, texts, "llama3", "llama3_debugmodel", "--training.steps", 3, pipeline=pipeline)
    assert run.steps == [1, 2, 3] and run.losses[-1] < run.losses[0]
