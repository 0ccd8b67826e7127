"""The most bytes of live tensors that a rank of a training run holds."""

import os
from typing import Any

from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def peak_of_a_run(rank: int, group: Any, argv: list[str]) -> int:
    """Train as `argv` says, in a process that torchtitan takes for one of `group`'s size."""
    from titan_async.config.device import ensure_device

    ensure_device()
    from titan_async.config.recipe_file import resolve
    from titan_async.planning.storage_tracker import peak_of_training

    os.environ.update(LOCAL_RANK=str(rank), LOG_RANK=",".join(map(str, range(group.size()))))
    _clear_sharding_prop_cache()  # which remembers the meshes of an earlier trainer
    return peak_of_training(resolve(argv))
