"""User errors with a shipped recipe file: one line that names the cause and the fix.

The launcher finds almost all of them before it starts a process; `tests/cli` and `tests/data` have more
cases of recipe files and of data. The few that need a worker come last.
"""

from __future__ import annotations

import gzip
import json
import pickle
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from torch.distributed.checkpoint.metadata import Metadata

from tests.support.training import RECIPE, train
from titan_async.cli import launch, main

RECIPE_TEXT = RECIPE.read_text(encoding="utf-8")


def group(pattern: str, optimizer: str = "AdamW") -> str:
    return (
        f"[[optimizer.param_groups]]\npattern = '{pattern}'\noptimizer_name = '{optimizer}'\n"
        "optimizer_kwargs = {lr = 1e-3}\n"
    )


@pytest.fixture
def mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs the command in a temporary folder, and returns the one line that it prints."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "NGPU", "NNODES"):
        monkeypatch.delenv(name, raising=False)

    def start(*args: object, **options: object) -> int:
        raise AssertionError("processes were started")

    monkeypatch.setattr(launch, "launch", start)

    def run(*argv: str) -> str:
        folder = () if "--dump_folder" in argv else ("--dump_folder", "run")
        status = main.main(["train", *argv, *folder])
        out, err = capfd.readouterr()
        assert (status, out) == (2, "")
        assert err.endswith("\n") and err.count("\n") == 1 and "Traceback" not in err
        return err

    return run


def assert_says(line: str, words: Iterable[str]) -> None:
    missing = [word for word in words if word not in line]
    assert not missing, f"{missing} not in: {line}"


def test_the_recipe_file_itself_is_valid(mistake: Callable[..., str]) -> None:
    with pytest.raises(AssertionError, match="^processes were started$"):
        mistake(str(RECIPE))


FILES = [
    pytest.param(
        RECIPE_TEXT.replace("steps = 300", "stesp = 300"),
        ["x.toml:7: ", "unknown key training.stesp", "did you mean training.steps?"],
        id="unknown-key",
    ),
    pytest.param(
        RECIPE_TEXT.replace("[training]", "[trainig]"),
        ["x.toml:6: ", "unknown section trainig", "did you mean training?"],
        id="unknown-section",
    ),
    pytest.param(
        RECIPE_TEXT.replace("steps = 300", 'steps = "many"'),
        ["x.toml:7: ", 'training.steps is "many"', "should be a valid integer"],
        id="wrong-type",
    ),
    pytest.param(
        RECIPE_TEXT.replace("[parallelism]", "[parallelism"),
        ["x.toml:9: ", "not valid TOML"],
        id="malformed",
    ),
    pytest.param(
        RECIPE_TEXT.replace('"debug"', '"debgu"'),
        ["x.toml:4: ", 'unknown recipe "debgu"', "did you mean debug?"],
        id="unknown-recipe",
    ),
    pytest.param(
        RECIPE_TEXT.replace('"muon"', '"moun"'),
        ["x.toml:14: ", "optimizer.name", "'muon', 'adamw', 'lion', 'sgd'", '"moun"'],
        id="unknown-optimizer",
    ),
    pytest.param(
        RECIPE_TEXT.replace("Async2BW", "Async2WB"),
        ["parallelism.pipeline_parallel_schedule", '"Async2WB"', "did you mean Async2BW?"],
        id="unknown-schedule",
    ),
    pytest.param(
        RECIPE_TEXT.replace("strength = 1.0", "strength = -1.0"),
        ["optimizer.error_feedback.strength is -1.0", "at least 0"],
        id="negative-strength",
    ),
    pytest.param(
        RECIPE_TEXT.replace('level = "update"', 'level = "gradient"\ncompile = true'),
        ["optimizer.error_feedback.compile", '"update"', "leave out compile"],
        id="compiled-feedback-of-gradients",
    ),
    pytest.param(
        RECIPE_TEXT + group(".*", "Adamw2"),
        ["optimizer.param_groups.0.optimizer_name", '"Adamw2"', "did you mean AdamW?"],
        id="unknown-optimizer-of-a-group",
    ),
    pytest.param(
        RECIPE_TEXT + group("lyaers") + group(".*"),
        ["optimizer.param_groups.0.pattern", "'lyaers'", "matches no parameter", "layers."],
        id="pattern-that-matches-nothing",
    ),
    pytest.param(
        RECIPE_TEXT + group(".*") + group("lm_head"),
        ["optimizer.param_groups.1.pattern", "'lm_head'", "earlier groups match all"],
        id="pattern-behind-one-that-matches-all",
    ),
    pytest.param(
        RECIPE_TEXT + group("layers.("),
        ["x.toml", "optimizer.param_groups", "'layers.('", "not a regular expression"],
        id="pattern-that-is-no-regex",
    ),
    pytest.param(
        RECIPE_TEXT + group(".*").replace("{lr", "{wieght_decay = 3, lr"),
        ["a key of optimizer.param_groups.0.optimizer_kwargs", "did you mean weight_decay?"],
        id="unknown-setting-of-a-group",
    ),
    pytest.param(
        RECIPE_TEXT + group("^layers", "Muon") + group(".*"),
        ["optimizer.param_groups.0: ", "layers.0.attention_norm.weight", "AdamW"],
        id="vectors-for-muon",
    ),
    pytest.param(
        RECIPE_TEXT + group(r"\.wq\.", "Muon").replace("{", "{split_sizes = [100, 100], ") + group(".*"),
        ["optimizer.param_groups.0.optimizer_kwargs.split_sizes: ", "add up to 200", "has size 192"],
        id="split-sizes-that-do-not-add-up",
    ),
    pytest.param(
        RECIPE_TEXT + group(r"\.wq\.", "Muon").replace("{", "{adjust_lr = 'sepctral', ") + group(".*"),
        ["optimizer.param_groups.0.optimizer_kwargs.adjust_lr: ", "'sepctral'", "'spectral'"],
        id="unknown-choice-of-a-group",
    ),
    *[
        pytest.param(
            RECIPE_TEXT + group(r"\.wq\.", "Muon").replace("lr = 1e-3", f"{key} = {value}") + group(".*"),
            [f"optimizer.param_groups.0.optimizer_kwargs.{key} must be {wanted}, not {shown}"],
            id=f"wrong-kind-of-{key}",
        )
        for key, value, wanted, shown in [
            ("lr", "'fast'", "a number", '"fast"'),
            ("momentum", "true", "a number", "true"),
            ("nesterov", "'yes'", "true or false", '"yes"'),
            ("split_sizes", "96", "a list of numbers", "96"),
        ]
    ],
    pytest.param(
        RECIPE_TEXT + group(r"\.wq\.", "Muon").replace("{", "{error_feedback = 1.0, ") + group(".*"),
        ["optimizer_kwargs.error_feedback applies to all groups", "optimizer.error_feedback.strength"],
        id="error-feedback-of-a-group",
    ),
    pytest.param(
        RECIPE_TEXT + group(r"\.wq\.", "Muon").replace("{", "{bucket_mb = 1, ") + group(".*"),
        ["optimizer_kwargs.bucket_mb applies to all groups", "optimizer.muon.bucket_mb"],
        id="bucket-of-a-group",
    ),
    pytest.param(
        RECIPE_TEXT + group(".*", "SGD").replace("{", "{fused = true, "),
        ["optimizer.param_groups.0.optimizer_kwargs.fused", "SGD", "leave it out"],
        id="fused-sgd",
    ),
    pytest.param(
        RECIPE_TEXT + group("^layers"),
        ["optimizer.param_groups", "tok_embeddings.weight", "add a last group with pattern '.*'"],
        id="parameters-without-optimizer",
    ),
]


@pytest.mark.parametrize(("text", "words"), FILES)
def test_recipe_file(mistake: Callable[..., str], text: str, words: list[str]) -> None:
    assert text != RECIPE_TEXT
    Path("x.toml").write_text(text, encoding="utf-8")
    assert_says(mistake("x.toml"), words)


def test_missing_recipe_file(mistake: Callable[..., str]) -> None:
    assert mistake("toml_configs/absent.toml") == "toml_configs/absent.toml: no such file\n"


STAGES = "--parallelism.pipeline_parallel_degree"
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
PARTS = "--parallelism.module_fqns_per_model_part"
SHORT = "--dataloader.dataset_path short.jsonl --validator.dataloader.dataset_path short.jsonl"

FLAGS = [
    (
        f"{STAGES} 4 --training.local_batch_size 4",
        ["Async2BW", "microbatches (2,", "stages (4,", "set training.local_batch_size to at least 8"],
    ),
    (
        f"{STAGES} 9 --training.local_batch_size 32",
        ["6 layers", "9 stages", "lower parallelism.pipeline_parallel_degree"],
    ),
    ("--training.seq_len 9000", ["training.seq_len is 9000", "set it to at most 8192"]),
    ("--metrics.log_freq 0", ["metrics.log_freq is 0", "at least 1"]),
    ("--validator.freq 0", ["validator.freq is 0", "at least 1"]),
    ("--validator.steps 0", ["validation steps must be positive"]),
    ("--dataloader.num_workers -1", ["dataloader.num_workers is -1", "at least 0"]),
    ("--dataloader.validation_fraction 0", ["dataloader.validation_fraction is 0", "0.05", "the same"]),
    ("--optimizer.muon.lr -1", ["optimizer.muon.lr: ", "-1"]),
    ("--optimizer.muon.momentum 1.5", ["optimizer.muon.momentum: ", "1.5"]),
    ("--optimizer.muon.ns_steps 0", ["optimizer.muon.ns_steps: ", "0"]),
    ("--optimizer.muon.bucket_mb 0", ["optimizer.muon.bucket_mb is 0", "above zero"]),
    ("--optimizer.muon.compute_dtype int8", ['optimizer.muon.compute_dtype is "int8"', "'bfloat16'"]),
    ("--optimizer.muon.coefficients standard", ["did you mean --optimizer.muon.ns_coefficients?"]),
    ("--optimizer.adamw.lr -1", ["optimizer.adamw.lr: ", "-1"]),
    ("--optimizer.adamw.beta1 1.5", ["optimizer.adamw.beta1: ", "1.5"]),
    ("--optimizer.adamw.eps -1", ["optimizer.adamw.eps: ", "-1"]),
    ("--optimizer.name lion --optimizer.lion.lr -1", ["optimizer.lion.lr: ", "-1"]),
    ("--optimizer.name lion --optimizer.lion.beta1 1.5", ["optimizer.lion: ", "betas", "1.5"]),
    ("--training.stesp 3", ["unknown flag --training.stesp", "did you mean --training.steps?"]),
    (
        "--parallelism.pipeline_parallel_schedule 1F2B",
        ["parallelism.pipeline_parallel_schedule", "did you mean 1F1B?"],
    ),
    (
        "--parallelism.fsdp_reshard_after_forward always",
        ["Async2BW", "parallelism.fsdp_reshard_after_forward", '"default" or "never"'],
    ),
    ("--training.enable_cpu_offload", ["Async2BW", "training.enable_cpu_offload to false"]),
    ("--pipeline.lookahead 5", ["pipeline.lookahead is 5", "4 microbatches over 2 stages", "0 to 2"]),
    ("--pipeline.lookahead -1", ["pipeline.lookahead is -1", "0 to 2"]),
    ("--pipeline.synchronous_steps -1", ["pipeline.synchronous_steps is -1", "at least 0"]),
    ("--pipeline.synchronous_steps 0.5", ["--pipeline.synchronous_steps", "an integer", '"0.5"']),
    ("--pipeline.synchronous_ratio 75", ["pipeline.synchronous_ratio is 75", "at most 1"]),
    (
        "--pipeline.overlap --pipeline.lookahead 2",
        ["pipeline.lookahead is 2", "over 2 stages with pipeline.overlap", "0 to 1"],
    ),
    (
        f"--pipeline.overlap {STAGES} 4",
        [
            "pipeline.overlap over 4 stages (parallelism.pipeline_parallel_degree)",
            "needs at least 7 microbatches, not 4 (training.local_batch_size",
            "set training.local_batch_size to at least 14, or turn pipeline.overlap off",
        ],
    ),
    (
        f"--pipeline.overlap {STAGES} 3 --training.local_batch_size 6 --training.global_batch_size 6",
        ["pipeline.overlap over 3 stages", "at least 5 microbatches, not 3"],
    ),
    (
        "--training.global_batch_size 12",
        ["training.global_batch_size is 12", "1 data-parallel ranks", "multiple of 8"],
    ),
    (
        "--training.global_batch_size 24 --parallelism.data_parallel_shard_degree 2",
        ["training.global_batch_size is 24", "2 data-parallel ranks", "multiple of 16"],
    ),
    ("--training.global_batch_size 0", ["training.global_batch_size is 0", "multiple of 8"]),
    (
        f"--training.global_batch_size 8 {STAGES} 4 --parallelism.pipeline_parallel_microbatch_size 4",
        ["Async2BW", "microbatches (2,", "stages (4,"],
    ),
    (
        "--parallelism.expert_parallel_degree 2",
        ["parallelism.expert_parallel_degree is 2", "the 1 ranks", "data_parallel_shard_degree"],
    ),
    ("--parallelism.tensor_parallel_degree 4", ["tensor_parallel_degree (4)", "n_heads (6)"]),
    ("--parallelism.tensor_parallel_degree 2 --training.seq_len 255", ["seq_len is 255", "a multiple of 2"]),
    (
        f"{STAGES} 1 --parallelism.tensor_parallel_degree 3 --training.seq_len 255",
        ["tensor_parallel_degree is 3", "vocabulary of 2048 entries", "a divisor"],
    ),
    (
        "--parallelism.tensor_parallel_degree 2 --loss.global_vocab_size 2000",
        ["loss.global_vocab_size is 2000", "has 2048 entries"],
    ),
    (
        f"{SCHEDULE} 1F1B --parallelism.context_parallel_degree 2 --training.seq_len 250",
        ["training.seq_len is 250", "a multiple of 4"],
    ),
    (
        f"{SCHEDULE} 1F1B {STAGES} 4 --training.local_batch_size 4 --training.global_batch_size 16",
        ["1F1B needs at least as many microbatches as its 4 stages, not 2", "local_batch_size to at least 8"],
    ),
    (
        f"{SCHEDULE} DualPipeV --training.local_batch_size 6",
        ["DualPipeV needs at least as many microbatches as its 4 stages", "local_batch_size to at least 8"],
    ),
    *[
        (
            f"{SCHEDULE} {name} --training.local_batch_size 10",
            [f"{name} needs microbatches divisible by its 2 rounds, not 5", "to a multiple of 4"],
        )
        for name in ("Interleaved1F1B", "InterleavedZeroBubble")
    ],
    (
        f"{SCHEDULE} Interleaved1F1B {STAGES} 5 --training.local_batch_size 10",
        ["6 layers", "10 stages", "lower parallelism.pipeline_parallel_degree"],
    ),
    (
        "--parallelism.pipeline_parallel_layers_per_stage 2",
        ["layers_per_stage is 2", "4 stages of 8 layers", "Async2BW on 2 ranks has 2", "leave it out"],
    ),
    (
        f"{SCHEDULE} ZBVZeroBubble --parallelism.pipeline_parallel_layers_per_stage 1",
        ["layers_per_stage is 1", "8 stages of 8 layers", "ZBVZeroBubble on 2 ranks has 4"],
    ),
    (
        "--parallelism.pipeline_parallel_schedule_csv file.txt",
        ["parallelism.pipeline_parallel_schedule_csv", "Async2BW", "leave it out"],
    ),
    (f"{PARTS} [['layers.0'],['layers.1'],['layers.2']]", ["lists 3 parts", "Async2BW on 2 ranks has 2"]),
    (f"{PARTS} [['tok_embedding'],['layers.0']]", ['is "tok_embedding"', "did you mean tok_embeddings?"]),
    (
        f"{PARTS} [['tok_embeddings','layers.0','layers.1'],['layers.3','norm','lm_head']]",
        ["does not list layers.2"],
    ),
    (f"{PARTS} [['layers.0'],['layers.1','layers.0']]", ["lists layers.0 more than once"]),
    ("--profiler.enable_memory_snapshot", ["profiler.enable_memory_snapshot", "turn it off"]),
    ("--compile.enable --compile.backend inductr", ["compile.backend", "did you mean inductor?"]),
    ("--compile.enable --compile.components modle", ["compile.components", "did you mean model?"]),
    ("--override.imports nowhere.to.be_found", ["override.imports", "nowhere.to"]),
    ("--hf_assets_path nowhere", ["hf_assets_path", "nowhere", "tokenizer.json"]),
    ("--hf_assets_path folder", ["hf_assets_path", "folder", "tokenizer.json"]),
    ("--hf_assets_path assets/SmolLM2-135M", ["hf download HuggingFaceTB/SmolLM2-135M", "assets/SmolLM2"]),
    ("--hf_assets_path large", ["large", "3000", "2048", "hf_assets_path"]),
    ("--hf_assets_path broken", ["broken/tokenizer.json", "can't be read"]),
    ("--dump_folder file.txt/run", ["cannot write", "file.txt/run", "--dump_folder"]),
    ("--checkpoint.load_step 7", ["checkpoint.load_step is 7", "run/checkpoint", "there is none"]),
    (
        "--checkpoint.no-enable --checkpoint.initial_load_path /models/a",
        ["checkpoint.initial_load_path is set", "checkpoint.enable is off", "checkpoint.load_only"],
    ),
    ("--checkpoint.initial_load_path /nowhere", ["initial_load_path is /nowhere", "not a folder"]),
    ("--dataloader.dataset_path folder", ["folder", "no data files", ".txt"]),
    ("--dataloader.dataset_path nowhere", ["nowhere", "does not exist", "set dataset_path"]),
    ("--validator.dataloader.dataset_path nowhere", ["nowhere", "does not exist", "set dataset_path"]),
    ("--dataloader.dataset_path binary.txt", ["binary.txt", "not UTF-8", "convert it"]),
    ("--dataloader.dataset_path cut.jsonl.gz", ["cut.jsonl.gz", "not a complete gzip file"]),
    ("--dataloader.dataset_path bad.jsonl", ["Line 2 of bad.jsonl", "not valid JSON", "fix or remove"]),
    ("--dataloader.dataset_path other.jsonl", ["Line 1 of other.jsonl", "'text'", "text_column", "'body'"]),
    ("--dataloader.dataset_path report.pdf", ["report.pdf", "suffix", ".jsonl"]),
    ("--dataloader.dataset shakespere", ["'shakespere' is unknown", "perhaps 'shakespeare'"]),
    ("--dataloader.dataset ./file.txt", ["./file.txt", "is a path", "dataset_path"]),
    ("--dataloader.dataset nobody/nothing", ["nobody/nothing", "hub", "network"]),
    (SHORT, ["validation split of short.jsonl", "fewer than the 1 sequences of 256 tokens", "more text"]),
    (f"{SHORT} --validator.steps -1", ["validation split of short.jsonl", "the 8 sequences of 256 tokens"]),
]


@pytest.mark.parametrize(("flags", "words"), FLAGS, ids=[flags for flags, _ in FLAGS])
def test_flags(mistake: Callable[..., str], flags: str, words: list[str]) -> None:
    Path("file.txt").write_text("A file.\n")
    Path("folder").mkdir()
    Path("large").mkdir()
    Path("broken").mkdir()
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(3000)}, "w0")).save("large/tokenizer.json")
    Path("broken/tokenizer.json").write_text("{}")
    Path("binary.txt").write_bytes(bytes(range(256)) * 10)
    Path("cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:40])
    Path("bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    Path("other.jsonl").write_text(json.dumps({"body": "a"}) + "\n")
    Path("report.pdf").write_bytes(b"%PDF")
    # Of two documents the second is for validation.
    Path("short.jsonl").write_text('{"text": "%s"}\n{"text": "a"}\n' % ("to be or not to be " * 200))
    assert_says(mistake(str(RECIPE), *flags.split()), words)


ALLOWED = [
    *[
        f"--parallelism.{kind}_degree 2 --optimizer.name {optimizer}"
        for optimizer in ("muon", "lion")
        for kind in ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel")
    ],
    "--training.global_batch_size 16",
    "--training.local_batch_size 4 --training.global_batch_size 16 --parallelism.pipeline_parallel_degree 4",
    "--training.mixed_precision_param bfloat16",
    "--pipeline.lookahead 2",
    "--pipeline.overlap --pipeline.lookahead 1",
    "--pipeline.overlap --parallelism.pipeline_parallel_degree 4 --training.global_batch_size 16",
    "activation_checkpoint:full",
    f"{SCHEDULE} Interleaved1F1B {STAGES} 4 --training.local_batch_size 12",
    f"{SCHEDULE} Interleaved1F1B --parallelism.pipeline_parallel_layers_per_stage 1",
    f"{SCHEDULE} DualPipeV --parallelism.pipeline_parallel_layers_per_stage 2",
    "--parallelism.pipeline_parallel_layers_per_stage 4",
    f"{PARTS} [['tok_embeddings','layers.0','layers.1'],"
    "['layers.2','layers.3','layers.4','layers.5','norm','lm_head']]",
    "--parallelism.tensor_parallel_degree 2 --parallelism.no-enable_sequence_parallel --training.seq_len 255",
    "--compile.enable --compile.backend eager --compile.components=",
    "--override.imports titan_async.training.models.cpu_overrides.dense_attention",
]


@pytest.mark.parametrize("flags", ALLOWED)
def test_valid_flags_are_accepted(mistake: Callable[..., str], flags: str) -> None:
    with pytest.raises(AssertionError, match="^processes were started$"):
        mistake(str(RECIPE), *flags.split())


def test_experts(mistake: Callable[..., str]) -> None:
    Path("x.toml").write_text('recipe = "tiny_moe"\n')
    moe = ("x.toml", "--module", "tests.support.recipes")
    degrees = ("--parallelism.data_parallel_shard_degree", "--parallelism.expert_parallel_degree")
    with pytest.raises(AssertionError, match="^processes were started$"):
        mistake(*moe, degrees[0], "2", degrees[1], "2")
    line = mistake(*moe, degrees[0], "3", degrees[1], "3")
    assert_says(line, ["parallelism.expert_parallel_degree is 3", "the model's 4 experts"])


def test_tied_embeddings_on_two_stages(mistake: Callable[..., str]) -> None:
    Path("x.toml").write_text('recipe = "tied"\n')
    tied = ("x.toml", "--module", "tests.support.recipes")
    schedule = "--parallelism.pipeline_parallel_schedule"
    line = mistake(*tied, schedule, "1F1B")
    assert_says(line, ["embedding and head are tied", "1F1B does not support", "to Async2BW"])
    for flags in [(), (schedule, "1F1B", STAGES, "1")]:
        with pytest.raises(AssertionError, match="^processes were started$"):
            mistake(*tied, *flags)


def test_ngpu_that_contradicts_the_degrees(
    mistake: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NGPU", "3")
    line = mistake(str(RECIPE))
    assert_says(line, ["NGPU=3", "pipeline_parallel_degree 2", "change NGPU or the degrees"])


def saved(step: int, *, completely: bool = True) -> None:
    folder = Path(f"run/checkpoint/step-{step}")
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").touch()
    if completely:
        (folder / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))


def test_load_step_lists_the_existing_steps(mistake: Callable[..., str]) -> None:
    for step in (20, 100):
        saved(step)
    line = mistake(str(RECIPE), "--checkpoint.load_step", "7")
    assert_says(line, ["checkpoint.load_step is 7", "there are steps 20, 100"])


def test_an_incomplete_checkpoint_does_not_count(mistake: Callable[..., str]) -> None:
    saved(20)
    saved(320, completely=False)
    line = mistake(str(RECIPE), "--checkpoint.load_step", "320")
    assert line.endswith("has no such checkpoint: there are steps 20\n")
    with pytest.raises(AssertionError, match="^processes were started$"):
        mistake(str(RECIPE), "--training.steps", "40")


def test_fewer_steps_than_the_checkpoint_has(mistake: Callable[..., str]) -> None:
    saved(320)
    line = mistake(str(RECIPE), "--training.steps", "40")
    assert_says(line, ["training.steps is 40", "step 320", "raise training.steps", "another dump_folder"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--training.stesp 3", ["unknown flag --training.stesp"]),
        ("--dataloader.dataset_path nowhere", ["nowhere", "does not exist"]),
        ("--hf_assets_path nowhere", ["hf_assets_path is nowhere"]),
        ("--parallelism.tensor_parallel_degree 4", ["tensor_parallel_degree (4)", "n_heads (6)"]),
        ("--parallelism.data_parallel_shard_degree 2 --training.global_batch_size 24", ["multiple of 16"]),
        ("--checkpoint.load_step 7", ["checkpoint.load_step is 7"]),
        ("--dump_folder /proc/run", ["cannot write to the folder /proc/run"]),
    ],
)
def test_a_dry_run_refuses_what_a_run_does(mistake: Callable[..., str], flags: str, words: list[str]) -> None:
    assert_says(mistake(str(RECIPE), *flags.split(), "--dry-run"), words)


def test_a_dry_run_under_torchrun_counts_its_processes(
    mistake: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert_says(mistake(str(RECIPE), "--dry-run"), ["3 processes were started", "multiply to 2"])


def test_a_dry_run_writes_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "NGPU", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    dry = ["train", str(RECIPE), "--dump_folder", "run", "--dry-run"]
    assert main.main(dry) == 0
    out, err = capsys.readouterr()
    assert tomllib.loads(out)["recipe"] == "debug"
    assert err == ""
    assert main.main([*dry, "--optimizer.name", "adamw", "--optimizer.error_feedback.no-enable"]) == 0
    out, err = capsys.readouterr()
    assert tomllib.loads(out)["optimizer"]["name"] == "adamw"
    assert err.startswith("AdamW without error feedback") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_is_not_installed(
    mistake: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    line = mistake(str(RECIPE), "--metrics.enable_wandb")
    assert_says(line, ["metrics.enable_wandb", "not installed", "pip install wandb"])


def test_less_text_than_one_batch(tmp_path: Path) -> None:
    (tmp_path / "tiny.txt").write_text("Shall I compare thee to a summer's day?\n")
    run = train(tmp_path, "--dataloader.dataset_path", "tiny.txt", "--validator.no-enable")
    assert (run.status, run.err.count("\n")) == (2, 1)
    assert "Traceback" not in run.out + run.err
    assert_says(run.err, ["text"])


def test_checkpoint_of_another_optimizer(tmp_path: Path) -> None:
    flags = ("--validator.no-enable", "--lr_scheduler.warmup_steps", 1)
    first = train(tmp_path, "--training.steps", 2, *flags)
    assert (first.status, first.err) == (0, "")
    run = train(tmp_path, "--training.steps", 4, "--optimizer.name", "adamw", *flags)
    assert (run.status, run.err.count("\n")) == (2, 1)
    assert "Traceback" not in run.out + run.err
    assert_says(
        run.err, ["run/checkpoint", "does not match the model or optimizer", "choose another dump_folder"]
    )
