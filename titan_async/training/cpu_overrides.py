"""torchtitan modules replaced on CPU: attention with a dense mask, experts in a loop, gloo's all-to-all.

Imported through `override.imports`, by torchtitan, and only where there is no accelerator.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single
from torchtitan.config import derive, override
from torchtitan.models.common import attention, decoder
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

__all__ = [
    "DenseFlexAttention",
    "GlooTokenDispatcher",
    "LoopGroupedExperts",
    "applying",
    "dense_attention",
    "gloo_dispatch",
    "loop_experts",
    "override_imports",
]

# Shapes: B batch, L sequence, N heads, H head size, D model size, E experts, R routed tokens


class DenseFlexAttention(FlexAttention):
    """FlexAttention by SDPA with the whole mask: exact, keeps documents apart, O(L^2) memory."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(  # type: ignore[override]
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Tensor,
        score_mod: Callable | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if score_mod is not None or out_transform is not None:
            raise NotImplementedError("attention on CPU supports masks but no score_mod or out_transform")
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attention_masks, scale=scale, enable_gqa=enable_gqa
        )
        return out.transpose(1, 2)


class LoopGroupedExperts(GroupedExperts):
    """A loop over experts in float32: torch's grouped bf16 product is some 20 times slower on CPU."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        bounds = self._bounds(offs, len(A))
        parts = [
            A[start:end].float() @ B_t[expert].float()
            for expert, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False))
        ]
        return torch.cat(parts).to(A.dtype)

    def _bounds(self, offs: Tensor, tokens: int) -> list[int]:
        """Where each expert's tokens begin, and where the last one's end."""
        return [0, *offs.tolist()]


class GlooTokenDispatcher(AllToAllTokenDispatcher):
    """Exchanges by `all_to_all_single`, because gloo's list all-to-all wants chunks of one size."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    def _dispatch_token_exchange(self, routed_input_ND, pg, output_splits, input_splits):
        return all_to_all_single(routed_input_ND, output_splits, input_splits, pg)

    def _combine_token_exchange(self, routed_output_RD, pg, input_splits, output_splits):
        return all_to_all_single(routed_output_RD, input_splits, output_splits, pg)


@override(target=FlexAttention.Config, exact=True, description="SDPA with a dense mask on CPU")
def dense_attention(cfg: FlexAttention.Config) -> DenseFlexAttention.Config:
    return derive(cfg, DenseFlexAttention.Config)


@override(target=GroupedExperts.Config, exact=True, description="experts in a loop on CPU")
def loop_experts(cfg: GroupedExperts.Config) -> LoopGroupedExperts.Config:
    return derive(cfg, LoopGroupedExperts.Config)


@override(target=AllToAllTokenDispatcher.Config, exact=True, description="all-to-all that gloo supports")
def gloo_dispatch(cfg: AllToAllTokenDispatcher.Config) -> GlooTokenDispatcher.Config:
    return derive(cfg, GlooTokenDispatcher.Config)


def override_imports(config) -> list[str]:
    """The names, for `override.imports`, of the replacements that apply to the model of `config`."""
    replacements = {
        FlexAttention.Config: "dense_attention",
        GroupedExperts.Config: "loop_experts",
        AllToAllTokenDispatcher.Config: "gloo_dispatch",
    }
    return [f"{__name__}.{name}" for name in applying(replacements, config)]


def applying(replacements: Mapping[type, str], config) -> list[str]:
    """Of replacements of exactly these kinds of modules the names that the model of `config` needs."""
    model = config.model_spec.model
    return [
        name
        for target, name in replacements.items()
        if any(type(node) is target for _, node, _, _ in model.traverse(target))
    ]


def _create_attention_mask(
    mask_mod: Callable, B: int, H: int | None, Q_LEN: int, KV_LEN: int, *, device: Any, **unused: Any
) -> Tensor:
    """A bool mask [B, H or 1, Q_LEN, KV_LEN], made once a microbatch for all layers.

    `mask_mod` is pointwise, as FlexAttention requires. It is called once, with index tensors that broadcast;
    `create_mask` gives the same mask through four nested `vmap`, which take longer than a small layer.
    """
    shape = (B, H or 1, Q_LEN, KV_LEN)
    indices = (
        torch.arange(length, device=device).view([-1 if other == axis else 1 for other in range(4)])
        for axis, length in enumerate(shape)
    )
    return mask_mod(*indices).expand(shape)


# torchtitan compiles the block mask, which takes long on CPU. `decoder` has imported the function by name.
attention.create_attention_mask = decoder.create_attention_mask = _create_attention_mask
