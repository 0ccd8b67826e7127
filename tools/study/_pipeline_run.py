"""One rank of a pipeline that trains the study's model; the processes of wallclock.py run it.

With `FixedSpeedStage`, several processes on one core simulate accelerators of a fixed speed: each forward and
backward is padded by sleeping, while other stages compute.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Also for wallclock.py, which imports from there after this module.
sys.path.append(str(Path(__file__).parents[1] / "bench"))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _model import MODELS, Decoder
from _optimizers import build_optimizers
from _pipelines import SCHEDULES as KINDS
from _pipelines import clip_over_pipeline
from _text import Batches, splits
from _training import MAX_NORM, learning_rate
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.optim.lr_scheduler import LambdaLR

from titan_async.optim import ErrorFeedback
from titan_async.pipelining import ScheduleAsync2BW

__all__ = ["SCHEDULES", "FixedSpeedStage", "Part", "PipelineRun", "train_rank"]

SCHEDULES = {
    **{name: KINDS[name] for name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "Async2BW")},
    "Async2BW+EF": KINDS["Async2BW"],
}
"""By the names in the results; EF is error feedback around every optimizer."""


@dataclass(frozen=True, kw_only=True)
class PipelineRun:
    """One training run of a pipeline."""

    schedule: str
    steps: int
    seed: int
    optimizer: str
    lr: float
    """Peak learning rate."""
    model: str = "dense"
    sequences: int = 12
    microbatches: int = 4
    forward_s: float = 0.0
    """Minimum duration of the forward of a microbatch on every rank; that of a backward is twice as long."""


class Part(nn.Module):
    """The half layers of stage `index` of `count`, with their names in the whole decoder.

    Attention and MLP are the halves of a layer. The input of the first stage is bytes [batch, length], the
    output of the last one logits [batch, length, VOCAB]; between stages are hidden states [batch, length,
    width]. Load-balancing losses of mixtures are left out.
    """

    def __init__(self, model: Decoder, index: int, count: int) -> None:
        super().__init__()
        halves = [(number, half) for number in range(len(model.layers)) for half in ("attention", "mlp")]
        assert count <= len(halves)
        self.embedding = model.embedding if index == 0 else None
        self.layers = nn.ModuleDict()
        for number, half in halves[index * len(halves) // count : (index + 1) * len(halves) // count]:
            if str(number) not in self.layers:
                self.layers[str(number)] = nn.ModuleDict()
            for name in (f"norm_{half}", half):
                self.layers[str(number)][name] = getattr(model.layers[number], name)
        last = index == count - 1
        self.norm, self.head = (model.norm, model.head) if last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            if "attention" in layer:
                x = x + layer["attention"](layer["norm_attention"](x))
            if "mlp" in layer:
                out, _ = layer["mlp"](layer["norm_mlp"](x))
                x = x + out
        return x if self.head is None else self.head(self.norm(x))


class FixedSpeedStage(PipelineStage):
    """A stage whose forwards last at least `forward_s` seconds, and its backwards twice as long.

    If a schedule splits backwards, the input gradient and the weight gradient each last as long as a forward.

    Args:
        module, index, count, group: as for `PipelineStage`.
        forward_s: minimum duration of a forward in seconds; 0 for no padding.
    """

    def __init__(
        self, module: nn.Module, index: int, count: int, group: dist.ProcessGroup, forward_s: float
    ) -> None:
        super().__init__(module, index, count, torch.device("cpu"), group=group)
        self._forward_s = forward_s
        self.passes = 0
        self.late = 0
        """Number of passes that computed for longer than their padded duration."""
        self.seconds = {"forward": 0.0, "backward": 0.0}

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._lasting("forward", self._forward_s):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self._lasting("backward", (1 + full_backward) * self._forward_s):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._lasting("backward", self._forward_s):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    @contextlib.contextmanager
    def _lasting(self, kind: str, seconds: float) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        rest = begin + seconds - time.perf_counter()
        self.passes += 1
        if rest > 0:
            time.sleep(rest)
        else:
            self.late += 1
        self.seconds[kind] += time.perf_counter() - begin


def _loss(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    return F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten())


def train_rank(rank: int, group: dist.ProcessGroup, run: PipelineRun) -> dict[str, Any]:
    """Trains the stages of this rank.

    Returns:
        "weights": the newest, by name. "times": the end of each step's forwards and backwards, in seconds
        since the start; "seconds": the end of the run. "losses" of the steps, in nats per byte, on the rank
        of the last stage. "passes" and "late" of the stages; "computing": the seconds of their forwards and
        backwards.
    """
    # Denormal weights would be slow.
    torch.set_flush_denormal(True)
    torch.manual_seed(run.seed)
    kind = SCHEDULES[run.schedule]
    count = kind.stages_per_rank * group.size()
    model = Decoder(MODELS[run.model])
    parts = {index: Part(model, index, count) for index in kind.stage_indices(rank, group.size())}
    params = [param for part in parts.values() for param in part.parameters()]
    stages = [
        FixedSpeedStage(part, index, count, group, run.forward_s / kind.stages_per_rank)
        for index, part in parts.items()
    ]
    schedule = kind.build(stages[0] if kind.stages_per_rank == 1 else stages, run.microbatches, loss_fn=_loss)
    optimizers = [each for part in parts.values() for each in build_optimizers(part, run.optimizer, run.lr)]
    if run.schedule == "Async2BW+EF":
        optimizers = [ErrorFeedback(optimizer) for optimizer in optimizers]
    rates = [LambdaLR(optimizer, lambda step: learning_rate(step, run.steps)) for optimizer in optimizers]
    is_first, is_last = (any(getattr(stage, name) for stage in stages) for name in ("is_first", "is_last"))
    batches = Batches("training", run.sequences, MODELS[run.model].length, run.seed)
    splits()  # reads the text
    of_step: list[Tensor] = []
    times, losses = [], []

    def update() -> None:
        if isinstance(schedule, ScheduleAsync2BW):
            schedule.clip_grad_norm_(MAX_NORM)
        else:
            clip_over_pipeline(params, group, MAX_NORM)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for rate in rates:
            rate.step()

    dist.barrier(group)
    begin = time.perf_counter()
    for step in range(run.steps):
        inputs, targets = batches(step) if is_first or is_last else (None, None)
        args = (inputs,) if is_first else ()
        schedule.step(*args, target=targets if is_last else None, losses=of_step, return_outputs=False)
        times.append(time.perf_counter() - begin)
        if is_last:
            losses.append(float(torch.stack(of_step).detach().mean()))
        if not isinstance(schedule, ScheduleAsync2BW) or schedule.gradient_ready:
            update()
    if isinstance(schedule, ScheduleAsync2BW) and schedule.drain():
        update()
    return {
        "seconds": time.perf_counter() - begin,
        "times": times,
        "losses": losses,
        "weights": {
            name: value.detach().clone()
            for part in parts.values()
            for name, value in part.state_dict().items()
        },
        "passes": sum(stage.passes for stage in stages),
        "late": sum(stage.late for stage in stages),
        "computing": {kind: sum(stage.seconds[kind] for stage in stages) for kind in ("forward", "backward")},
    }
