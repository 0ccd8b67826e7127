"""One run of the study: trains a model with a delay in one process, and evaluates it."""

import importlib.metadata
import math
import statistics
import time
from datetime import UTC, datetime
from typing import Any

import torch
from _model import MODELS, Decoder, language_loss
from _optimizers import build_optimizers
from _remedies import (
    AdaptiveStrength,
    PaciGradients,
    Prediction,
    SmoothedFeedback,
    compensate_gradients_,
)
from _runs import Run
from _text import VOCAB, Batches
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from titan_async.optim import DelayedGradients, ErrorFeedback, pipedream_delays

__all__ = ["MAX_NORM", "compile_training", "evaluate", "learning_rate", "stages_of", "train", "versions"]

MAX_NORM = 1.0  # as in arXiv 2606.30634
_EVALUATED_BYTES = 49_152  # of validation and of test
_CURVE_POINTS = 20
_AVERAGED_SHARE = 0.02
"""Time constant of the moving average of the weights, as a fraction of the run."""

_loss_of_batch = language_loss


def compile_training() -> None:
    """Compiles forward and backward of the following runs in this process; losses differ in rounding.

    Compilation takes seconds in the first run of a model, and makes a step about a quarter faster.
    """
    global _loss_of_batch
    _loss_of_batch = torch.compile(language_loss, fullgraph=True, dynamic=False)


def learning_rate(step: int, steps: int, warm_up: float = 0.1) -> float:
    """Fraction of the peak rate: linear warm-up over a fraction of the run, then a cosine to a tenth."""
    rising = max(1, round(warm_up * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.55 + 0.45 * math.cos(math.pi * (step - rising) / (steps - rising))


def stages_of(model: Decoder, count: int) -> list[list[nn.Parameter]]:
    """The parameters of `count` stages of about the same depth, split between quarters of layers.

    The quarters of a layer are the input projections of attention, its output projection, the input
    projections of the MLP, and its output projection. Embedding and head belong to the first and last stage.
    """
    quarters: list[list[nn.Parameter]] = []
    for layer in model.layers:
        for norm, module in ((layer.norm_attention, layer.attention), (layer.norm_mlp, layer.mlp)):
            inputs, outputs = list(norm.parameters()), []
            for name, param in module.named_parameters():
                (outputs if name.startswith(("out", "down")) else inputs).append(param)
            quarters += [inputs, outputs]
    if count > len(quarters):
        raise ValueError(f"{len(model.layers)} layers make at most {len(quarters)} stages, not {count}")
    stages: list[list[nn.Parameter]] = [[] for _ in range(count)]
    for index, quarter in enumerate(quarters):
        stages[index * count // len(quarters)] += quarter
    stages[0] += model.embedding.parameters()
    stages[-1] += [*model.norm.parameters(), *model.head.parameters()]
    return stages


@torch.no_grad()
def evaluate(model: nn.Module, split: str, length: int) -> float:
    """Mean cross-entropy in nats per byte, always over the same sequences of the split."""
    sequences = 16
    batches = Batches(split, sequences, length, seed=0)
    count = _EVALUATED_BYTES // (sequences * length)
    return sum(float(language_loss(model, *batches(index))[0]) for index in range(count)) / count


def versions() -> dict[str, str]:
    packages = ("torch", "titan-async", "pytorch-optimizer")
    return {package: importlib.metadata.version(package) for package in packages}


def train(run: Run) -> dict[str, Any]:
    """Trains one run.

    Returns:
        Losses in nats per byte: "validation", "test", "curve" (training, means over equal parts of the run);
        "averaged_validation" and "averaged_test", of a moving average of the weights at the end;
        "settled_validation" and "settled_test", without the look-ahead of error feedback at the level of
        updates. "strength": the mean of an adaptive one. "diverged": whether the loss was not finite, or at
        the end above that of the uniform distribution. "seconds" of training; "versions"; "started", in UTC.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    torch.manual_seed(run.seed)
    shape = MODELS[run.model]
    model = Decoder(shape)
    begin = time.perf_counter()
    averaged = AveragedModel(
        model, multi_avg_fn=get_ema_multi_avg_fn(1 - 1 / max(2.0, _AVERAGED_SHARE * run.steps))
    )
    losses, loop = _train(run, model, averaged)
    seconds = time.perf_counter() - begin

    result = {
        f"{prefix}{name}": _rounded(evaluate(weights, name, shape.length))
        for prefix, weights in (("", model), ("averaged_", averaged))
        for name in ("validation", "test")
    }
    if run.feedback == "update" and not run.synchronous_end and math.isfinite(result["test"]):
        loop.settle()
        for name in ("validation", "test"):
            result[f"settled_{name}"] = _rounded(evaluate(model, name, shape.length))
    if loop.adaptive is not None:
        result["strength"] = _rounded(statistics.fmean(loop.adaptive.values))
    parts = torch.tensor(losses).tensor_split(min(_CURVE_POINTS, len(losses)))
    uniform = math.log(VOCAB)
    return {
        **result,
        "curve": [round(float(part.mean()), 4) for part in parts],
        "diverged": not result["test"] < uniform,
        "seconds": round(seconds, 2),
        "versions": versions(),
        "started": started,
    }


def _rounded(loss: float) -> float:
    return round(loss, 5)


class _Loop:
    """The optimizers of a run, and the study's own corrections between their steps."""

    def __init__(self, run: Run, model: Decoder) -> None:
        assert isinstance(run.lr, float)
        self.params = list(model.parameters())
        built = build_optimizers(model, run.optimizer, run.lr, run.lr_factor, run.momentum, run.rest_lr)
        self.feedback = run.feedback in ("update", "gradient")
        self.adaptive = None
        if self.feedback:
            adaptive = run.strength == "adaptive"
            strength = 1.0 if adaptive else run.strength
            built = [ErrorFeedback(optimizer, strength, run.feedback) for optimizer in built]
            self.adaptive = AdaptiveStrength(built, run.feedback) if adaptive else None
        self.optimizers: list[Optimizer] = built
        delay = run.delay if isinstance(run.delay, int) else 0

        def share(step: int) -> float:
            annealed = run.lr_anneal * run.steps
            power = max(0.0, 1 - step / annealed) if annealed else 0.0
            return learning_rate(step, run.steps, run.warm_up) / (1 + delay) ** power

        self.rates = [LambdaLR(optimizer, share) for optimizer in built]
        self.smoothed = (
            SmoothedFeedback(self.params, run.strength, run.smoothing) if run.feedback == "smoothed" else None
        )
        self.prediction = Prediction(self.params, run.prediction) if run.prediction else None

    def step(self) -> None:
        if self.smoothed is not None:
            self.smoothed.before_step()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for rates in self.rates:
            rates.step()
        for part in (self.smoothed, self.prediction, self.adaptive):
            if part is not None:
                part.after_step()

    def pause_feedback(self, paused: bool) -> None:
        """Disables error feedback and its history, as a synchronous start of the trainer does."""
        if self.feedback:
            for optimizer in self.optimizers:
                optimizer.feedback_paused = paused

    @torch.no_grad()
    def settle(self) -> None:
        """Removes the look-ahead of error feedback from the weights."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.sub_(optimizer.state[param]["error_feedback_update"], alpha=optimizer.strength)


def _train(run: Run, model: Decoder, averaged: AveragedModel) -> tuple[list[float], _Loop]:
    loop = _Loop(run, model)
    delay = _delay(run, model)
    start, end = round(run.synchronous_start * run.steps), round((1 - run.synchronous_end) * run.steps)
    paci = PaciGradients(model, stages_of(model, run.paci)) if run.paci else None
    batches = Batches("training", run.sequences, MODELS[run.model].length, run.seed)
    losses = []
    for step in range(run.steps):
        if step in (0, start, end):
            if step == end and run.feedback == "update":
                loop.settle()
            is_delayed = start <= step < end
            delayed = DelayedGradients(model, delay if is_delayed else 0)
            loop.pause_feedback(not is_delayed)
        inputs, targets = batches(step)
        if paci is not None:
            loss = paci.backward(inputs, targets)
        else:
            with delayed.batch():
                if loop.prediction is not None:
                    loop.prediction.move()
                read = [param.detach().clone() for param in loop.params] if run.curvature else []
                loss, objective = _loss_of_batch(model, inputs, targets)
                objective.backward()
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            break
        if run.curvature:
            compensate_gradients_(loop.params, read, run.curvature)
        nn.utils.clip_grad_norm_(loop.params, MAX_NORM)
        loop.step()
        averaged.update_parameters(model)
    return losses, loop


def _delay(run: Run, model: Decoder) -> int | dict[nn.Parameter, int]:
    if isinstance(run.delay, int):
        return run.delay
    return pipedream_delays(stages_of(model, int(run.delay.removeprefix("pipedream-"))))
