"""Attention on CPU, against torch's own forward."""

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, and_masks, create_block_mask, flex_attention
from torchtitan.models.common import attention
from torchtitan.models.common.attention import FlexAttention, VarlenAttention

from titan_async.training.models.cpu_overrides import (
    DenseFlexAttention,
    DenseVarlenAttention,
    _create_attention_mask,
)

SHAPE = (2, 12, 4, 8)
POSITIONS = torch.tensor([[*range(5), *range(7)], [*range(9), *range(3)]])


def drawn() -> list[torch.Tensor]:
    """Four query heads over two of keys and values."""
    generator = torch.Generator().manual_seed(0)
    shapes = [SHAPE, (*SHAPE[:2], 2, SHAPE[3]), (*SHAPE[:2], 2, SHAPE[3])]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def of_torch(mask_mod: Any, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's output and sums in the layout of torchtitan, with the batch and the documents as they are."""
    mask = create_block_mask(mask_mod, 2, None, 12, 12, device="cpu")
    q, k, v = (t.transpose(1, 2) for t in drawn())
    out, aux = flex_attention(
        q, k, v, block_mask=mask, scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    return out.transpose(1, 2), aux.lse.transpose(1, 2)


def both(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """A transform of both, like those of models."""
    return out * torch.sigmoid(lse - 0.3).unsqueeze(-1)


@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("transform", [None, both])
def test_attention_is_that_of_torch(scale: float | None, window: int | None, transform: Any) -> None:
    mods = [attention.get_causal_mask_mod(), attention.get_document_mask_mod(POSITIONS)]
    if window is not None:
        mods.append(attention.get_sliding_window_mask_mod(window))
    mask_mod = and_masks(*mods)
    out, lse = of_torch(mask_mod, scale)
    wanted = out if transform is None else transform(out, lse)

    options: dict[str, Any] = {"scale": scale, "enable_gqa": True, "out_transform": transform}
    mask = _create_attention_mask(mask_mod, 2, None, 12, 12, device="cpu")
    flex = DenseFlexAttention(FlexAttention.Config())
    torch.testing.assert_close(flex(*drawn(), attention_masks=mask, **options), wanted)

    width = (-1 if window is None else window - 1, 0)
    varlen = DenseVarlenAttention(VarlenAttention.Config(window_size=width))
    documents = attention.create_varlen_metadata_for_document(POSITIONS)
    torch.testing.assert_close(varlen(*drawn(), attention_masks=documents, **options), wanted)
