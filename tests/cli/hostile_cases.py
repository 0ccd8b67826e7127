"""The table of `tests/cli/test_hostile_input.py`: command lines, files, and parts of the error."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.cli import hostile_files as files
from tests.cli.hostile_files import fifo, made, replaced, written
from tests.support.saved_runs import DENSE

__all__ = ["CASES", "TEXT", "Case"]

TEXT = DENSE.read_text(encoding="utf-8")


def nothing(folder: Path) -> None:
    pass


class Case(NamedTuple):
    """A wrong command line or file, and parts of its error."""

    name: str
    argv: str | list[str]
    """Arguments of titan-async, or of tools/prepare_data.py after "prepare"; RECIPE is a valid file."""
    words: list[str]
    """Parts of the message, from the cause and from the fix."""
    make: Callable[[Path], object] = nothing
    """Writes files in the current folder."""
    needs: str = ""
    """A valid folder that is copied there: a run, a model, token files, or a tokenizer."""
    variables: dict[str, str] = {}  # noqa: RUF012 - not changed


def toml(name: str, text: str | bytes, words: list[str]) -> Case:
    return Case(f"toml-{name}", "train x.toml --dump_folder run", words, written("x.toml", text))


def data(name: str, make: Callable[[Path], object], file: str, words: list[str], flags: str = "") -> Case:
    argv = f"train RECIPE --dump_folder out --validator.no-enable --dataloader.dataset_path {file} {flags}"
    return Case(f"data-{name}", argv, words, make)


def prepare(name: str, make: Callable[[Path], object], file: str, words: list[str]) -> Case:
    argv = f"prepare out --tokenizer tokenizer --processes 1 --dataset_path {file}"
    return Case(f"prepare-{name}", argv, words, make, needs="tokenizer")


def tokenizer(name: str, make: Callable[[Path], object], words: list[str]) -> Case:
    argv = "train RECIPE --dump_folder out --hf_assets_path tokenizer"
    return Case(f"tokenizer-{name}", argv, words, within("tokenizer", make), needs="tokenizer")


def model(name: str, make: Callable[[Path], object], words: list[str], which: str = "one") -> Case:
    return Case(f"model-{name}", f"import {which} out", words, within(which, make), needs=which)


def checkpoint(verb: str, name: str, make: Callable[[Path], object], words: list[str]) -> Case:
    argv = {
        "convert": "convert run out",
        "sample": "sample run",
        "train": "train RECIPE --dump_folder run",
        "initial": "train RECIPE --dump_folder out --checkpoint.initial_load_path HERE/run/checkpoint/step-7",
    }[verb]
    return Case(f"checkpoint-{verb}-{name}", argv, words, within("run/checkpoint/step-7", make), needs="run")


def within(folder: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda here: make(here / folder)


def symlink(name: str, target: str) -> Callable[[Path], object]:
    return lambda folder: os.symlink(target, folder / name)


def chain_of_includes(folder: Path) -> None:
    for number in range(40):
        (folder / f"{number}.toml").write_text(f'include = "{number + 1}.toml"\n')
    (folder / "40.toml").write_text(TEXT)


TOML = [
    toml("arrays", "x = " + "[" * 10_000_000, ["x.toml", "more than 262,144 bytes", "name a recipe file"]),
    toml("arrays-within-the-limit", "x = " + "[" * 200_000, ["x.toml", "nested too deeply"]),
    toml("dotted-keys", "a." * 50_000 + "a = 1\n" + TEXT, ["x.toml", "nested too deeply"]),
    toml("tables-in-tables", TEXT + "\n[x]\ny = " + "{a=" * 60 + "1" + "}" * 60, ["nested too deeply"]),
    toml("utf-16", TEXT.encode("utf-16"), ["x.toml:1: not UTF-8", "save the file as UTF-8"]),
    toml("utf-16-unmarked", TEXT.encode("utf-16-le"), ["x.toml:1: not valid TOML", "invalid character"]),
    toml("latin-1", ("# caf\xe9\n" + TEXT).encode("latin-1"), ["x.toml:1: not UTF-8", "save the file as"]),
    toml("two-marks", b"\xef\xbb\xbf" * 2 + TEXT.encode(), ["x.toml:1: not valid TOML"]),
    toml("null-byte", TEXT + "\0", ["not valid TOML"]),
    toml("huge-number", TEXT + "\nx = " + "9" * 5000, ["too large a number"]),
    toml("number-beyond-64-bits", TEXT.replace("= 300", f"= {2**70}"), [":7: training.steps", "too large"]),
    toml(
        "nan",
        TEXT + "\n[lr_scheduler]\nmin_lr_factor = nan",
        ["lr_scheduler.min_lr_factor", "number, not nan"],
    ),
    toml(
        "infinity",
        TEXT + "\n[optimizer.sgd]\nlr = inf",
        ["optimizer.sgd.lr is inf", "set it to a finite number"],
    ),
    toml(
        "negative",
        TEXT + "\n[comm]\ntrain_timeout_seconds = -1",
        ["comm.train_timeout_seconds", "at least 1"],
    ),
    toml(
        "negative-fraction",
        TEXT + "\n[lr_scheduler]\ndecay_ratio = -0.1",
        ["lr_scheduler.decay_ratio", "at least 0"],
    ),
    toml("escaped-null", 'hf_assets_path = "a\\u0000b"\n' + TEXT, ["x.toml:1: hf_assets_path", "U+0000"]),
    toml(
        "escaped-null-in-include", 'include = "a\\u0000b"\n' + TEXT, ["x.toml:1: include contains", "U+0000"]
    ),
    toml(
        "terminal-codes-in-a-key",
        '"a\\nb\\u001b[31m" = 1\n' + TEXT,
        ["x.toml:1: unknown key a b\\x1b[31m"],
    ),
    toml(
        "terminal-codes-in-a-name",
        'recipe = "\\u001b]0;x\\u0007\\n"',
        ['unknown recipe "\\x1b]0;x\\x07', "known"],
    ),
    toml(
        "long-name", f'hf_assets_path = "{"a" * 5000}"\n' + TEXT, ["too long for this system", "shorten it"]
    ),
    toml(
        "code-for-a-number",
        TEXT.replace("= 300", "= \"__import__('os').mkdir('canary')\""),
        ["x.toml:7: training.steps is", "should be a valid integer"],
    ),
    toml(
        "code-for-a-name",
        "recipe = \"__import__('os').mkdir('canary')\"",
        ["x.toml:1: unknown recipe", "known"],
    ),
    toml(
        "checkpoints-elsewhere",
        'checkpoint.folder = "../../x"\n' + TEXT,
        ["checkpoint.folder is ../../x", "use a path inside it"],
    ),
    toml(
        "curves-elsewhere",
        'metrics.save_tb_folder = "/tmp/x"\n' + TEXT,
        ["metrics.save_tb_folder", "outside of the run"],
    ),
    toml(
        "configuration-elsewhere",
        'debug.save_config_file = "a/../../x"\n' + TEXT,
        ["debug.save_config_file", "outside of the run"],
    ),
    toml(
        "traces-elsewhere",
        'comm.save_traces_file_prefix = "../x"\n' + TEXT,
        ["comm.save_traces_file_prefix", "outside of the run"],
    ),
    toml(
        "include-device",
        'include = "/dev/zero"\n' + TEXT,
        ["/dev/zero: cannot be read", "pipe or a device", "name a recipe"],
    ),
    toml("include-folder", 'include = "."\n' + TEXT, ["this is a directory", "name a recipe file"]),
    Case("toml-device", "train /dev/zero", ["pipe or a device", "name a recipe file"]),
    Case("toml-pipe", "train x.toml", ["x.toml", "pipe or a device", "name a recipe file"], fifo("x.toml")),
    Case(
        "toml-include-pipe",
        "train x.toml",
        ["base.toml", "pipe or a device", "name a recipe file"],
        made(fifo("base.toml"), written("x.toml", 'include = "base.toml"\n' + TEXT)),
    ),
    Case(
        "toml-gigabyte",
        "train x.toml",
        ["x.toml", "more than 262,144 bytes"],
        files.sparse("x.toml", 1 << 30),
    ),
    Case("toml-link-to-itself", "train x.toml", ["x.toml", "symbolic links"], symlink("x.toml", "x.toml")),
    Case(
        "toml-chain-of-includes",
        "train 0.toml",
        ["more than 32 files", "merge some of them"],
        chain_of_includes,
    ),
]

FLAGS = [
    Case("flag-escape-code", ["\x1b[31mtrain"], ["unknown verb \\x1b[31mtrain", "did you mean train?"]),
    Case(
        "flag-nested-value",
        ["train", "RECIPE", "--checkpoint.exclude_from_loading", "[" * 50_000],
        ["nested too deeply"],
    ),
    Case(
        "flag-deep",
        ["train", "RECIPE", "--optimizer." + "a." * 20_000 + "b", "1"],
        ["unknown flag", "no field is nested so deeply"],
    ),
    Case(
        "flag-many-digits",
        ["train", "RECIPE", "--training.steps", "9" * 5000],
        ["--training.steps is", "unable to parse input string as an integer"],
    ),
    Case("flag-beyond-64-bits", f"train RECIPE --debug.seed {2**80}", ["--debug.seed is too large a number"]),
    Case(
        "flag-nan", "train RECIPE --training.max_norm nan", ["--training.max_norm must be a number, not nan"]
    ),
    Case(
        "flag-module-path",
        "train RECIPE --module ../x",
        ["--module ../x", "not a name of a Python module", "write it as"],
    ),
    Case(
        "flag-module-empty",
        ["train", "RECIPE", "--module", ""],
        ["--module", "not a name of a Python module", "write it as"],
    ),
    Case(
        "flag-state",
        "train RECIPE --checkpoint.exclude_from_loading optimiser",
        ["exclude_from_loading", "did you mean optimizer?"],
    ),
    Case(
        "flag-schedule-table",
        "train RECIPE --parallelism.pipeline_parallel_schedule_csv x.csv",
        ["x.csv", "not a file", "set it to the CSV file of a schedule"],
    ),
    Case(
        "flag-prefetch",
        "train RECIPE --dataloader.prefetch_factor 2",
        ["dataloader.prefetch_factor", "num_workers to at least 1"],
    ),
    Case(
        "flag-persistent",
        "train RECIPE --validator.dataloader.persistent_workers",
        ["validator.dataloader.persistent_workers", "omit"],
    ),
    Case(
        "flag-workers",
        "train RECIPE --dataloader.num_workers 2000000000",
        ["dataloader.num_workers", "at most 1024"],
    ),
    Case(
        "flag-profiler",
        "train RECIPE --profiler.enable_profiling --profiler.profile_freq 1",
        ["profiler.profile_freq is 1", "set it to at least 4"],
    ),
    Case(
        "flag-processes",
        "train RECIPE --parallelism.data_parallel_replicate_degree 1000000",
        ["2000000 processes", "lower the degrees"],
    ),
    Case(
        "flag-shards",
        "plan RECIPE --parallelism.data_parallel_shard_degree 0",
        ["data_parallel_shard_degree is 0", "or to -1"],
    ),
    Case(
        "flag-degree",
        "plan RECIPE --parallelism.tensor_parallel_degree -1",
        ["tensor_parallel_degree is -1", "at least 1"],
    ),
    Case(
        "flag-pickled-initial-weights",
        "train RECIPE --dump_folder out --checkpoint.initial_load_in_hf "
        "--checkpoint.initial_load_path HERE/one",
        ["only pickled weights", "convert them to safetensors"],
        within("one", files.as_pytorch_bin),
        needs="one",
    ),
    Case(
        "plan-nodes",
        "plan RECIPE --nodes 999999999999999999",
        ["--nodes: must be an integer from 1 to", "not 999999999999999999"],
    ),
    Case(
        "plan-microbatches",
        "plan RECIPE --training.local_batch_size 1000000",
        ["500000 microbatches on 2 stages", "raise parallelism"],
    ),
    Case(
        "plan-replicas",
        "plan RECIPE --parallelism.data_parallel_replicate_degree 999999999999",
        ["data_parallel_replicate_degree", "at most"],
    ),
    Case(
        "plan-output",
        "plan RECIPE --json file/plan.json",
        ["cannot write file/plan.json", "--json"],
        written("file", "x"),
    ),
    Case(
        "plan-measured-pipe",
        "plan RECIPE --measured .",
        ["measured.json", "pipe or a device", "another run"],
        fifo("measured.json"),
    ),
    Case(
        "plan-measured-nested",
        "plan RECIPE --measured .",
        ["measured.json", "nested too deeply"],
        written("measured.json", "[" * 100_000),
    ),
    Case(
        "plan-calibration-pipe",
        "plan RECIPE --calibration x.json",
        ["x.json", "pipe or a device", "repeat titan-async calibrate"],
        fifo("x.json"),
    ),
    Case(
        "plan-calibration-escape-code",
        "plan RECIPE --calibration x.json",
        ["x.json", "\\x1b[31m", "repeat titan-async calibrate"],
        written("x.json", '{"format": "titan-async calibration", "version": "\\u001b[31m"}'),
    ),
    Case("calibrate-word", "calibrate h100.json", ["takes only options, not h100.json", "--help"]),
    Case(
        "calibrate-device",
        ["calibrate", "--device", "\x1b[31m"],
        ["--device: invalid choice", "\\x1b[31m", "choose from"],
    ),
    Case(
        "rehearse-steps",
        "rehearse RECIPE --steps 999999999999999999",
        ["--steps: must be an integer from 1 to", "not 999999999999999999"],
    ),
    Case(
        "rehearse-width",
        "rehearse RECIPE --width-divisor 999999999999999999",
        ["--width-divisor: must be an integer from 1 to"],
    ),
    Case(
        "watch-size",
        "watch events --once --width 999999999999999999",
        ["--width: must be an integer from 1 to 1000"],
        needs="events",
    ),
    Case("watch-long-name", ["watch", "a" * 5000], ["too long for this system", "shorten it"]),
    Case("trace-long-name", ["trace", "a" * 5000], ["too long for this system", "shorten it"]),
    Case(
        "plot-labels",
        ["plot", "events", "--labels", "\x1b[31m"],
        ["--labels is \\x1b[31m", "use printable characters"],
        needs="events",
    ),
    Case(
        "convert-size",
        ["convert", "run", "out", "--max-shard-size", "9" * 400],
        ["--max-shard-size: must be", "such as 5GB"],
    ),
    Case(
        "import-long-name",
        ["import", "one", "a" * 300],
        ["too long for this system", "shorten it"],
        needs="one",
    ),
    Case(
        "import-escape",
        "import one out --checkpoint.folder ../../x",
        ["checkpoint.folder is ../../x", "outside of the run"],
        needs="one",
    ),
    Case(
        "environment-digits",
        "train RECIPE --dump_folder run",
        ["NGPU must be a positive integer"],
        variables={"NGPU": "9" * 5000},
    ),
    Case(
        "environment-superscript",
        "train RECIPE --dump_folder run",
        ["NGPU must be a positive", "correct it"],
        variables={"NGPU": "\xb2"},
    ),
    Case(
        "environment-negative",
        "train RECIPE --dump_folder run",
        ["NNODES must be a positive", "or unset it"],
        variables={"NNODES": "-2"},
    ),
]

DATA = [
    data("pipe", fifo("a.jsonl"), "a.jsonl", ["a.jsonl is neither a file nor a folder", "set dataset_path"]),
    data(
        "link-to-itself",
        symlink("a.txt", "a.txt"),
        "a.txt",
        ["neither a file nor a folder", "set dataset_path"],
    ),
    data(
        "no-such-user",
        nothing,
        "~nobody-here/a.txt",
        ["~nobody-here/a.txt does not exist", "set dataset_path"],
    ),
    data("long-name", nothing, "a" * 300, ["too long for this system", "shorten it"]),
    data(
        "gzip-bomb",
        files.endless_line("a.jsonl.gz"),
        "a.jsonl.gz",
        ["Line 1 of a.jsonl.gz has more than", "break it up"],
    ),
    data(
        "gzip-of-nothing",
        files.many_empty("a.jsonl.gz"),
        "a.jsonl.gz",
        ["consecutive empty documents", "remove them"],
    ),
    data(
        "endless-zeros",
        files.sparse("a.txt", 10 << 30),
        "a.txt",
        ["Line 1 of a.txt has more than", "break it up"],
    ),
    data(
        "digits",
        written("a.jsonl", b'{"text": ' + b"9" * 5000 + b"}\n"),
        "a.jsonl",
        ["Line 1 of a.jsonl", "not valid JSON", "fix"],
    ),
    data(
        "nested",
        written("a.jsonl", b'{"text": ' + b"[" * 200_000),
        "a.jsonl",
        ["Line 1", "not valid JSON", "fix or remove"],
    ),
    data(
        "nan",
        written("a.jsonl", b'{"text": NaN}\n'),
        "a.jsonl",
        ["line 1 of a.jsonl holds float", "set text_column"],
    ),
    data(
        "list",
        written("a.jsonl", b'{"text": ["a"]}\n'),
        "a.jsonl",
        ["line 1 of a.jsonl holds list", "set text_column"],
    ),
    data(
        "terminal-codes",
        written("a.jsonl", b'{"\\u001b[31m": 1}\n'),
        "a.jsonl",
        ["no column 'text'", "'\\x1b[31m'"],
    ),
    data(
        "parquet-header",
        files.damaged_parquet("a.parquet", 4),
        "a.parquet",
        ["a.parquet is not a complete parquet file", "fetch"],
    ),
    data(
        "parquet-footer",
        files.damaged_parquet("a.parquet", -60),
        "a.parquet",
        ["not a complete parquet file", "fetch or write"],
    ),
    data(
        "parquet-of-bytes",
        files.parquet("a.parquet", text=[b"\xff"]),
        "a.parquet",
        ["holds bytes instead of text", "set text_column"],
    ),
    data(
        "parquet-of-tables",
        files.parquet("a.parquet", text=[{"a": 1}]),
        "a.parquet",
        ["holds dict instead of text", "set text_column"],
    ),
    data(
        "token-files-elsewhere",
        within("tokens", replaced("index.json", "tokens-00000", "../tokens-00000")),
        "tokens",
        ["'../tokens-00000.safetensors' is not the name", "recreate it"],
        "--dataloader.dataset tokens",
    )._replace(needs="tokens"),
    data(
        "token-files-counts",
        within(
            "tokens",
            files.changed_json(
                "index.json",
                shards=[
                    {
                        "name": "tokens-00000.safetensors",
                        "documents": "9",
                        "tokens": 9,
                        "bytes": 9,
                        "sha256": "",
                    }
                ],
            ),
        ),
        "tokens",
        ["counts of 'tokens-00000.safetensors' are not numbers", "recreate it"],
        "--dataloader.dataset tokens",
    )._replace(needs="tokens"),
    data(
        "token-index-pipe",
        within("tokens", fifo("index.json")),
        "tokens",
        ["index.json can't be read", "pipe or a device"],
        "--dataloader.dataset tokens",
    )._replace(needs="tokens"),
    prepare("nothing", written("a.txt", ""), "a.txt", ["no document", "name other text"]),
    prepare(
        "nan",
        written("a.jsonl", b'{"text": NaN}\n'),
        "a.jsonl",
        ["holds float instead of text", "set text_column"],
    ),
    prepare("pipe", fifo("a.jsonl"), "a.jsonl", ["neither a file nor a folder", "set dataset_path"]),
    prepare(
        "parquet",
        files.damaged_parquet("a.parquet", -60),
        "a.parquet",
        ["a.parquet can't be read", "fetch or write it again"],
    ),
]

TOKENIZERS = [
    tokenizer("empty", written("tokenizer.json", ""), ["tokenizer.json can't be read", "fetch it again"]),
    tokenizer("pickle", files.pickled("tokenizer.json"), ["tokenizer.json can't be read", "fetch it again"]),
    tokenizer("pipe", fifo("tokenizer.json"), ["holds no tokenizer", "set it to a folder"]),
    tokenizer(
        "nested", written("tokenizer.json", "[" * 200_000), ["tokenizer.json can't be read", "fetch it"]
    ),
    tokenizer(
        "settings-nested", written("tokenizer_config.json", "[" * 200_000), ["nested too deeply", "fetch it"]
    ),
    tokenizer(
        "settings-pipe",
        fifo("tokenizer_config.json"),
        ["tokenizer_config.json", "pipe or a device", "remove it"],
    ),
    tokenizer(
        "flag-that-is-none",
        written("tokenizer_config.json", '{"bos_token": {"content": "x", "lstrip": "yes"}}'),
        ["tokenizer_config.json", "describes no tokens", "fetch it again"],
    ),
    tokenizer(
        "half-a-character",
        written("tokenizer_config.json", '{"bos_token": "\\ud800"}'),
        ["tokenizer_config.json", "describes no tokens", "fetch it again"],
    ),
]

NORM = "model.norm.weight"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

MODELS = [
    model(
        "header-of-2^64-bytes",
        written(SINGLE, b"\xff" * 8 + b"{}"),
        [SINGLE, "cannot be read", "fetch it again"],
    ),
    model("empty", written(SINGLE, b""), [SINGLE, "cannot be read", "fetch it again"]),
    model(
        "overlap",
        files.header(SINGLE, NORM, data_offsets=[0, 768]),
        [SINGLE, "cannot be read", "fetch it again"],
    ),
    model(
        "beyond-the-end",
        files.header(SINGLE, NORM, data_offsets=[10**12, 10**12 + 768]),
        ["cannot be read", "fetch it"],
    ),
    model(
        "shape-that-overflows",
        files.header(SINGLE, NORM, shape=[2**62, 2**62]),
        ["cannot be read", "fetch it"],
    ),
    model(
        "whole-numbers",
        files.header(SINGLE, NORM, dtype="I32"),
        [NORM, "dtype torch.int32", "fetch the model"],
    ),
    model("pickle", files.pickled(SINGLE), [SINGLE, "cannot be read", "fetch it again"]),
    model("pickle-alone", files.as_pytorch_bin, ["only pickled weights", "convert them to safetensors"]),
    model("pipe", fifo(SINGLE), ["no model.safetensors", "name a folder"]),
    model("description-pipe", fifo("config.json"), ["config.json", "pipe or a device", "fetch it again"]),
    model(
        "description-nested",
        written("config.json", "[" * 100_000),
        ["config.json", "nested too deeply", "fetch it"],
    ),
    model(
        "description-of-other-types",
        files.changed_json("config.json", rope_scaling="x"),
        ["does not describe a model", "fetch it"],
    ),
    model(
        "layers-that-are-text",
        files.changed_json("config.json", num_hidden_layers="x"),
        ["does not describe", "fetch it"],
    ),
    model(
        "recipe-that-leads-out",
        made(replaced("recipe.toml", 'folder = "checkpoint"', 'folder = "../../x"')),
        ["checkpoint.folder", "outside of the run"],
    ),
    model(
        "recipe-with-code",
        replaced("recipe.toml", 'recipe = "debug"', 'recipe = "debug"\nmodule = "os"'),
        ["module names code to import", "flag --module"],
    ),
    model(
        "index-out-of-the-folder",
        files.escaping_index(INDEX, "../x.safetensors"),
        ["names ../x.safetensors", "not a file in its folder"],
        "several",
    ),
    model(
        "index-absolute",
        files.escaping_index(INDEX, "/etc/passwd"),
        ["names /etc/passwd", "not a file in its folder"],
        "several",
    ),
    model(
        "index-of-numbers",
        files.escaping_index(INDEX, 3),
        [INDEX, "cannot be read", "fetch it again"],
        "several",
    ),
    model(
        "index-long-name", files.escaping_index(INDEX, "a" * 5000), ["too long for this system"], "several"
    ),
    model(
        "index-nested", written(INDEX, "[" * 100_000), [INDEX, "cannot be read", "fetch it again"], "several"
    ),
]


def huge(index: Any) -> None:
    for place in index.storage_data.values():
        place.offset = place.length = 2**62


def whole(index: Any) -> None:
    index.state_dict_metadata["norm.weight"].properties.dtype = torch.int64


def without_tensors(index: Any) -> None:
    index.state_dict_metadata = None


def outside(index: Any) -> None:
    for place in index.storage_data.values():
        place.relative_path = "../../../../x"


CHECKPOINTS = [
    *[
        checkpoint(verb, name, make, [".metadata", *words])
        for verb in ("convert", "sample", "train", "initial")
        for name, make, words in [
            ("empty", written(".metadata", b""), ["was not loaded", "use another checkpoint"]),
            ("pickle", files.pickled(".metadata"), ["it names posix.mkdir", "use another checkpoint"]),
            ("noise", written(".metadata", bytes(range(256))), ["was not loaded", "use another checkpoint"]),
        ]
    ],
    checkpoint("train", "pipe", fifo(".metadata"), [".metadata", "pipe or a device", "use another"]),
    checkpoint(
        "train",
        "data-pipe",
        fifo("__0_0.distcp"),
        ["__0_0.distcp", "not a regular file", "use another checkpoint"],
    ),
    checkpoint(
        "convert",
        "data-pipe",
        fifo("__0_0.distcp"),
        ["__0_0.distcp", "not a regular file", "use another checkpoint"],
    ),
    checkpoint("convert", "outside", files.spoiled_index(outside), ["outside of its folder", "use another"]),
    checkpoint("train", "outside", files.spoiled_index(outside), ["outside of its folder", "use another"]),
    checkpoint(
        "convert", "beyond-the-end", files.spoiled_index(huge), ["__0_0.distcp", "use another checkpoint"]
    ),
    checkpoint(
        "convert",
        "no-tensors",
        files.spoiled_index(without_tensors),
        ["contains another object", "use another"],
    ),
    checkpoint(
        "convert",
        "whole-numbers",
        files.spoiled_index(whole),
        ["norm.weight has dtype torch.int64", "--recipe FILE.toml"],
    ),
]

MONITOR = [
    Case(
        "run-pipe",
        "watch events --once",
        ["run.json", "pipe or a device"],
        lambda here: fifo("run.json")(run_of(here)),
        needs="events",
    ),
    Case(
        "run-nested",
        "trace events",
        ["run.json", "nested too deeply"],
        lambda here: written("run.json", "[" * 100_000)(run_of(here)),
        needs="events",
    ),
    Case(
        "run-of-text",
        "plot events",
        ["run.json", "not of type int"],
        lambda here: files.changed_json("run.json", steps="x")(run_of(here)),
        needs="events",
    ),
    Case(
        "run-of-no-ranks",
        "plot events",
        ["run.json cannot be read", "use the version"],
        lambda here: files.changed_json("run.json", ranks=3)(run_of(here)),
        needs="events",
    ),
]


def run_of(here: Path) -> Path:
    [folder] = (here / "events" / "events").iterdir()
    return folder


CASES = [*TOML, *FLAGS, *DATA, *TOKENIZERS, *MODELS, *CHECKPOINTS, *MONITOR]
