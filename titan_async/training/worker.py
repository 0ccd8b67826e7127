"""One training process: `python -m titan_async.training.worker RECIPE.toml [flags]`, started by the launcher.

Errors leave in three ways. A mistake of the user is one sentence, printed by the launcher for all ranks.
Any other exception is printed here, with its traceback, before this process's connections close; the
ranks that fail because it is gone stay silent. The exit status is 0, 2 for a mistake, 1 otherwise.
"""

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence

from titan_async.errors import UserError
from titan_async.training import failures

__all__ = ["main"]

_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Connection refused",
    "failed to connect",
    "NCCL communicator was aborted",
    "remote process exited",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Train this rank's part of the run and return the exit status."""
    failures.end_with_launcher()
    try:
        _train(list(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        if not failures.report_failure("user", str(error)) and os.environ.get("RANK", "0") == "0":
            print(" ".join(str(error).split()), file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        if _lost_a_peer(error):
            failures.report_failure("lost_peer", f"lost its connection to another rank ({text[:200]})")
            return 1
        traceback.print_exc()
        sys.stderr.flush()
        failures.report_failure("error", text[:500])
        return 1
    return 0


def _train(argv: list[str]) -> None:
    _quiet()
    from titan_async.training.recipe_file import resolve

    config = resolve(argv)
    _quiet()  # once more: some imports set up logging of their own

    import torch.distributed as dist
    from torch.distributed.checkpoint.api import CheckpointException
    from torchtitan.observability import structured_logger

    structured_logger.init_structured_logger(
        source="training", output_dir=config.dump_folder, enable=config.debug.enable_structured_logging
    )
    trainer = None
    try:
        trainer = config.build()
        if config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            trainer.train()
    except (CheckpointException, FileNotFoundError) as error:
        raise _checkpoint_mistake(error, config) from error
    finally:
        if trainer is not None:
            trainer.close()
    dist.destroy_process_group()


def _quiet() -> None:
    """Leave the terminal to the run's own lines: torchtitan logs to the root logger, on every rank."""
    speaks = os.environ.get("RANK", "0") == "0"
    level = os.environ.get("TITAN_ASYNC_LOG", "ERROR").upper()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger().setLevel(level if speaks else logging.ERROR)
    # torchtitan advises to add the last stage's rank to LOG_RANK; here rank 0 prints its loss.
    os.environ.setdefault("LOG_RANK", ",".join(map(str, range(int(os.environ.get("WORLD_SIZE", "1"))))))
    for message in ("'set_vital' is deprecated", "To get the last learning rate", "DTensor random operators"):
        warnings.filterwarnings("ignore", message=message)  # of the libraries, about the libraries


def _lost_a_peer(error: BaseException) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        if any(sign in str(seen) for sign in _LOST_PEER):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _checkpoint_mistake(error: Exception, config) -> Exception:
    """A sentence for a checkpoint that does not fit; other errors unchanged."""
    folder = os.path.join(config.dump_folder, config.checkpoint.folder)
    text = str(error)
    if "load_step" in text:
        return UserError(" ".join(text.split()))
    if "Missing key" in text and "dataloader" in text:
        return UserError(
            f"the checkpoint in {folder} holds the model alone and cannot be resumed; set "
            "checkpoint.initial_load_path to it and choose another dump_folder"
        )
    if "Missing key" in text or "Size mismatch" in text or "size mismatch" in text:
        return UserError(
            f"the checkpoint in {folder} is of another model or optimizer than this recipe; choose another "
            "dump_folder, or remove the old checkpoint"
        )
    return error


if __name__ == "__main__":
    sys.exit(main())
