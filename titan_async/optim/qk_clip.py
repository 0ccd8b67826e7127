"""QK-clip: keeps attention logits from growing without bound, by shrinking query and key projections.

Source: "Kimi K2: Open Agentic Intelligence" (arXiv 2507.20534), section 2.1, which calls Muon with it
MuonClip: attention logits explode more often under Muon than under AdamW.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from titan_async.local_tensors import local_part
from titan_async.optim.placement import placed_on
from titan_async.optim.tensors import at_least_float32, skips

__all__ = ["QKClip", "QueryKey"]

Rows: TypeAlias = Sequence[tuple[int, int]]
"""For each head, its first row and the one past its last."""


@dataclass(frozen=True, eq=False)
class QueryKey:
    """The query and key projections of an attention layer.

    Args:
        query: the weight ``[rows, inputs]``, or the weight and further tensors whose first dimension is rows,
            such as a bias ``[rows]``. Plain tensors, or DTensors with any mix of shards and replicas.
        key: likewise; the same tensors as ``query`` where the projections are fused.
        heads: number of query heads.
        key_heads: number of key heads. Query head h shares key head ``h // (heads // key_heads)`` with its
            neighbours. None is as many as query heads.
        query_rows: the rows of each query head; None divides all rows evenly among the heads.
        key_rows: the rows of each key head, likewise.

    Raises:
        ValueError: numbers of heads and rows that do not fit together, or rows that belong to two heads.
    """

    query: Tensor | Sequence[Tensor]
    key: Tensor | Sequence[Tensor]
    heads: int
    key_heads: int | None = None
    query_rows: Rows | None = None
    key_rows: Rows | None = None

    def __post_init__(self) -> None:
        if self.heads < 1 or self.groups < 1 or self.heads % self.groups:
            raise ValueError(f"key_heads must divide the {self.heads} heads, but is {self.key_heads}")
        self.head_of_rows()

    @property
    def groups(self) -> int:
        """Number of key heads, each with its group of query heads."""
        return self.heads if self.key_heads is None else self.key_heads

    def head_of_rows(self) -> list[tuple[Tensor, Tensor]]:
        """Each tensor, with the factor that each of its rows is to be multiplied by.

        Returns:
            Pairs of a tensor and the numbers ``[rows]`` of factors: 0 to ``heads - 1`` are those of query
            heads, those of key heads follow, and the last stands for 1.
        """
        found: dict[int, tuple[Tensor, Tensor]] = {}
        sides = (
            ("query", self.query, self.heads, self.query_rows, 0),
            ("key", self.key, self.groups, self.key_rows, self.heads),
        )
        neither = self.heads + self.groups
        for side, tensors, heads, rows, first in sides:
            for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
                size = tensor.shape[0]
                _, numbers = found.setdefault(id(tensor), (tensor, torch.full((size,), neither)))
                for head, (start, stop) in enumerate(_rows_of(side, size, heads, rows)):
                    if (numbers[start:stop] != neither).any():
                        raise ValueError(
                            f"the {side}_rows {start} to {stop} belong to another head too: give query_rows "
                            f"and key_rows that have none in common"
                        )
                    numbers[start:stop] = first + head
        return list(found.values())


def _rows_of(side: str, size: int, heads: int, rows: Rows | None) -> Rows:
    if rows is None:
        if size % heads:
            raise ValueError(f"{size} rows of the {side} do not divide among {heads} heads: give {side}_rows")
        return [(head * size // heads, (head + 1) * size // heads) for head in range(heads)]
    if len(rows) != heads:
        raise ValueError(f"{side}_rows must be one range for each of the {heads} heads, not {len(rows)}")
    for start, stop in rows:
        if not 0 <= start < stop <= size:
            raise ValueError(f"{side}_rows {start} to {stop} are no rows of a {side} of {size} rows")
    return rows


class QKClip:
    """A hook that, after a step, scales down heads whose attention logits were too large in it.

    With S_h the largest logit of head h, and f_h = min(1, tau / S_h), the weights of queries and keys change
    so that the logits of each head become f_h times what they were for the same inputs. Where heads share
    a key head, its rows are multiplied by c = sqrt(min f_h) over the heads of its group, and the query rows
    of head h by f_h / c; with a key head for each, that is sqrt(f_h) for both. Layers that normalize queries
    or keys (QK-norm) have nothing to gain from it.

    It goes with any optimizer, and knows nothing about it:

        layers = [QueryKey(a.wq.weight, a.wk.weight, heads=32, key_heads=8) for a in attentions]
        optimizer.register_step_post_hook(QKClip(layers, lambda: [a.max_logits for a in attentions]))

    Register it with the outermost optimizer, `ErrorFeedback` included: it is no update, and so has no place
    in the history of updates. A step that was skipped (``step_was_skipped``, or ``found_inf`` on the device)
    is followed by no clip. Make it after the model has been sharded. Weights may be sharded along rows,
    columns or both; each rank scales its own part, and there is no communication. On a device it waits for
    nothing, but for the first time.

    With delayed gradients the logits are those of weights one update older, so that a head that grows ends up
    that much above ``tau``.

    Args:
        layers: the attention layers; on a pipeline stage, its own.
        max_logits: called after each step; returns for each layer a plain tensor ``[heads]``, S of each query
            head over all of the batch: after scaling, before the softmax, and reduced over all ranks
            that compute any of them. A head whose entry is not finite is left alone.
        tau: largest logit allowed; the paper's is 100.

    Raises:
        ValueError: ``tau`` is not above zero; in a call, logits that do not fit the layers.

    Examples:
        Two heads of two rows each; the second one's largest logit is four times what is allowed, so that its
        queries and its keys are halved:

        >>> query, key = torch.ones(4, 3), torch.ones(4, 3)
        >>> clip = QKClip([QueryKey(query, key, heads=2)], lambda: [torch.tensor([80.0, 400.0])], tau=100.0)
        >>> clip.clip()
        >>> query[:, 0].tolist(), key[:, 0].tolist()
        ([1.0, 1.0, 0.5, 0.5], [1.0, 1.0, 0.5, 0.5])
    """

    def __init__(
        self,
        layers: Sequence[QueryKey],
        max_logits: Callable[[], Sequence[Tensor]],
        tau: float = 100.0,
    ) -> None:
        if not (tau > 0 and math.isfinite(tau)):
            raise ValueError(f"tau must be a finite number above zero, not {tau!r}")
        self.tau = tau
        self._layers = list(layers)
        self._max_logits = max_logits
        self._local = [
            {tensor: _local_rows(tensor, numbers) for tensor, numbers in layer.head_of_rows()}
            for layer in self._layers
        ]

    def __call__(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        """Clip. The signature is that of ``Optimizer.register_step_post_hook``."""
        if not getattr(optimizer, "step_was_skipped", False):
            self.clip(getattr(optimizer, "found_inf", None))

    @torch.no_grad()
    def clip(self, found_inf: Tensor | None = None) -> None:
        """Scale the heads by the largest logits as they are now, unless ``found_inf`` is 1 on the device."""
        skip = skips(found_inf)
        maxima = self._max_logits()
        if len(maxima) != len(self._layers):
            raise ValueError(f"max_logits gave {len(maxima)} tensors for {len(self._layers)} layers")
        for index, (layer, largest) in enumerate(zip(self._layers, maxima, strict=True)):
            if largest.shape != (layer.heads,):
                raise ValueError(
                    f"max_logits gave a tensor of shape {list(largest.shape)} for layer {index}, which has "
                    f"{layer.heads} heads"
                )
            factors = _factors(largest, self.tau, layer.groups)
            if skip is not None:
                factors = torch.where(skip, torch.ones_like(factors), factors)
            local = self._local[index]
            for tensor, numbers in local.items():
                weight = local_part(tensor)
                if weight.numel():
                    # Kept there: this copy waits for the device.
                    numbers = local[tensor] = numbers.to(weight.device)
                    of_rows = factors.to(weight.device)[numbers]
                    weight.mul_(of_rows.view(-1, *[1] * (weight.ndim - 1)))


def _factors(largest: Tensor, tau: float, groups: int) -> Tensor:
    """What rows are multiplied by: for each query head, for each key head, and 1."""
    largest = largest.to(at_least_float32(largest.dtype))
    too_large = (largest > tau) & largest.isfinite()
    wanted = torch.where(too_large, tau / largest, torch.ones_like(largest)).view(groups, -1)
    wanted = wanted.clamp(min=torch.finfo(wanted.dtype).tiny)  # so that it can be divided by
    key = wanted.amin(dim=1).sqrt()
    return torch.cat([(wanted / key[:, None]).flatten(), key, key.new_ones(1)])


def _local_rows(tensor: Tensor, numbers: Tensor) -> Tensor:
    """The part of ``numbers`` for the rows that lie on this rank."""
    mesh, held = placed_on(tensor)
    start, stop = held[mesh.here][0]
    return numbers[start:stop]
