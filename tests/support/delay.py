"""A loop with `DelayedGradients`, a loop of the recurrence without it, and optimizers for both."""

import copy

import torch
from torch import nn

from tests.support.recurrence import build_blocks, build_data, loss_fn
from titan_async.optim import ErrorFeedback, Lion, Muon

BATCHES = 8
MICROBATCHES = 3
DEPTH = 3


class Several:
    """Optimizers that step one after another."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self):
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, states):
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def muon(module):
    matrices = [p for p in module.parameters() if p.ndim == 2]
    vectors = [p for p in module.parameters() if p.ndim < 2]
    return Several(
        Muon(matrices, lr=0.05, compute_dtype="float64"), torch.optim.AdamW(vectors, lr=0.05, fused=True)
    )


PLAIN = {
    "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=0.05),
    "fused_adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=0.05, fused=True),
    "lion": lambda module: Lion(module.parameters(), lr=0.02, weight_decay=0.1),
    "muon": muon,
}


def with_feedback(build):
    def wrapped(module):
        optimizer = build(module)
        if isinstance(optimizer, Several):
            return Several(*map(ErrorFeedback, optimizer.optimizers))
        return ErrorFeedback(optimizer)

    return wrapped


OPTIMIZERS = PLAIN | {f"{name} with feedback": with_feedback(build) for name, build in PLAIN.items()}


def model(depth=DEPTH, recompute=False):
    return nn.Sequential(*build_blocks(depth, recompute=recompute))


def batch_loss(module, x, y):
    """Runs one backward per microbatch, as in gradient accumulation."""
    losses = []
    for one, target in zip(x, y, strict=True):
        loss = loss_fn(module(one), target)
        (loss / len(x)).backward()
        losses.append(loss.item())
    return losses


def train(module, delayed, optimizer, batches, max_norm=None):
    inputs, targets = build_data(BATCHES, MICROBATCHES)
    losses = []
    for b in batches:
        with delayed.batch():
            losses.append(batch_loss(module, inputs[b], targets[b]))
        if max_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def oracle(build, delays, max_norm=None, batches=BATCHES):
    """Batch b reads each parameter from the list of all its versions, into a second module."""
    newest, reader = model(), model()
    optimizer = build(newest)
    inputs, targets = build_data(BATCHES, MICROBATCHES)
    history, losses = [copy.deepcopy(newest.state_dict())], []
    for b in range(batches):
        stale = {name: history[max(b - delays[name], 0)][name] for name in history[0]}
        reader.load_state_dict(stale)
        reader.zero_grad()
        losses.append(batch_loss(reader, inputs[b], targets[b]))
        for param, read in zip(newest.parameters(), reader.parameters(), strict=True):
            param.grad = read.grad.clone()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(newest.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        history.append(copy.deepcopy(newest.state_dict()))
    return history[-1], losses


def difference(module, weights):
    return max(float((value - weights[name]).abs().max()) for name, value in module.state_dict().items())


def names(module):
    return [name for name, _ in module.named_parameters()]
