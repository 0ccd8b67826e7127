"""An independent computation of the recurrence: one process, one loop, no pipeline::

W[b+1] = W[b] - update(g_b),    g_b = gradient of batch b at W[max(b-1, 0)]

and of a synchronous start, in which g_b is the gradient at W[b].
"""

import copy
from collections.abc import Callable, Collection
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from titan_async.pipelining import hand_over

WIDTH = 8

Recompute = Literal[False, True, "selective"]
"""Activation checkpointing: none, full, or of everything except matrix products."""


class Travel(torch.autograd.Function):
    """The identity, with a switch to the other half of a pair, as in an exchange between experts."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        hand_over()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        hand_over()
        return gradient.clone()


class Block(nn.Module):
    """A layer with a gradient that depends on several kinds of weights: scale, matrices, bias."""

    def __init__(self, recompute: Recompute = False, travels: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.travel = Travel.apply if travels else nn.Identity()
        self.scale = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64) + 0.5)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False, dtype=torch.float64)

    def body(self, x: Tensor) -> Tensor:
        return x + self.travel(self.down(torch.tanh(self.up(self.travel(x * self.scale)))))

    def forward(self, x: Tensor) -> Tensor:
        if not self.recompute:
            return self.body(x)
        contexts = {"context_fn": _keep_products} if self.recompute == "selective" else {}
        return checkpoint(self.body, x, use_reentrant=False, **contexts)


def _keep_products() -> tuple:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])


def build_blocks(
    num_stages: int, seed: int = 0, recompute: Recompute = False, travels: bool = False
) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [Block(recompute, travels) for _ in range(num_stages)]


def build_data(batches: int, n_microbatches: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (batches, n_microbatches, 3, WIDTH)
    return (
        torch.randn(shape, generator=generator, dtype=torch.float64),
        torch.randn(shape, generator=generator, dtype=torch.float64),
    )


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def run_batch(call: Callable, stage: PipelineStage, inputs: Tensor, targets: Tensor) -> list[float]:
    """Calls a schedule's `step` or `eval` with a batch [microbatches, rows, WIDTH].

    Returns:
        The losses of its microbatches, on the last stage.
    """
    losses: list[Tensor] = []
    args = (inputs.flatten(0, 1),) if stage.is_first else ()
    target = targets.flatten(0, 1) if stage.is_last else None
    call(*args, target=target, losses=losses)
    return [loss.item() for loss in losses]


def run_recurrence(
    num_stages: int,
    n_microbatches: int,
    batches: int,
    make_optimizer: Callable,
    *,
    delay: int = 1,
    max_norm: float | None = None,
    synchronous: Collection[int] = (),
) -> tuple[dict[str, Tensor], list[list[float]]]:
    """Weights after `batches` updates and every microbatch's loss; `delay=0` is synchronous training.

    The batches of `synchronous` have no delay, and after them the delay starts as at the beginning.
    """
    newest = nn.Sequential(*build_blocks(num_stages))
    reader = copy.deepcopy(newest)
    optimizer = make_optimizer(newest)
    inputs, targets = build_data(batches, n_microbatches)
    history, losses = [copy.deepcopy(newest.state_dict())], []
    oldest = 0
    for b in range(batches):
        if b in synchronous or b - 1 in synchronous:
            oldest = b
        reader.load_state_dict(history[max(b - delay, oldest)])
        reader.zero_grad()
        batch_losses = [loss_fn(reader(x), y) for x, y in zip(inputs[b], targets[b], strict=True)]
        (sum(batch_losses) / n_microbatches).backward()
        for parameter, stale in zip(newest.parameters(), reader.parameters(), strict=True):
            parameter.grad = stale.grad.clone()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(newest.parameters(), max_norm)
        optimizer.step()
        history.append(copy.deepcopy(newest.state_dict()))
        losses.append([loss.item() for loss in batch_losses])
    return history[-1], losses
