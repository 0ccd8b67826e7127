"""`titan-async sample RUN_DIR --prompt TEXT [flags]`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from titan_async.cli.command_line import VerbParser, checked, integer, quiet
from titan_async.cli.convert import add_weights_option

__all__ = ["run"]

_PARSER = VerbParser(
    "sample",
    "RUN_DIR[/checkpoint/step-N]",
    """\
Print the text that a model generates after a prompt, token by token, up to the end of the text. RUN_DIR is
the dump_folder of the run; its latest checkpoint is used, or that of step N. This runs in one process, on
the accelerator if there is one. It has no KV cache, which is sufficient for small models.""",
    recipe=True,
    examples=('sample outputs/debug --prompt "ROMEO:" --tokens 200',),
)
_PARSER.option("--prompt", "start of the text (default: empty)", metavar="TEXT", default="")
_PARSER.option("--tokens", "maximum number of tokens (default 100)", metavar="N", type=integer(), default=100)
_PARSER.option(
    "--temperature",
    "1 samples the model's distribution, lower values favour likely tokens, 0 takes the most likely one "
    "(default 0.8)",
    metavar="X",
    type=checked(float, "0 or a positive number", lambda value: math.isfinite(value) and value >= 0),
    default=0.8,
)
_PARSER.option(
    "--top-k",
    "sample among the N most likely tokens; 0 for all (default 50)",
    metavar="N",
    type=integer(0),
    default=50,
)
_PARSER.option("--seed", "random seed (default 0)", metavar="N", type=integer(0), default=0)
add_weights_option(_PARSER)


def run(argv: Sequence[str]) -> int:
    """Prints a text; returns the exit status.

    Raises:
        UserError: a file, an option or the checkpoint is wrong.
    """
    line = _PARSER.parse(argv)

    from titan_async.config.device import ensure_device, has_accelerator

    with quiet():
        ensure_device()  # before torchtitan is imported

        import torch

        from titan_async.huggingface.sampling import PromptTokenizer, build_model, sample_tokens
        from titan_async.huggingface.saved_model import open_saved

        [path] = line.operands
        saved = open_saved(path, recipe=line.recipe, flags=line.recipe_flags, weights=line.weights)
        tokenizer = PromptTokenizer(saved.config.hf_assets_path)
        prompt_ids = tokenizer.encode(line.prompt)
        accelerator = torch.accelerator.current_accelerator() if has_accelerator() else None
        model = build_model(saved, accelerator or torch.device("cpu"))
        new = sample_tokens(
            model,
            prompt_ids,
            count=line.tokens,
            temperature=line.temperature,
            top_k=line.top_k or None,
            seed=line.seed,
            eos_id=tokenizer.eos_id,
            max_context=saved.config.training.seq_len,
        )
        sys.stdout.write(line.prompt)
        sys.stdout.flush()
        for text in tokenizer.decode_stream(prompt_ids, new):
            sys.stdout.write(text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    return 0
