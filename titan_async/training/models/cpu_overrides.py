"""Replacements of torchtitan's modules on CPU: attention with a dense mask, experts in a loop.

torchtitan imports them through `override.imports`, and only without an accelerator.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config import derive, override
from torchtitan.distributed.context_parallel import api as context_parallel
from torchtitan.models.common import attention, decoder
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from titan_async.training.pipeline import overlap

__all__ = [
    "DenseFlexAttention",
    "DenseVarlenAttention",
    "LoopGptOssExperts",
    "LoopGroupedExperts",
    "applying",
    "dense_attention",
    "dense_varlen_attention",
    "gpt_oss_loop_experts",
    "loop_experts",
    "override_imports",
]

# Shapes: B batch, L sequence, N heads, H head size, D model size, E experts, R routed tokens


class DenseFlexAttention(FlexAttention):
    """FlexAttention by SDPA with a dense mask: exact, with document masking, O(L^2) memory."""

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
        if score_mod is not None:
            raise NotImplementedError("attention on CPU supports masks but no score_mod")
        if out_transform is not None:
            return out_transform(*_attend(q_BLNH, k_BLNH, v_BLNH, attention_masks, scale))
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attention_masks, scale=scale, enable_gqa=enable_gqa
        )
        return out.transpose(1, 2)


class DenseVarlenAttention(VarlenAttention):
    """Attention over packed documents, one after the other, each with dense scores."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        out_transform: Callable | None = None,
        **unused: Any,
    ) -> Tensor:
        B, L = q_BLNH.shape[:2]
        packed = [t.flatten(0, 1)[None] for t in (q_BLNH, k_BLNH, v_BLNH)]
        left, right = self.window_size
        outs, sums = [], []
        for start, end in pairwise(attention_masks.cu_seq_q.tolist()):
            places = torch.arange(end - start)
            ahead = places - places[:, None]  # by how much a key comes after its query
            mask = (ahead <= (right if right >= 0 else end)) & (-ahead <= (left if left >= 0 else end))
            out, lse = _attend(*(t[:, start:end] for t in packed), mask, scale)
            outs.append(out)
            sums.append(lse)
        out_BLNH = torch.cat(outs, dim=1).unflatten(1, (B, L)).squeeze(0)
        if out_transform is None:
            return out_BLNH
        return out_transform(out_BLNH, torch.cat(sums, dim=1).unflatten(1, (B, L)).squeeze(0))


def _attend(
    q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, mask: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention, and the log-sum-exp of each query's scores, of shape (B, L, N)."""
    groups = q_BLNH.shape[2] // k_BLNH.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
    k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    scores = (q @ k.transpose(-2, -1)).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~mask, -torch.inf)
    out = scores.softmax(dim=-1).to(v.dtype) @ v
    return out.transpose(1, 2), scores.logsumexp(dim=-1).transpose(1, 2)


class LoopGroupedExperts(GroupedExperts):
    """A loop over experts in float32: torch's grouped bf16 matmul is about 20 times slower on CPU."""

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
        """The start of each expert's tokens, and the end of the last."""
        return [0, *offs.tolist()]


class LoopGptOssExperts(GptOssGroupedExperts):
    """The same for gpt-oss, whose experts have biases."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        pass

    _grouped_mm = LoopGroupedExperts._grouped_mm
    _bounds = LoopGroupedExperts._bounds

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        # Its matmuls are in bfloat16, whatever the dtype of the model.
        return super().forward(x_RD, num_tokens_per_expert_E).type_as(x_RD)


@override(target=FlexAttention.Config, exact=True, description="SDPA with a dense mask on CPU")
def dense_attention(cfg: FlexAttention.Config) -> DenseFlexAttention.Config:
    return derive(cfg, DenseFlexAttention.Config)


@override(target=VarlenAttention.Config, exact=True, description="documents one by one on CPU")
def dense_varlen_attention(cfg: VarlenAttention.Config) -> DenseVarlenAttention.Config:
    return derive(cfg, DenseVarlenAttention.Config)


@override(target=GroupedExperts.Config, exact=True, description="experts in a loop on CPU")
def loop_experts(cfg: GroupedExperts.Config) -> LoopGroupedExperts.Config:
    return derive(cfg, LoopGroupedExperts.Config)


@override(target=GptOssGroupedExperts.Config, exact=True, description="experts in a loop on CPU")
def gpt_oss_loop_experts(cfg: GptOssGroupedExperts.Config) -> LoopGptOssExperts.Config:
    return derive(cfg, LoopGptOssExperts.Config)


def override_imports(config) -> list[str]:
    """The names, for `override.imports`, of the replacements that apply to the model of `config`."""
    replacements = {
        FlexAttention.Config: "dense_attention",
        VarlenAttention.Config: "dense_varlen_attention",
        GroupedExperts.Config: "loop_experts",
        GptOssGroupedExperts.Config: "gpt_oss_loop_experts",
    }
    own = [f"{__name__}.{name}" for name in applying(replacements, config)]
    return own + overlap.override_imports(config)


def applying(replacements: Mapping[type, str], config) -> list[str]:
    """The names of those replacements whose module class is in the model of `config`."""
    model = config.model_spec.model
    return [
        name
        for target, name in replacements.items()
        if any(type(node) is target for _, node, _, _ in model.traverse(target))
    ]


def _create_attention_mask(
    mask_mod: Callable, B: int, H: int | None, Q_LEN: int, KV_LEN: int, *, device: Any, **unused: Any
) -> Tensor:
    """A bool mask [B, H or 1, Q_LEN, KV_LEN], computed once per microbatch for all layers.

    `mask_mod` is pointwise, as FlexAttention requires. It is called once, with index tensors that broadcast;
    `create_mask` computes the same by four nested `vmap`, which take longer than a small layer.
    """
    shape = (B, H or 1, Q_LEN, KV_LEN)
    indices = (
        torch.arange(length, device=device).view([-1 if other == axis else 1 for other in range(4)])
        for axis, length in enumerate(shape)
    )
    return mask_mod(*indices).expand(shape)


# torchtitan compiles the block mask, which is slow on CPU. `decoder` has imported the function by name.
attention.create_attention_mask = decoder.create_attention_mask = _create_attention_mask


def _shard_context(
    cp_mesh: DeviceMesh,
    inputs: tuple[Tensor, ...],
    attention_masks: Tensor | Mapping[str, Tensor] | None,
    load_balancer_type: str | None = "headtail",
    *args: Any,
    **options: Any,
) -> tuple[tuple[Tensor, ...], Any]:
    """torchtitan's `cp_shard` for dense masks: each rank has some of the queries, and all keys."""
    ranks = cp_mesh.size()
    chunks = torch.arange(inputs[0].shape[1], device=inputs[0].device).view(2 * ranks, -1)
    if load_balancer_type is not None:  # a rank has a chunk from the head, and one from the tail
        chunks = chunks[[chunk for rank in range(ranks) for chunk in (rank, 2 * ranks - 1 - rank)]]
    keys = chunks.flatten()
    queries = keys.view(ranks, -1)[cp_mesh.get_local_rank()]
    inputs, _ = _shard_inputs(cp_mesh, inputs, None, load_balancer_type, *args, **options)

    def sharded(mask: Tensor) -> Tensor:
        return mask[:, :, queries][:, :, :, keys]

    if isinstance(attention_masks, Mapping):
        return inputs, {name: sharded(mask) for name, mask in attention_masks.items()}
    return inputs, None if attention_masks is None else sharded(attention_masks)


_shard_inputs = context_parallel.cp_shard
context_parallel.cp_shard = _shard_context
