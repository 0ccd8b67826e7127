"""Peak bytes of live tensors on a rank of a training run."""

from typing import Any

from tests.support.trainer_loop import become_worker


def peak_of_a_run(rank: int, group: Any, argv: list[str]) -> int:
    """Trains the run of `argv` on the ranks of `group`, and returns the peak of this rank."""
    become_worker(rank, group)
    from titan_async.config.recipe_file import resolve
    from titan_async.planning.storage_tracker import peak_of_training

    return peak_of_training(resolve(argv))
