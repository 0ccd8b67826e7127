"""The most bytes of live tensors that a rank of a training run holds."""

from typing import Any

from tests.support.trainer_loop import become_worker


def peak_of_a_run(rank: int, group: Any, argv: list[str]) -> int:
    """Train as `argv` says, in a process that torchtitan takes for one of `group`'s size."""
    become_worker(rank, group)
    from titan_async.config.recipe_file import resolve
    from titan_async.planning.storage_tracker import peak_of_training

    return peak_of_training(resolve(argv))
