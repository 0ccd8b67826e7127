"""The study's model: a small decoder with RMSNorm, rotary positions and gated MLPs, dense or a mixture."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from _text import VOCAB
from torch import Tensor, nn

__all__ = ["MODELS", "Decoder", "Shape", "language_loss"]

_BALANCE = 0.01
"""Weight of the load-balancing loss of a mixture (arXiv 2101.03961, section 2.2, has the same)."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of the sequences it is trained on."""

    width: int
    layers: int
    heads: int
    hidden: int  # of the MLP, or of one expert
    length: int  # of a sequence, in bytes
    experts: int = 0  # 0: a dense MLP
    active: int = 2  # experts per byte


MODELS = {
    "dense": Shape(width=96, layers=4, heads=3, hidden=288, length=64),
    "moe": Shape(width=96, layers=4, heads=3, hidden=48, length=64, experts=8),
    "dense_5m": Shape(width=256, layers=6, heads=4, hidden=768, length=64),
    "tiny": Shape(width=32, layers=4, heads=2, hidden=64, length=32),
}
"""By the name that question files use. `tiny` is for tests."""


class Attention(nn.Module):
    """Causal self-attention with rotary positions (arXiv 2104.09864)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(shape.width, shape.width, bias=False) for _ in range(4)
        )
        head_width = shape.width // shape.heads
        frequencies = 10000.0 ** -(torch.arange(0, head_width, 2) / head_width)
        angles = torch.outer(torch.arange(shape.length), frequencies)
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        q, k, v = (
            project(x_BLD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(self._rotated(q), self._rotated(k), v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))

    def _rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin


class GatedMLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
        return self.down(F.silu(self.gate(x_BLD)) * self.up(x_BLD)), x_BLD.new_zeros(())


class Mixture(nn.Module):
    """A mixture of gated MLPs; `active` of them process each byte, weighted by the router's softmax.

    All experts are computed for all bytes, and those not selected have weight zero. At this size that is
    faster than sorting bytes by expert, with the same outputs and gradients.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.active = shape.active
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.gate = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.width))
        self.up = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.width))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.width, shape.hidden))

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
        x_ND = x_BLD.flatten(0, 1)
        probabilities_NE = self.router(x_ND).softmax(-1)
        chosen_NE = torch.zeros_like(probabilities_NE).scatter(
            1, probabilities_NE.topk(self.active, dim=-1).indices, 1.0
        )
        weights_NE = probabilities_NE * chosen_NE
        weights_NE = weights_NE / weights_NE.sum(-1, keepdim=True)
        hidden_ENH = F.silu(x_ND @ self.gate.mT) * (x_ND @ self.up.mT)
        out_END = (hidden_ENH * weights_NE.T.unsqueeze(-1)) @ self.down.mT
        experts = chosen_NE.shape[1]
        balance = experts * (chosen_NE.mean(0) / self.active * probabilities_NE.mean(0)).sum()
        return out_END.sum(0).view_as(x_BLD), balance


class Block(nn.Module):
    """A pre-norm decoder layer; returns its output and its load-balancing loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp = Mixture(shape) if shape.experts else GatedMLP(shape)

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
        x_BLD = x_BLD + self.attention(self.norm_attention(x_BLD))
        out_BLD, balance = self.mlp(self.norm_mlp(x_BLD))
        return x_BLD + out_BLD, balance


class Decoder(nn.Module):
    """From bytes [batch, length] to logits [batch, length, VOCAB] and the layers' load-balancing loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCAB, bias=False)
        self._initialize()

    def _initialize(self) -> None:
        for name, param in self.named_parameters():
            if param.ndim > 1:
                # Smaller for matrices that write to the residual stream, so that it does not grow with depth.
                writes = name.endswith(("out.weight", "down.weight", "mlp.down"))
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * len(self.layers)) if writes else 0.02)

    def forward(self, bytes_BL: Tensor) -> tuple[Tensor, Tensor]:
        x_BLD = self.embedding(bytes_BL)
        balance = x_BLD.new_zeros(())
        for layer in self.layers:
            x_BLD, of_layer = layer(x_BLD)
            balance = balance + of_layer
        return self.head(self.norm(x_BLD)), _BALANCE * balance


def language_loss(model: nn.Module, bytes_BL: Tensor, targets_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats per byte, and the objective: the cross-entropy plus the load-balancing loss."""
    logits_BLV, balance = model(bytes_BL)
    loss = F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten())
    return loss, loss + balance
