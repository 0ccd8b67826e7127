"""Overrides of torchtitan's modules for tracing with fake tensors.

Fake tensors have no values, so operators that depend on the routing of tokens or on a mask's blocks cannot
run. These overrides distribute tokens evenly over the experts. For accelerators, attention and norms are the
fused kernels, which save the same tensors as other implementations.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torchtitan.config import derive, override
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.trainer import Trainer

from titan_async.planning._torch_internals import flash_attention, fused_rms_norm
from titan_async.training.models.cpu_overrides import LoopGroupedExperts, applying

__all__ = ["causal_attention", "fused_norm", "overrides_of", "spread_experts"]


class CausalAttention(FlexAttention):
    """Attention by the flash kernel, which saves queries, keys, values, output and log-sum-exp."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(  # type: ignore[override]
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, scale: float | None = None, **unused: Any
    ) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        return flash_attention(q, k, v, scale).transpose(1, 2)


class FusedNorm(RMSNorm):
    """RMSNorm as one kernel, which saves its input and one number per row."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: Tensor) -> Tensor:
        return fused_rms_norm(x, self.normalized_shape, self.weight, self.eps)


class SpreadLoopExperts(LoopGroupedExperts):
    """The loop over experts, with the same number of tokens for each."""

    @dataclass(kw_only=True, slots=True)
    class Config(LoopGroupedExperts.Config):
        pass

    def _bounds(self, offs: Tensor, tokens: int) -> list[int]:
        experts = offs.shape[0]
        return [tokens * number // experts for number in range(experts + 1)]


@override(target=FlexAttention.Config, exact=True, description="attention by the flash kernel")
def causal_attention(cfg: FlexAttention.Config) -> CausalAttention.Config:
    return derive(cfg, CausalAttention.Config)


@override(target=RMSNorm.Config, exact=True, description="RMSNorm as one kernel")
def fused_norm(cfg: RMSNorm.Config) -> FusedNorm.Config:
    return derive(cfg, FusedNorm.Config)


@override(target=GroupedExperts.Config, exact=True, description="experts in a loop, tokens spread evenly")
def spread_experts(cfg: GroupedExperts.Config) -> SpreadLoopExperts.Config:
    return derive(cfg, SpreadLoopExperts.Config)


def overrides_of(config: Trainer.Config, on_cpu: bool) -> list[str]:
    """The names for `override.imports` of the overrides that apply to the model of `config`."""
    replacements: dict[type, str] = (
        {GroupedExperts.Config: "spread_experts"}
        if on_cpu
        else {FlexAttention.Config: "causal_attention", RMSNorm.Config: "fused_norm"}
    )
    return [f"{__name__}.{name}" for name in applying(replacements, config)]
