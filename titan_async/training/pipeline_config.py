"""The section `[pipeline]`: what this project adds to torchtitan's options for pipeline parallelism."""

from dataclasses import dataclass
from typing import Literal

from titan_async.training.lr_scheduler import share_of

__all__ = ["PipelineConfig"]


@dataclass(kw_only=True, slots=True)
class PipelineConfig:
    """Options of the pipeline that `torchtitan.config.ParallelismConfig` lacks."""

    balance: Literal["layers", "measured"] = "layers"
    """How the model is split into stages. "layers" is torchtitan's way: the same number of layers on each,
    where `parallelism.pipeline_parallel_first_stage_less_layers` and `..._last_stage_less_layers` say how
    many layers the embedding and the head count for. "measured" instead times forward and backward of each
    kind of layer, of the embedding and of the head when training starts, and makes the slowest stage as
    fast as a split into whole layers can."""

    lookahead: int = 0
    """Microbatches that the first stage keeps in flight beyond the stages - 1 that it must, under Async2BW;
    their number falls evenly to none at the last stage. They hide the latency of messages and uneven
    stages, and each costs a microbatch's activations; more than stages - 1 are of little use."""

    early_receives: Literal["auto", "always", "never"] = "auto"
    """Whether the receive of a message is posted while the stage computes what comes before, under Async2BW.
    That hides the transfer, but on a GPU a posted receive occupies multiprocessors, and one at each end of an
    edge can hang if something waits for both devices. "auto" does so for all messages on the CPU, and on
    accelerators, if there is a lookahead, for activations from another host."""

    synchronous_steps: int | None = None
    """Steps at the start of training without delay, under Async2BW: each drains the pipeline, which costs the
    bubble of 1F1B, and the next one reads the updated weights. Error feedback begins after them. "none" for
    `synchronous_ratio` of all steps; a number takes its place."""

    synchronous_ratio: float = 0.0
    """Share of the steps (`training.steps`) that are synchronous, rounded down. Without effect where
    `synchronous_steps` is a number."""

    overlap: bool = False
    """Whether a stage computes a forward and a backward together, each while the other's tokens travel
    between experts, under Async2BW. It hides the all-to-alls of experts that are spread over ranks
    (`parallelism.expert_parallel_degree`). With it stage r of d holds 2 (d - 1 - r) + 1 microbatches in
    flight instead of d - 1 - r, and while it computes such a pair one more, and a batch needs at least
    2 d - 1."""

    def resolved_synchronous_steps(self, training_steps: int) -> int:
        """The synchronous steps at the start of a run of so many under Async2BW."""
        if self.synchronous_steps is not None:
            return min(self.synchronous_steps, training_steps)
        return share_of(training_steps, self.synchronous_ratio)
