"""The most bytes of live tensors that a rank of a training run holds."""

import os
from typing import Any

import torch
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def peak_of_a_run(rank: int, group: Any, argv: list[str]) -> int:
    """Train as `argv` says, in a process that torchtitan takes for one of `group`'s size."""
    from titan_async.training import cpu

    cpu.ensure_device()
    from titan_async.planning._torch_internals import telling_of_resized_storages
    from titan_async.planning.live_tensors import StorageTracker
    from titan_async.training.recipe_file import resolve

    os.environ.update(LOCAL_RANK=str(rank), LOG_RANK=",".join(map(str, range(group.size()))))
    torch.autograd.set_multithreading_enabled(False)  # the tracker sees this thread alone
    _clear_sharding_prop_cache()  # which remembers the meshes of an earlier trainer
    config = resolve(argv)
    with StorageTracker() as tracker, telling_of_resized_storages(tracker.resized):
        trainer: Any = config.build()
        trainer.train()
    trainer.close()
    return tracker.peak
