"""The stage that computes: transformer blocks on hidden states, so that all stages cost the same."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Block", "random_batch", "transformer_stage"]


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
    """Inputs and targets, [m, length, width]: one sequence a microbatch."""
    generator = torch.Generator().manual_seed(0)
    shape = (n_microbatches, length, width)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
