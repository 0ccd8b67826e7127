"""Calibrates a plan by the measured times of a run, from `measured.json` in its folder.

Measured forward and backward times, summed over stages, are divided by planned ones of the same stages; the
two ratios scale every stage of the plan, whatever its layout. So the measured run must be of the same model,
but may have other degrees and another microbatch size.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.trainer import Trainer

from titan_async.errors import UserError
from titan_async.file_io import read_json
from titan_async.planning.hardware import Cluster
from titan_async.planning.layout import Layout
from titan_async.planning.stage_cost import StageCost
from titan_async.planning.step_time import stage_costs
from titan_async.planning.traced_parts import trace_parts
from titan_async.training.telemetry.stage_times import MEASURED_FILE

__all__ = ["AS_ASSUMED", "Calibration", "calibrate"]


@dataclass(frozen=True)
class Calibration:
    """Ratios of measured to planned times."""

    forward: float
    backward: float

    def apply(self, costs: Sequence[StageCost]) -> list[StageCost]:
        """The costs, scaled by the ratios."""
        return [
            dataclasses.replace(
                cost,
                forward=cost.forward * self.forward,
                input_gradient=cost.input_gradient * self.backward,
                weight_gradient=cost.weight_gradient * self.backward,
                exchange=(cost.exchange[0] * self.forward, cost.exchange[1] * self.backward),
            )
            for cost in costs
        ]


_LAYOUT_FIELDS = ("pp", "dp_replicate", "dp_shard", "tp", "ep", "microbatch_size", "microbatches", "seq_len")

AS_ASSUMED = Calibration(1.0, 1.0)


def calibrate(config: Trainer.Config, cluster: Cluster, folder: str) -> Calibration:
    """Compare a run's measured times with its planned ones.

    Args:
        config: the plan's configuration, of the same model.
        cluster: the plan's hardware.
        folder: the run's `dump_folder`.

    Raises:
        UserError: if the folder has no measured times, or those of another model.
    """
    record = _read(Path(folder) / MEASURED_FILE)
    try:
        layout = _layout_of(record)
        seconds = [(float(stage["forward"]), float(stage["backward"])) for stage in record["stages"]]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{Path(folder) / MEASURED_FILE} is not in the format of this version ({error!r}): repeat the run"
        ) from error
    config = _of_run(config, layout)
    parts = trace_parts(config, on_cpu=cluster.accelerator.on_cpu)
    if [name for stage in layout.stages for name in stage] != list(parts):
        raise UserError(
            f"--measured {folder} is a run of another model ({sum(map(len, layout.stages))} parts, not "
            f"{len(parts)}): give the dump_folder of a run of this model"
        )
    costs = stage_costs(config, layout, parts, cluster)
    return Calibration(
        sum(forward for forward, _ in seconds) / sum(cost.forward for cost in costs),
        sum(backward for _, backward in seconds) / sum(cost.backward for cost in costs),
    )


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except FileNotFoundError:
        raise UserError(
            f"--measured {path.parent} contains no {path.name}, which a run with several stages and without "
            "pipeline.overlap writes after its first steps: give the dump_folder of such a run"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): give the dump_folder of another run") from None


def _layout_of(record: Any) -> Layout:
    numbers = {name: int(record[name]) for name in _LAYOUT_FIELDS}
    stages = tuple(tuple(stage["parts"]) for stage in record["stages"])
    return Layout(schedule=str(record["schedule"]), passes=1, lookahead=0, steps=1, stages=stages, **numbers)


def _of_run(config: Trainer.Config, layout: Layout) -> Trainer.Config:
    """The configuration with the run's settings that its parts depend on."""
    training = dataclasses.replace(config.training, seq_len=layout.seq_len)
    parallelism = dataclasses.replace(
        config.parallelism,
        pipeline_parallel_microbatch_size=layout.microbatch_size,
        pipeline_parallel_degree=layout.pp,
    )
    config = config.__class__(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)})
    config.training, config.parallelism = training, parallelism  # without validation of the batch size
    return config
