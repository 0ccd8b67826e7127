"""The expected results of the pipelines of `sharded.py`, by a loop in one process.

W[b+1] = W[b] - update(g_b),    g_b = gradient of batch b at W[max(b-1, 0)]
"""

import copy
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.recurrence import loss_fn
from tests.support.sharded import BATCHES, MAX_NORM, adamw, build_model, data


def mean_gradient(model: nn.Module, inputs: Tensor, targets: Tensor, shares: int) -> list[Tensor]:
    """Returns the losses; the gradient of their mean is in `.grad`."""
    losses = [loss_fn(model(x), y) for x, y in zip(inputs, targets, strict=True)]
    (sum(losses) / len(losses)).backward()
    return losses


def bfloat16_gradient(model: nn.Module, inputs: Tensor, targets: Tensor, shares: int) -> list[Tensor]:
    """`mean_gradient` with weights and activations in bfloat16, and sums of gradients in float32."""
    low = copy.deepcopy(model).bfloat16()
    losses = []
    totals = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    for share in range(shares):
        sums = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
        for x, y in zip(inputs[share::shares], targets[share::shares], strict=True):
            low.zero_grad()
            losses.append(loss_fn(low(x.bfloat16()), y))
            losses[-1].backward()
            for name, parameter in low.named_parameters():
                sums[name] += parameter.grad.float()
        for name, total in totals.items():
            total += sums[name]
    for name, parameter in model.named_parameters():
        parameter.grad = totals[name] / len(inputs)
    return [
        losses[share * (len(inputs) // shares) + i]
        for i in range(len(inputs) // shares)
        for share in range(shares)
    ]


def oracle(
    shares: int,
    *,
    delay: int = 1,
    clip: Container[int] = (),
    gradient: Callable[..., list[Tensor]] = mean_gradient,
    **model: Any,
) -> tuple[dict[str, Tensor], list[list[float]], list[float]]:
    """Weights, losses and norms of the recurrence on the whole model; `delay=0` trains synchronously."""
    newest = build_model(**model)
    optimizer = adamw(newest.parameters())
    inputs, targets = data(shares, model.get("dtype", torch.float64))
    history, losses, norms = [copy.deepcopy(newest.state_dict())], [], []
    for batch in range(BATCHES):
        reader = copy.deepcopy(newest)
        reader.load_state_dict(history[max(batch - delay, 0)])
        reader.zero_grad()
        losses.append([loss.item() for loss in gradient(reader, inputs[batch], targets[batch], shares)])
        for parameter, stale in zip(newest.parameters(), reader.parameters(), strict=True):
            parameter.grad = stale.grad
        if batch in clip:
            norms.append(torch.nn.utils.clip_grad_norm_(newest.parameters(), MAX_NORM).item())
        optimizer.step()
        history.append(copy.deepcopy(newest.state_dict()))
    return history[-1], losses, norms


def difference(results: list, shares: int, expected: tuple, stages: int = 2) -> float:
    """The largest difference of a weight, loss or norm between the ranks' results and the oracle's."""
    weights, losses, norms = expected
    worst, seen = 0.0, set()
    for found, _, clipped in results:
        for name, value in found.items():
            seen.add(name)
            worst = max(worst, float((value - weights[name]).abs().max()))
        assert len(clipped) == len(norms)
        worst = max([worst, *(abs(a - b) for a, b in zip(clipped, norms, strict=True))])
    assert seen == set(weights)
    last_stage = results[-(len(results) // stages) :]
    for index, (_, found, _) in enumerate(last_stage):
        share = index * shares // len(last_stage)  # ranks of one tensor-parallel group follow each other
        for batch, wanted in zip(found, losses, strict=True):
            pairs = zip(batch, wanted[share::shares], strict=True)
            worst = max([worst, *(abs(a - b) for a, b in pairs)])
    return worst
