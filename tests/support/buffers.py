"""A block that balances itself by buffers, like an MoE layer, and the recurrence of its training.

Weights and buffers follow the same recurrence: batch b reads those after update b - 2, and changes those
after update b - 1.
"""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.recurrence import WIDTH, Block, build_data, loss_fn
from tests.support.sharded import Stage

CHOICES = 4
PARTS = 4


class Router(nn.Module):
    """Selects one of four vectors for each row; a bias without gradient affects the selection.

    It has buffers of every kind: `bias` is read by forwards and changed by updates; `counts` (not persistent,
    as in torchtitan) is changed by forwards and reset by updates; `rows` is an integer with two names, `seen`
    flags the selected vectors, and `total` is replaced instead of changed in place.
    """

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.gate = nn.Linear(WIDTH, CHOICES, dtype=torch.float64)
        self.vectors = nn.Parameter(torch.randn(CHOICES, WIDTH, dtype=torch.float64))
        self.register_buffer("bias", torch.zeros(CHOICES, dtype=torch.float64))
        self.register_buffer("counts", torch.zeros(CHOICES, dtype=torch.float64), persistent=False)
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.register_buffer("rows_again", self.rows)
        self.register_buffer("seen", torch.zeros(CHOICES, dtype=torch.bool))
        self.register_buffer("total", torch.zeros(CHOICES, dtype=torch.float64))

    def body(self, x: Tensor) -> Tensor:
        assert torch.compiler.is_compiling() or self.rows is self.rows_again
        scores = torch.sigmoid(self.gate(x))
        choice = (scores.detach() + self.bias).argmax(-1)
        chosen = nn.functional.one_hot(choice, CHOICES)
        with torch.no_grad():
            self.counts.add_(chosen.sum(0))
            self.rows_again.add_(len(x))
            self.seen.logical_or_(chosen.any(0))
            self.total = self.total + chosen.sum(0)
        # Scaled by the bias, so that the result depends on its version.
        weight = (scores * chosen).sum(-1, keepdim=True) * (1 + self.bias.square().sum())
        return x + torch.tanh(weight * self.vectors[choice] * x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)


class Normalized(nn.Module):
    """A batch norm, with running statistics and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x))


def build_parts(recompute: bool = False) -> list[tuple[str, nn.Module]]:
    """Four parts by name, the second of them without buffers."""
    torch.manual_seed(0)
    parts = [Router(recompute), Block(), Router(recompute), Normalized()]
    return [(str(index), part) for index, part in enumerate(parts)]


def make_optimizer(model: nn.Module, group: dist.ProcessGroup | None = None) -> torch.optim.Optimizer:
    """SGD that first moves each bias towards rare choices, as torchtitan does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @torch.no_grad()
    def balance(*_: object) -> None:
        for router in model.modules():
            if isinstance(router, Router):
                counts = router.counts.clone()
                if group is not None:
                    dist.all_reduce(counts, group=group)
                delta = 0.1 * torch.sign(counts.mean() - counts)
                router.bias.add_(delta - delta.mean())
                router.counts.zero_()

    optimizer.register_step_pre_hook(balance)
    return optimizer


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Unsharded copies of the weights and of all buffers."""
    named = [*model.named_parameters(), *model.named_buffers()]
    whole = ((name, value.detach()) for name, value in named)
    return {name: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for name, v in whole}


def run_recurrence(
    n_microbatches: int, batches: int, *, recompute: bool = False, delay: int = 1
) -> tuple[dict[str, Tensor], list[list[float]]]:
    """Weights and buffers after `batches` updates, and all losses.

    A flag that a batch sets or clears has this value after its update.
    """
    newest = Stage(build_parts(recompute))
    optimizer = make_optimizer(newest)
    inputs, targets = build_data(batches, n_microbatches)
    history, losses = [copy.deepcopy(newest)], []
    for batch in range(batches):
        start = history[max(batch - delay, 0)]
        reader = copy.deepcopy(start)
        batch_losses = [loss_fn(reader(x), y) for x, y in zip(inputs[batch], targets[batch], strict=True)]
        (sum(batch_losses) / n_microbatches).backward()
        losses.append([loss.item() for loss in batch_losses])
        for parameter, stale in zip(newest.parameters(), reader.parameters(), strict=True):
            parameter.grad = stale.grad
        for buffer, before, after in zip(newest.buffers(), start.buffers(), reader.buffers(), strict=True):
            if buffer.dtype == torch.bool:
                buffer[after & ~before], buffer[before & ~after] = True, False
            else:
                buffer += after - before
        optimizer.step()
        optimizer.zero_grad()
        history.append(copy.deepcopy(newest))
    return state_of(newest), losses
