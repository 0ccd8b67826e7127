"""One rank of a training run that counts its live tensors, and writes the peak to a file.

Started as a process of its own: python _trainer_peak.py FOLDER RECIPE.toml [flags].
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from titan_async.training import cpu

cpu.ensure_device()  # before anything of torchtitan

import torch  # noqa: E402

from titan_async.planning._torch_internals import telling_of_resized_storages  # noqa: E402
from titan_async.planning.live_tensors import StorageTracker  # noqa: E402
from titan_async.training.recipe_file import resolve  # noqa: E402


def main(folder: str, argv: list[str]) -> None:
    torch.autograd.set_multithreading_enabled(False)  # the tracker sees this thread alone
    config = resolve(argv)
    with StorageTracker() as tracker, telling_of_resized_storages(tracker.resized):
        trainer: Any = config.build()
        trainer.train()
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps({"peak": tracker.peak}))
    trainer.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
