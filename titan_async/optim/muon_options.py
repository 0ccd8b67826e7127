"""The options of Muon: checks, and their form in a checkpoint."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from titan_async.optim.base import check_lr_and_weight_decay, describe
from titan_async.optim.coefficients import resolve_coefficients
from titan_async.optim.elementwise import at_least_float32
from titan_async.optim.feedback_history import checked_level, checked_strength
from titan_async.optim.orthogonalization import FORMS
from titan_async.optim.shard_regions import Region

__all__ = [
    "ADJUST_LR_CHOICES",
    "DTYPES",
    "check_options",
    "check_parameter",
    "groups_to_load",
    "logical_matrices",
    "lr_scale",
    "state_dtype",
    "update_dtype",
    "with_adjust_lr",
]

ADJUST_LR_CHOICES = ("original", "match_rms_adamw", "spectral")

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""Dtypes by their names in a checkpoint."""

_KEPT_ON_LOAD = (
    "compute_dtype",
    "ns_form",
    "momentum_dtype",
    "error_feedback",
    "error_feedback_dtype",
    "error_feedback_level",
    "split_sizes",
    "split_dim",
    "input_dim",
)
"""Options that a loaded checkpoint does not change.

They describe how this run computes, its buffers and weights, and the correction of its delay. A checkpoint of
a synchronous run, or of `ErrorFeedback` around Muon, must not disable the correction.
"""


def check_options(group: dict[str, Any]) -> None:
    """Check a group's options, and convert them to their form in a checkpoint.

    Raises:
        ValueError: one is out of its range.
    """
    if "bucket_mb" in group:
        raise ValueError("bucket_mb is the same for all groups: pass it to Muon itself")
    for key in ("lr", "weight_decay", "momentum", "eps", "error_feedback"):
        if isinstance(group[key], bool) or not isinstance(group[key], (int, float, Tensor)):
            raise ValueError(f"{key} must be a number, not {group[key]!r}")
    check_lr_and_weight_decay(group)
    if not (group["eps"] > 0 and math.isfinite(group["eps"])):
        raise ValueError(f"eps must be a finite number above zero, not {group['eps']!r}")
    if not 0 <= group["momentum"] < 1:
        raise ValueError(f"momentum must be at least 0 and below 1, not {group['momentum']!r}")
    if group["adjust_lr"] is None:
        group["adjust_lr"] = "original"
    elif group["adjust_lr"] == "spectral_unclamped":  # torch's name
        group["adjust_lr"] = "spectral"
    for key, choices in (("adjust_lr", ADJUST_LR_CHOICES), ("ns_form", FORMS)):
        if group[key] not in choices:
            raise ValueError(f"unknown {key} {group[key]!r}: choose {', '.join(map(repr, choices))}")
    for key in ("compute_dtype", "momentum_dtype", "error_feedback_dtype"):
        # A buffer in float16 would overflow at gradients of 65504, and lose updates below 1e-7.
        dtypes = [*DTYPES] if key == "compute_dtype" else ["bfloat16", "float32", "float64", "auto"]
        given = "auto" if group[key] is None else str(group[key]).removeprefix("torch.")
        if given not in dtypes:
            raise ValueError(f"unknown {key} {given!r}: choose {', '.join(map(repr, dtypes))}")
        group[key] = given
    triples = resolve_coefficients(group["ns_coefficients"], group["ns_steps"])
    if not isinstance(group["ns_coefficients"], str):
        group["ns_coefficients"] = triples[0] if len(set(triples)) == 1 else triples
    group["error_feedback"] = checked_strength(group["error_feedback"])
    checked_level(group["error_feedback_level"])
    _check_split(group)


def _check_split(group: dict[str, Any]) -> None:
    sizes = group["split_sizes"]
    sizes = () if sizes is None else sizes
    if not isinstance(sizes, Sequence) or not all(
        isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes
    ):
        raise ValueError(f"split_sizes must be whole numbers above zero, not {sizes!r}")
    group["split_sizes"] = tuple(sizes)
    for key in ("split_dim", "input_dim"):
        if group[key] not in (-2, -1):
            raise ValueError(
                f"{key} must be -2 (the rows of a matrix) or -1 (its columns), not {group[key]!r}"
            )


def check_parameter(param: Tensor, name: str | None, group: dict[str, Any]) -> None:
    """Check that Muon can update a parameter.

    Raises:
        ValueError: it is not a real, dense matrix or stack of matrices, or the group's ``split_sizes`` do
            not add up to its size.
    """
    if param.layout != torch.strided:
        raise ValueError(f"Muon updates dense parameters, but {describe(param, name)} is {param.layout}")
    if param.ndim not in (2, 3):
        raise ValueError(
            f"Muon updates matrices [rows, cols] and stacks of them [experts, rows, cols]; "
            f"give {describe(param, name)} to AdamW instead"
        )
    if not param.is_floating_point():
        raise ValueError(
            f"Muon updates real floating-point parameters, but {describe(param, name)} is {param.dtype}"
        )
    sizes, dim = group["split_sizes"], group["split_dim"]
    if sizes and sum(sizes) != param.shape[dim]:
        raise ValueError(
            f"split_sizes {list(sizes)} add up to {sum(sizes)}, but dimension {dim} of "
            f"{describe(param, name)} has size {param.shape[dim]}"
        )


def logical_matrices(shape: Sequence[int], group: dict[str, Any]) -> tuple[Region, ...]:
    """The regions of a parameter's logical matrices within its last two dimensions."""
    rows, cols = shape[-2:]
    if not group["split_sizes"]:
        return (((0, rows), (0, cols)),)
    found: list[Region] = []
    start = 0
    for size in group["split_sizes"]:
        part = (start, start + size)
        found.append((part, (0, cols)) if group["split_dim"] == -2 else ((0, rows), part))
        start += size
    return tuple(found)


def lr_scale(rows: int, cols: int, group: dict[str, Any]) -> float:
    """The factor on the learning rate for a matrix of this shape."""
    if group["adjust_lr"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    outputs, inputs = (rows, cols) if group["input_dim"] == -1 else (cols, rows)
    ratio = outputs / inputs
    return math.sqrt(ratio if group["adjust_lr"] == "spectral" else max(1.0, ratio))


def state_dtype(declared: str, param: Tensor) -> torch.dtype:
    """The dtype of a buffer of a parameter."""
    return at_least_float32(param.dtype) if declared == "auto" else DTYPES[declared]


def update_dtype(group: dict[str, Any], momentum: torch.dtype) -> torch.dtype:
    """The dtype of a matrix before it is sent and orthogonalized.

    It is the compute dtype, unless that has a smaller range and the matrix is scaled first.
    """
    dtype = DTYPES[group["compute_dtype"]]
    return momentum if torch.finfo(dtype).tiny > torch.finfo(momentum).tiny else dtype


def with_adjust_lr(group: dict[str, Any]) -> dict[str, Any]:
    """A group with ``adjust_lr_fn``, the name in ``torch.optim.Muon``, replaced by ``adjust_lr``.

    Raises:
        ValueError: it has both, and they differ.
    """
    if "adjust_lr_fn" not in group:
        return group
    group = dict(group)
    theirs, ours = group.pop("adjust_lr_fn"), group.get("adjust_lr")
    if None not in (theirs, ours) and theirs != ours:
        raise ValueError(
            f"adjust_lr_fn ({theirs!r}) is torch's name for adjust_lr ({ours!r}): give one of the two"
        )
    return {**group, "adjust_lr": ours if theirs is None else theirs}


def groups_to_load(loaded: list[dict[str, Any]], groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups of a state dict, possibly of ``torch.optim.Muon``, with all options of this Muon."""
    if len(loaded) != len(groups):
        return loaded  # torch raises
    result = []
    for new, own in zip(loaded, groups, strict=True):
        options = {key: value for key, value in own.items() if key not in ("params", "param_names")}
        kept = {key: options[key] for key in _KEPT_ON_LOAD}
        group = {**options, **with_adjust_lr(new), **kept}
        check_options(group)
        result.append(group)
    return result
