"""Time that checkpoints and failures add to a run.

A save takes S seconds and follows every I seconds of training; a failure of the job occurs every M seconds on
average. A failure costs a restart of R seconds and the training since the last complete save: on average half
the time between saves, and S more if saves are asynchronous. For T seconds of training with n saves

    days = (T + n S) / (1 - (R + (I + S) / 2) / M)        synchronous saves
    days = T / (1 - (R + I / 2 + S) / M)                  asynchronous saves
"""

from dataclasses import dataclass

from torchtitan.trainer import Trainer

from titan_async.errors import UserError
from titan_async.planning.layout import Layout
from titan_async.planning.step_time import StepTime, run_seconds

__all__ = ["NODE_SAVES", "RESTART_SECONDS", "Interruptions", "interruptions_of"]

NODE_SAVES = 2e9
"""Bytes per second that a node writes to shared storage while all nodes write. An assumption."""

RESTART_SECONDS = 600.0
"""From the detection of a failure until training resumes: node replacement, start, loading. An assumption."""


@dataclass(frozen=True, kw_only=True)
class Interruptions:
    """Saves and failures of a whole run."""

    mtbf_hours: float
    """Mean time between failures of the whole job."""
    interval_seconds: float
    """Of training between saves."""
    save_seconds: float
    blocking: bool
    """Whether saves are synchronous."""
    saves: int
    failures: float
    lost_seconds: float
    """Per failure, including the restart."""
    days: float
    """Of the run with saves and failures."""


def interruptions_of(
    config: Trainer.Config, layout: Layout, time: StepTime, saved_bytes: float, per_node: int, hours: float
) -> Interruptions:
    """The time that saves and failures add to a run.

    Args:
        config: for its checkpoint section.
        layout: of the run.
        time: of its step.
        saved_bytes: of a checkpoint, written by the ranks of one replica.
        per_node: accelerators of a node.
        hours: between failures of the whole job, on average.

    Raises:
        UserError: if the run saves nothing, or failures leave no time to train.
    """
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        raise UserError("--mtbf needs a run that saves: set checkpoint.enable, or omit --mtbf")
    interval = checkpoint.interval * time.step_seconds
    nodes = -(-layout.world_size // layout.dp_replicate // per_node)
    save = saved_bytes / (nodes * NODE_SAVES)
    blocking = checkpoint.async_mode == "disabled"
    saves = -(-layout.steps // checkpoint.interval)
    lost = RESTART_SECONDS + ((interval + save) / 2 if blocking else interval / 2 + save)
    working = 1 - lost / (hours * 3600)
    if working <= 0:
        raise UserError(
            f"with --mtbf {hours:g} a failure costs {lost / 3600:.2g} hours, more than the time between two "
            "failures: lower checkpoint.interval"
        )
    training = run_seconds(layout, time.step_seconds, time.synchronous_step_seconds)
    seconds = (training + saves * save * blocking) / working
    return Interruptions(
        mtbf_hours=hours,
        interval_seconds=interval,
        save_seconds=save,
        blocking=blocking,
        saves=saves,
        failures=seconds / (hours * 3600),
        lost_seconds=lost,
        days=seconds / 86_400,
    )
