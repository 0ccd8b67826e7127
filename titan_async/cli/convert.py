"""`titan-async convert RUN_DIR OUT_DIR [flags]`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from titan_async.cli.command_line import VerbParser, checked, progress_bar, quiet

__all__ = ["add_weights_option", "run"]

_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def add_weights_option(parser: VerbParser) -> None:
    """Adds --weights and --recipe, for verbs that read a checkpoint."""
    parser.option(
        "--weights",
        "newest (default); stale: those of one update ago, which the next batch of a delayed run reads; or "
        "ema: their moving average",
        choices=("newest", "stale", "ema"),
        default="newest",
    )
    parser.option(
        "--recipe",
        "recipe file (default: the recipe.toml that the run has written to RUN_DIR)",
        metavar="FILE.toml",
    )


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?I?)B?", text.upper())
    unit = {**_UNITS, **_BINARY_UNITS}.get(match[2]) if match else None
    return int(float(match[1]) * unit) if match and unit else 0


_PARSER = VerbParser(
    "convert",
    "RUN_DIR[/checkpoint/step-N] OUT_DIR",
    """\
Write a checkpoint as a folder that transformers loads with from_pretrained: safetensors, config.json,
generation_config.json, the tokenizer, the recipe and a model card to complete, without paths of this
machine. One process without accelerators reads checkpoints of any parallel layout, one tensor at a time,
and a last save with checkpoint.last_save_in_hf. RUN_DIR is the dump_folder of the run; its latest
checkpoint is used, or that of step N. OUT_DIR is created when all files are complete.""",
    recipe=True,
    examples=(
        "convert outputs/debug hf/debug",
        "convert outputs/debug/checkpoint/step-200 hf/debug-200 --dtype bf16 --weights stale",
        "convert outputs/debug hf/debug --hf_assets_path another_tokenizer/",
    ),
)
_PARSER.option(
    "--dtype",
    "dtype of the weights (default: that of the checkpoint); routers of mixtures of experts keep theirs",
    choices=(*_TYPES.values(), *_TYPES),
)
add_weights_option(_PARSER)
_PARSER.option(
    "--max-shard-size",
    "maximum size of a file, such as 5GB (default), 500MB or 2GiB",
    metavar="SIZE",
    type=checked(_bytes, "a size such as 5GB, 500MB or 2GiB", lambda size: size > 0),
    default="5GB",
)


def run(argv: Sequence[str]) -> int:
    """Converts a checkpoint; returns the exit status.

    Raises:
        UserError: a file, an option or the checkpoint is wrong; nothing has been written.
    """
    line = _PARSER.parse(argv)
    place, out = line.operands

    from titan_async.config.device import ensure_device

    with quiet():
        ensure_device()  # before torchtitan is imported

        import torch

        from titan_async.huggingface.convert import convert
        from titan_async.huggingface.saved_model import open_saved

        dtype = None if line.dtype is None else getattr(torch, _TYPES.get(line.dtype, line.dtype))
        saved = open_saved(place, recipe=line.recipe, flags=line.recipe_flags, weights=line.weights)
        with progress_bar("converting") as progress:
            done = convert(saved, out, dtype=dtype, max_shard_size=line.max_shard_size, progress=progress)
    count = sum(name.endswith(".safetensors") for name in done.files)
    print(
        f"{out}: {done.description['architectures'][0]} of {done.parameters:,} parameters, "
        f"{line.weights} weights of step {saved.step} in {done.description['torch_dtype']}, "
        f"{done.nbytes / 1e9:.2f} GB in {count} file{'s' * (count > 1)}"
    )
    return 0
