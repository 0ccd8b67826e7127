"""`titan-async train RECIPE.toml [flags]`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from titan_async.config.recipe_list import list_recipes, recipe_files

__all__ = ["EXAMPLES", "listing", "run"]

EXAMPLES = """\
  titan-async train debug_cpu.toml
  titan-async train debug_cpu.toml --training.steps 500 --compile.no-enable
  titan-async train debug_cpu.toml --optimizer.muon.lr 5e-3
  titan-async train debug_cpu.toml --dry-run > my_run.toml
"""

_HELP = """\
usage: titan-async train RECIPE.toml [--section.key value ...]

Train a model. RECIPE.toml names a recipe, which is a complete configuration, and overrides fields of
it, by torchtitan's names of sections and fields; flags override the file:

  recipe = "NAME"
  include = "base.toml"            # optional: another file of the same folder, read first
  activation_checkpoint = "none"   # or "selective", "full", "memory_budget"

  [training]
  steps = 300

If RECIPE.toml or base.toml does not exist, it is looked up among the recipe files below.

Outside torchrun or a cluster's job step this command starts the processes itself: as many as the product of
the parallel degrees.

flags:
  --section.key value     any field of the configuration, as in --training.steps 300
  --section.flag          a boolean; --section.no-flag turns it off
  --section.key a,b       a list
  --section.key none      no value, where the field allows it
  --dry-run               run the checks before training (data, tokenizer, sizes), print the resulting
                          configuration as a recipe file, and exit
  --live                  on a terminal, show the run full screen, as `titan-async watch` does; its output
                          goes to output.log in its folder. q closes the view, and training continues.
  --module MODULE         take the recipe function from this Python module: your own, or a torchtitan
                          model such as llama3
  -h, --help              show this help message and exit

Ctrl-C lets the ranks finish the step, save, and exit with status 130; the same command then resumes from
there. A second Ctrl-C kills them.

environment:
  NGPU                    processes on this machine (default: by the parallel degrees)
  NNODES                  machines (default 1); start the same command on each, with
  MASTER_ADDR             the name of the first one,
  MASTER_PORT             a free port there (default 29500), and
  NODE_RANK               the rank of this machine, from 0 (default: assigned automatically)

{listing}
examples:
{examples}"""


def run(argv: Sequence[str]) -> int:
    """Trains, or prints help or the configuration; returns the exit status.

    Raises:
        UserError: a file, flag or environment variable is wrong; no process has been started.
    """
    if "-h" in argv or "--help" in argv:
        print(_HELP.format(listing=listing(), examples=EXAMPLES), end="")
        return 0

    from titan_async.cli import launch

    return launch.train(list(argv))


def listing(files: Mapping[str, Path] | None = None) -> str:
    """Returns the recipes and the recipe files, each with its summary.

    Args:
        files: recipe files by their names; by default the project's.
    """
    files = recipe_files() if files is None else files
    folder = next((path.parent for path in files.values()), None)
    blocks = []
    for title, entries in (
        ("recipes", [(recipe.name, recipe.summary) for recipe in list_recipes()]),
        (f"recipe files, of {folder}", [(name, _first_comment(path)) for name, path in files.items()]),
    ):
        if entries:
            width = max(len(name) for name, _ in entries) + 2
            lines = [f"  {name:<{width}}{about}".rstrip() + "\n" for name, about in entries]
            blocks.append(f"{title}:\n" + "".join(lines))
    return "\n".join(blocks) or "no recipes were found in this installation\n"


def _first_comment(path: Path) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            first = file.readline()
    except (OSError, UnicodeDecodeError) as error:
        return f"(cannot be read: {type(error).__name__})"
    match = re.match(r"#+\s*(.*\S)", first)
    return match[1] if match else ""
