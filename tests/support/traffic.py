"""Traffic of FSDP's collectives in a training run."""

from collections import Counter
from typing import Any

import torch.distributed as dist

from tests.support.trainer_loop import become_worker

KINDS = ("all_gather_single", "reduce_scatter_single", "all_reduce")


def bytes_put_together(rank: int, group: Any, argv: list[str]) -> dict[str, int]:
    """Trains the run of `argv`; returns the unsharded bytes of the last step's collectives, by kind.

    All-reduces of a few numbers, such as norms, are not counted.
    """
    become_worker(rank, group)
    from titan_async.config.recipe_file import resolve

    counts: Counter[str] = Counter()
    originals = {kind: getattr(dist, kind) for kind in KINDS}

    def counted(kind: str) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            largest = max(t.nbytes for t in (*args, *kwargs.values()) if hasattr(t, "nbytes"))
            counts[kind] += largest if kind != "all_reduce" or largest > 1024 else 0
            return originals[kind](*args, **kwargs)

        return collective

    trainer = resolve(argv).build()
    train_step = trainer.train_step

    def step(*args: Any, **kwargs: Any) -> None:
        counts.clear()
        train_step(*args, **kwargs)

    trainer.train_step = step
    try:
        for kind in KINDS:
            setattr(dist, kind, counted(kind))
        trainer.train()
    finally:
        for kind, original in originals.items():
            setattr(dist, kind, original)
    trainer.close()
    return dict(counts)
