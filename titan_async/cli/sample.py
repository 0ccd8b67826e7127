"""`titan-async sample RUN_DIR --prompt TEXT [flags]`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from titan_async.cli.command_line import parse
from titan_async.cli.convert import weights_kind
from titan_async.errors import UserError

__all__ = ["run"]

_HELP = """\
usage: titan-async sample RUN_DIR[/checkpoint/step-N] [--prompt TEXT] [flags] [--section.key value ...]

Print what a model writes after a prompt, token by token, until it ends the text. RUN_DIR is the dump_folder
of the run; its latest checkpoint is taken, or that of step N. One process, on the accelerator if there is
one; each token computes the whole text anew, which suits small models.

flags:
  --prompt TEXT           what the text begins with (default: nothing)
  --tokens N              to write at most (default 100)
  --temperature X         1 draws as the model predicts, less favours what is likely, 0 takes the likeliest
                          token (default 0.8)
  --top-k N               draw among so many of the likeliest tokens; 0 for all (default 50)
  --seed N                the same seed gives the same text (default 0)
  --weights KIND          newest (default), stale or ema, as for titan-async convert
  --recipe FILE.toml      default: the recipe.toml that the run has left in RUN_DIR
  --section.key value     any field of the recipe, as in --hf_assets_path DIR for another tokenizer
  --module MODULE         as for titan-async train
  -h, --help              this text

example:
  titan-async sample outputs/debug --prompt "ROMEO:" --tokens 200
"""

_FLAGS = ("prompt", "tokens", "temperature", "top-k", "seed", "weights", "recipe")


def run(argv: Sequence[str]) -> int:
    """Prints a text or help; returns the exit status.

    Raises:
        UserError: a file, a flag or the checkpoint is wrong.
    """
    if "-h" in argv or "--help" in argv:
        print(_HELP, end="")
        return 0
    line = parse("sample", argv, _FLAGS, recipe=True)
    if len(line.words) != 1:
        raise UserError(
            f"sample takes one folder, that of a run, not {len(line.words)}, as in "
            'titan-async sample outputs/debug --prompt "ROMEO:"'
        )
    count = line.whole("tokens", 100)
    top_k = line.whole("top-k", 50, least=0)
    seed = line.whole("seed", 0, least=0)
    temperature = _temperature(line.value("temperature") or "0.8")
    weights, prompt = weights_kind(line.value("weights")), line.value("prompt") or ""

    from titan_async.cli.quiet import quiet
    from titan_async.config.device import ensure_device, has_accelerator

    with quiet():
        ensure_device()  # before torchtitan is imported

        import torch

        from titan_async.huggingface.sampling import PromptTokenizer, build_model, sample_tokens
        from titan_async.huggingface.saved_model import open_saved

        saved = open_saved(
            line.words[0], recipe=line.value("recipe"), flags=line.recipe_flags, weights=weights
        )
        tokenizer = PromptTokenizer(saved.config.hf_assets_path)
        prompt_ids = tokenizer.encode(prompt)
        accelerator = torch.accelerator.current_accelerator() if has_accelerator() else None
        model = build_model(saved, accelerator or torch.device("cpu"))
        new = sample_tokens(
            model,
            prompt_ids,
            count=count,
            temperature=temperature,
            top_k=top_k or None,
            seed=seed,
            eos_id=tokenizer.eos_id,
            max_context=saved.config.training.seq_len,
        )
        sys.stdout.write(prompt)
        sys.stdout.flush()
        for text in tokenizer.decode_stream(prompt_ids, new):
            sys.stdout.write(text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (math.isfinite(value) and value >= 0):
        raise UserError(f"--temperature must be 0 or a positive number, not {text}")
    return value
