"""One rank of a training run that counts its live tensors, and writes the peak to a file.

Started as a process of its own: python _trainer_peak.py FOLDER RECIPE.toml [flags].
"""

import json
import os
import sys
from pathlib import Path

from titan_async.config.device import ensure_device

ensure_device()  # before anything of torchtitan

from titan_async.config.recipe_file import resolve  # noqa: E402
from titan_async.planning.storage_tracker import peak_of_training  # noqa: E402


def main(folder: str, argv: list[str]) -> None:
    peak = peak_of_training(resolve(argv))
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps({"peak": peak}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
