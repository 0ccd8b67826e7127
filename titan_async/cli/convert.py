"""`titan-async convert RUN_DIR OUT_DIR [flags]`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from titan_async.cli.command_line import parse
from titan_async.errors import UserError

if TYPE_CHECKING:
    import torch

__all__ = ["run"]

_HELP = """\
usage: titan-async convert RUN_DIR[/checkpoint/step-N] OUT_DIR [flags] [--section.key value ...]

Write a checkpoint as a folder that transformers loads with from_pretrained: safetensors, config.json,
generation_config.json, the tokenizer, the recipe and a model card to complete, none with paths of this
machine. One process without accelerators reads checkpoints of any parallel layout, a tensor at a time, and
a last save with checkpoint.last_save_in_hf. RUN_DIR is the dump_folder of the run; its latest checkpoint is
taken, or that of step N. OUT_DIR appears when it is whole.

flags:
  --dtype TYPE            of the weights: float32, bfloat16 (bf16) or float16 (fp16); default: the
                          checkpoint's. Routers of mixtures of experts keep theirs.
  --weights KIND          newest (default); stale: those of one update ago, which the next batch of a delayed
                          run reads; or ema: their moving average
  --max-shard-size SIZE   of a file, as in 5GB (default), 500MB or 2GiB
  --recipe FILE.toml      default: the recipe.toml that the run has left in RUN_DIR
  --section.key value     any field of the recipe, as in --hf_assets_path DIR for another tokenizer
  --module MODULE         as for titan-async train
  -h, --help              this text

examples:
  titan-async convert outputs/debug hf/debug
  titan-async convert outputs/debug/checkpoint/step-200 hf/debug-200 --dtype bf16 --weights stale
"""

_TYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def run(argv: Sequence[str]) -> int:
    """Converts a checkpoint or prints help; returns the exit status.

    Raises:
        UserError: a file, a flag or the checkpoint is wrong; nothing has been written.
    """
    if "-h" in argv or "--help" in argv:
        print(_HELP, end="")
        return 0
    line = parse("convert", argv, ("dtype", "weights", "max-shard-size", "recipe"), recipe=True)
    if len(line.words) != 2:
        raise UserError(
            f"convert takes two folders, of a run and for the result, not {len(line.words)}, as in "
            "titan-async convert outputs/debug hf/debug"
        )
    place, out = line.words
    weights = weights_kind(line.value("weights"))
    size = _bytes(line.value("max-shard-size") or "5GB")
    dtype = _dtype(line.value("dtype"))

    from titan_async.cli.quiet import quiet
    from titan_async.config.device import ensure_device

    with quiet():
        ensure_device()  # before torchtitan is imported

        from titan_async.cli.progress import progress_bar
        from titan_async.huggingface.convert import convert
        from titan_async.huggingface.saved_model import open_saved

        saved = open_saved(place, recipe=line.value("recipe"), flags=line.recipe_flags, weights=weights)
        with progress_bar("converting") as progress:
            done = convert(saved, out, dtype=dtype, max_shard_size=size, progress=progress)
    count = sum(name.endswith(".safetensors") for name in done.files)
    print(
        f"{out}: {done.description['architectures'][0]} of {done.parameters:,} parameters, {weights} weights "
        f"of step {saved.step} in {done.description['torch_dtype']}, {done.nbytes / 1e9:.2f} GB in {count} "
        f"file{'s' * (count > 1)}"
    )
    return 0


def weights_kind(text: str | None) -> str:
    """What `--weights` asks for.

    Raises:
        UserError: it is not one of the three kinds.
    """
    if text not in (None, "newest", "stale", "ema"):
        raise UserError(f"--weights must be newest, stale or ema, not {text}")
    return text or "newest"


def _dtype(text: str | None) -> torch.dtype | None:
    if text is None:
        return None
    if text not in _TYPES:
        raise UserError(f"--dtype must be float32, bfloat16 or float16, not {text}")
    import torch

    dtype = getattr(torch, _TYPES[text])
    assert isinstance(dtype, torch.dtype)
    return dtype


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?I?)B?", text.upper())
    unit = {**_UNITS, **_BINARY_UNITS}.get(match[2]) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise UserError(f"--max-shard-size must be a size such as 5GB, 500MB or 2GiB, not {text}")
    return size
