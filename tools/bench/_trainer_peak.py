"""One rank of a training run that counts its live tensors, and writes the peak of its steps to a file.

Started by `planner_memory.py` as a process of its own: python _trainer_peak.py FOLDER RECIPE.toml [flags].
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_async.training import cpu

cpu.ensure_device()  # before anything of torchtitan

import torch  # noqa: E402
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group  # noqa: E402

from titan_async.planning.live_tensors import StorageTracker  # noqa: E402
from titan_async.training.recipe_file import resolve  # noqa: E402


def main(folder: str, argv: list[str]) -> None:
    torch.autograd.set_multithreading_enabled(False)  # the tracker sees this thread alone
    config = resolve(argv)
    tracker = StorageTracker()
    for module in (_fsdp_param, _fsdp_param_group):
        for name in {"alloc_storage", "free_storage"} & vars(module).keys():
            setattr(module, name, _telling(getattr(module, name), tracker))
    with tracker:
        trainer: Any = config.build()
        trainer.train()
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps({"peak": tracker.peak}))
    trainer.close()


def _telling(function: Callable[[torch.Tensor], None], tracker: StorageTracker) -> Callable[..., None]:
    def call(tensor: torch.Tensor) -> None:
        function(tensor)
        tracker.resized(tensor.untyped_storage())

    return call


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
