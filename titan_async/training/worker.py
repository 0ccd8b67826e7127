"""One training process: `python -m titan_async.training.worker RECIPE.toml [flags]`, started by the launcher.

User errors and hung ranks are reported as one sentence, which the launcher prints once for all ranks. Any
other exception is printed here with its traceback, before this process closes its connections; ranks that
fail because of that print nothing. If NCCL's watchdog aborts this process, the launcher reads its message
from stderr.

The exit status is 0; 2 for a user error; 128 plus the signal's number after a SIGTERM or Ctrl-C without a
save; 1 otherwise. Without our launcher it is 130 after any Ctrl-C.
"""

import contextlib
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence

from titan_async.errors import UserError
from titan_async.training.process import failures
from titan_async.training.process.library_errors import is_lost_connection, timeout_of

__all__ = ["check_restarts", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Train this rank's part of the run and return the exit status."""
    failures.end_with_launcher()
    _enable_expandable_segments()
    try:
        with contextlib.ExitStack() as until_end:
            until_end.callback(_discard_unwritten_output)
            return _train(list(sys.argv[1:] if argv is None else argv), until_end)
    except UserError as error:
        if not failures.report_failure("user", str(error)):
            _print_once(str(error))
        return 2
    except failures.HungRankError as error:
        if not failures.report_failure("no_answer", str(error)):
            print(error, file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        if is_lost_connection(error):
            failures.report_failure("lost_peer", f"lost its connection to another rank ({text[:200]})")
            return 1
        traceback.print_exc()
        sys.stderr.flush()
        failures.report_failure("error", text[:500])
        return 1


def _enable_expandable_segments() -> None:
    """Avoid fragmentation of an accelerator's memory, unless the user has configured the allocator.

    torch reads the variable when it is imported.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    if not any(name in os.environ for name in names):
        os.environ[names[0]] = "expandable_segments:True"


def _print_once(sentence: str) -> None:
    """Print on rank 0 a sentence that all ranks have, since no launcher of ours prints it."""
    if os.environ.get("RANK", "0") == "0":
        print(" ".join(sentence.split()), file=sys.stderr, flush=True)
    else:
        time.sleep(10)  # torchrun stops all ranks as soon as one ends: rank 0 must have printed it


def _discard_unwritten_output() -> None:
    """Prevent output that cannot be written, to a full disk, from changing the exit status."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), 1)


def _train(argv: list[str], until_end: contextlib.ExitStack) -> int:
    _quiet()
    from titan_async.config.recipe_file import resolve_recipe

    resolved = resolve_recipe(argv)
    config = resolved.config
    _quiet()  # again: some imports configure logging
    if failures.ERROR_DIR not in os.environ:
        check_restarts()
        # Under torchrun the configuration was not checked yet.
        from titan_async.training.preflight.check import check, check_messages

        check_messages(config)
        check(config, world_size=int(os.environ["WORLD_SIZE"]))
        if config.comm.mode == "fake_backend":
            os.environ.setdefault("NGPU", os.environ["WORLD_SIZE"])
    if os.environ.get("RANK", "0") == "0":
        from titan_async.training.process import run_folder

        until_end.enter_context(run_folder.locked(config.dump_folder))
        run_folder.write_recipe(resolved)

    import torch.distributed as dist
    from torch.distributed.checkpoint.api import CheckpointException
    from torchtitan.observability import structured_logger

    from titan_async.training.process.hung_ranks import describe_hung_ranks
    from titan_async.training.process.preemption import PreemptedError

    structured_logger.init_structured_logger(
        source="training", output_dir=config.dump_folder, enable=config.debug.enable_structured_logging
    )
    trainer, status = None, 0
    try:
        trainer = config.build()
        if config.checkpoint.create_seed_checkpoint:
            _save_seed_checkpoint(trainer)
        else:
            trainer.train()
        if trainer.preemption.interrupted and failures.ERROR_DIR not in os.environ:
            status = 128 + signal.SIGINT
    except PreemptedError as stopped:
        status = 128 + stopped.request
    except (CheckpointException, FileNotFoundError) as error:
        user_error = _checkpoint_error(error, config)
        if user_error is None:
            raise
        raise user_error from error
    except Exception as error:
        seconds = timeout_of(error)
        if seconds is None:
            raise
        folder = None if trainer is None else trainer.recording.folder
        sentence = describe_hung_ranks(seconds, dist.get_rank(), folder, config.comm)
        raise failures.HungRankError(sentence) from error
    finally:
        if trainer is not None:
            trainer.close()
    dist.destroy_process_group()
    return status


def _save_seed_checkpoint(trainer) -> None:
    checkpoint = trainer.config.checkpoint
    if not trainer.checkpointer.save(curr_step=0, last_step=True):
        setting = "load_only" if checkpoint.enable else "no-enable"
        raise UserError(
            f"checkpoint.create_seed_checkpoint saves nothing because of checkpoint.{setting}: remove one"
        )
    folder = os.path.join(trainer.config.dump_folder, checkpoint.folder, "step-0")
    trainer.reporter.log(f"saved the seed checkpoint: {folder}")


def check_restarts() -> None:
    """Refuse a torchrun whose restarts may fail.

    It keeps one store for all attempts, in which restarted processes may find the addresses of dead ones;
    they then cannot connect, or hang.
    """
    environ = os.environ
    restarts = int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise UserError(
            f"with torchrun --max-restarts {restarts}, restarted processes may connect to dead ones: set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, on every node"
        )


def _quiet() -> None:
    """Suppress the logs of libraries on the terminal: torchtitan logs to the root logger, on every rank."""
    is_logging_rank = os.environ.get("RANK", "0") == "0"
    level = os.environ.get("TITAN_ASYNC_LOG", "").upper() if is_logging_rank else "ERROR"
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger().setLevel(level or logging.ERROR)
    logging.getLogger("titan_async").setLevel(level or logging.WARNING)
    # torchtitan advises to add the last stage's rank to LOG_RANK; here rank 0 prints its loss.
    os.environ.setdefault("LOG_RANK", ",".join(map(str, range(int(os.environ.get("WORLD_SIZE", "1"))))))
    for message in (  # warnings about calls inside libraries
        "'set_vital' is deprecated",
        "To get the last learning rate",
        "DTensor random operators",
        "DTensor manual_seed",
        "Torchinductor does not support code generation for complex",
        "In CPU autocast, but the target dtype is not supported",
        r"`torch\.distributed\.\w+` is deprecated",
        r"FSDP2-wrapped module \(FSDPEmbedding\) returned a view tensor",
    ):
        warnings.filterwarnings("ignore", message=message)
    for name in ("torch.utils.cpp_extension", "torch.distributed.tensor._redistribute"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _checkpoint_error(error: Exception, config) -> UserError | None:
    """The error for a checkpoint that does not match the recipe; None for any other error."""
    folder = os.path.join(config.dump_folder, config.checkpoint.folder)
    text = str(error)
    if "load_step" in text:
        return UserError(" ".join(text.split()))
    if "Missing key" in text and "dataloader" in text:
        return UserError(
            f"the checkpoint in {folder} holds only the model and cannot be resumed; set "
            "checkpoint.initial_load_path to it and choose another dump_folder"
        )
    if "Missing key" in text or "Size mismatch" in text or "size mismatch" in text:
        return UserError(
            f"the checkpoint in {folder} does not match the model or optimizer of this recipe; choose "
            "another dump_folder, or remove the old checkpoint"
        )
    return None


if __name__ == "__main__":
    sys.exit(main())
