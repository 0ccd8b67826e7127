"""`titan-async import HF_DIR RUN_DIR [RECIPE.toml] [flags]`."""

from __future__ import annotations

from collections.abc import Sequence

from titan_async.cli.command_line import VerbParser, progress_bar, quiet

__all__ = ["run"]

_PARSER = VerbParser(
    "import",
    "HF_DIR RUN_DIR [RECIPE.toml]",
    """\
Start a run from a model in Hugging Face's format: a folder with config.json and safetensors, as
from_pretrained loads it and titan-async convert writes it. The command writes a checkpoint of step 0 with
these weights, and a recipe.toml, to RUN_DIR. Training with it starts at the first batch with a new optimizer.

RECIPE.toml must be of the same model. Without it, the recipe is the one that titan-async convert has
written to HF_DIR, or is created from config.json: of Llama, Qwen3 (dense or a mixture of experts),
DeepSeek-V3 or dots.llm1. The run uses HF_DIR's tokenizer, if there is one.""",
    recipe=True,
    examples=(
        "import hf/debug outputs/more --training.steps 100",
        "import assets/hf/SmolLM2-135M outputs/smollm2 --dataloader.dataset_path my_texts/",
        "train outputs/more/recipe.toml",
    ),
)


def run(argv: Sequence[str]) -> int:
    """Writes the folder of a run; returns the exit status.

    Raises:
        UserError: a file, a flag or the model is wrong; nothing has been written.
    """
    line = _PARSER.parse(argv)
    model, run_folder, *recipe = line.operands

    from titan_async.config.device import ensure_device

    with quiet():
        ensure_device()  # before torchtitan is imported

        from titan_async.huggingface.import_model import import_model

        with progress_bar("importing") as progress:
            import_model(
                model,
                run_folder,
                recipe=recipe[0] if recipe else None,
                flags=line.recipe_flags,
                progress=progress,
            )
    print(f"{run_folder}: train from these weights with titan-async train {run_folder}/recipe.toml")
    return 0
