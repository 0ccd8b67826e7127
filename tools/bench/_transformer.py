"""Stages of transformer blocks on hidden states, so that all stages cost the same."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Block", "Model", "random_batch", "transformer_stage"]


class Block(nn.Module):
    """A pre-norm decoder block: causal attention and an MLP of four times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.norm_attention(x_BLD)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BLD = x_BLD + self.out(attended.transpose(1, 2).flatten(2))
        return x_BLD + self.down(F.gelu(self.up(self.norm_mlp(x_BLD))))


def transformer_stage(blocks: int, width: int, heads: int = 4) -> nn.Module:
    return nn.Sequential(*(Block(width, heads) for _ in range(blocks)))


def random_batch(n_microbatches: int, length: int, width: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, [m, length, width]: one sequence per microbatch."""
    generator = torch.Generator().manual_seed(0)
    shape = (n_microbatches, length, width)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@dataclass(frozen=True)
class Model:
    """The computation of one rank for one microbatch."""

    blocks: int = 2
    """Transformer blocks per rank, over all its stages."""
    width: int = 256
    length: int = 320
    """Tokens in a microbatch, which is one sequence."""
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def stage(self, stages_per_rank: int = 1) -> nn.Module:
        """One of a rank's stages, with heads of size 128, but at least four heads."""
        blocks = self.blocks // stages_per_rank
        return transformer_stage(blocks, self.width, max(4, self.width // 128)).to(self.device, self.dtype)

    def batch(self, n_microbatches: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of `n_microbatches` microbatches."""
        inputs, targets = random_batch(n_microbatches, self.length, self.width)
        return inputs.to(self.device, self.dtype), targets.to(self.device, self.dtype)
