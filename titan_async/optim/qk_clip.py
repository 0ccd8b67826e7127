"""QK-clip: bounds attention logits by scaling down query and key projections.

Source: "Kimi K2: Open Agentic Intelligence" (arXiv 2507.20534), section 2.1; Muon with QK-clip is MuonClip
there. Attention logits explode more often with Muon than with AdamW.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from titan_async.local_tensors import local_part
from titan_async.optim.elementwise import at_least_float32, should_skip
from titan_async.optim.shard_regions import mesh_and_regions

__all__ = ["QKClip", "QueryKey"]

Rows: TypeAlias = Sequence[tuple[int, int]]
"""For each head, its first row and the one after its last."""


@dataclass(frozen=True, eq=False)
class QueryKey:
    """The query and key projections of an attention layer.

    Args:
        query: the weight ``[rows, inputs]``, or the weight and more tensors whose first dimension is rows,
            such as a bias ``[rows]``. Plain tensors, or DTensors with any mix of shards and replicas.
        key: likewise; the same tensors as ``query`` if the projections are fused.
        heads: number of query heads.
        key_heads: number of key heads. Query head h uses key head ``h // (heads // key_heads)``. None is
            the number of query heads.
        query_rows: the rows of each query head; None divides all rows evenly among the heads.
        key_rows: the rows of each key head, likewise.

    Raises:
        ValueError: numbers of heads and rows do not match, or rows belong to two heads.
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
        self.factor_of_rows()

    @property
    def groups(self) -> int:
        """Number of key heads, each with a group of query heads."""
        return self.heads if self.key_heads is None else self.key_heads

    def factor_of_rows(self) -> list[tuple[Tensor, Tensor]]:
        """Each tensor, with the index of the factor for each of its rows.

        Returns:
            Pairs of a tensor and indices ``[rows]`` of factors: 0 to ``heads - 1`` are those of query heads,
            those of key heads follow, and the last is 1.
        """
        found: dict[int, tuple[Tensor, Tensor]] = {}
        sides = (
            ("query", self.query, self.heads, self.query_rows, 0),
            ("key", self.key, self.groups, self.key_rows, self.heads),
        )
        unscaled = self.heads + self.groups
        for side, tensors, heads, rows, first in sides:
            for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
                size = tensor.shape[0]
                _, numbers = found.setdefault(id(tensor), (tensor, torch.full((size,), unscaled)))
                for head, (start, stop) in enumerate(_rows_of(side, size, heads, rows)):
                    if (numbers[start:stop] != unscaled).any():
                        raise ValueError(
                            f"the {side}_rows {start} to {stop} overlap with those of another head: give "
                            f"query_rows and key_rows that do not overlap"
                        )
                    numbers[start:stop] = first + head
        return list(found.values())


def _rows_of(side: str, size: int, heads: int, rows: Rows | None) -> Rows:
    if rows is None:
        if size % heads:
            raise ValueError(f"{size} rows of the {side} are not divisible by {heads}: give {side}_rows")
        return [(head * size // heads, (head + 1) * size // heads) for head in range(heads)]
    if len(rows) != heads:
        raise ValueError(f"{side}_rows must be one range for each of the {heads} heads, not {len(rows)}")
    for start, stop in rows:
        if not 0 <= start < stop <= size:
            raise ValueError(f"{side}_rows {start} to {stop} are out of range for a {side} of {size} rows")
    return rows


class QKClip:
    """A step post-hook that scales down heads whose attention logits were too large in the step.

    With S_h the largest logit of head h, and f_h = min(1, tau / S_h), the query and key weights are scaled
    so that the logits of head h are multiplied by f_h for the same inputs. The rows of a key head are
    multiplied by c = sqrt(min f_h) over its group of query heads, and the query rows of head h by f_h / c;
    without grouping both are sqrt(f_h). Layers that normalize queries or keys (QK-norm) do not benefit.

    It works with any optimizer:

        layers = [QueryKey(a.wq.weight, a.wk.weight, heads=32, key_heads=8) for a in attentions]
        optimizer.register_step_post_hook(QKClip(layers, lambda: [a.max_logits for a in attentions]))

    Register it with the outermost optimizer, `ErrorFeedback` included, so that the history of updates does
    not contain it. After a skipped step (``step_was_skipped``, or ``found_inf`` on the device) it does
    nothing. Create it after the model has been sharded. Weights may be sharded along rows, columns or both;
    each rank scales its own part, without communication. Only the first call synchronizes with the device.

    With delayed gradients the logits are those of weights one update older, so that the logits of a head may
    exceed ``tau`` by the growth of one update.

    Args:
        layers: the attention layers; on a pipeline stage, its own.
        max_logits: called after each step; returns for each layer a plain tensor ``[heads]``, S of each query
            head over all of the batch: after scaling, before the softmax, and reduced over all ranks
            that compute any of them. A head whose entry is not finite is not scaled.
        tau: largest logit allowed; the paper's is 100.

    Raises:
        ValueError: ``tau`` is not above zero; in a call, logits whose shapes do not match the layers.

    Examples:
        Two heads of two rows each. The largest logit of the second is four times ``tau``, so that its queries
        and keys are halved:

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
        self._local_indices = [
            {tensor: _local_rows(tensor, factors) for tensor, factors in layer.factor_of_rows()}
            for layer in self._layers
        ]

    def __call__(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        """Clip after a step; a hook for ``Optimizer.register_step_post_hook``."""
        if not getattr(optimizer, "step_was_skipped", False):
            self.clip(getattr(optimizer, "found_inf", None))

    @torch.no_grad()
    def clip(self, found_inf: Tensor | None = None) -> None:
        """Scale the heads by their current largest logits, unless ``found_inf`` is 1 on the device."""
        skip = should_skip(found_inf)
        maxima = self._max_logits()
        if len(maxima) != len(self._layers):
            raise ValueError(f"max_logits returned {len(maxima)} tensors for {len(self._layers)} layers")
        for index, (layer, largest) in enumerate(zip(self._layers, maxima, strict=True)):
            if largest.shape != (layer.heads,):
                raise ValueError(
                    f"max_logits returned a tensor of shape {list(largest.shape)} for layer {index} of "
                    f"{layer.heads} heads"
                )
            factors = _factors(largest, self.tau, layer.groups)
            if skip is not None:
                factors = torch.where(skip, torch.ones_like(factors), factors)
            local = self._local_indices[index]
            for tensor, numbers in local.items():
                weight = local_part(tensor)
                if weight.numel():
                    # Stored, because this copy synchronizes with the device.
                    numbers = local[tensor] = numbers.to(weight.device)
                    row_factors = factors.to(weight.device)[numbers]
                    weight.mul_(row_factors.view(-1, *[1] * (weight.ndim - 1)))


def _factors(largest: Tensor, tau: float, groups: int) -> Tensor:
    """The factors of rows: for each query head, for each key head, and 1."""
    largest = largest.to(at_least_float32(largest.dtype))
    too_large = (largest > tau) & largest.isfinite()
    wanted = torch.where(too_large, tau / largest, torch.ones_like(largest)).view(groups, -1)
    wanted = wanted.clamp(min=torch.finfo(wanted.dtype).tiny)  # the divisor must not be zero
    key = wanted.amin(dim=1).sqrt()
    return torch.cat([(wanted / key[:, None]).flatten(), key, key.new_ones(1)])


def _local_rows(tensor: Tensor, numbers: Tensor) -> Tensor:
    """The part of ``numbers`` for the rows on this rank."""
    mesh, regions = mesh_and_regions(tensor)
    start, stop = regions[mesh.rank][0]
    return numbers[start:stop]
