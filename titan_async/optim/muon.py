"""Muon for plain and sharded matrices: orthogonalized momentum, with optional error feedback.

Sources: Keller Jordan, "Muon: An optimizer for hidden layers in neural networks"
(https://kellerjordan.github.io/posts/muon/); arXiv 2606.30634 for error feedback. Options that
``torch.optim.Muon`` has keep their names; for float32 matrices ``ns_form="standard"`` is bitwise equal to it.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from titan_async.local_tensors import local_part
from titan_async.optim.base import BaseOptimizer, describe
from titan_async.optim.coefficients import STANDARD_COEFFICIENTS, Coefficients
from titan_async.optim.distributed_orthogonalization import DistributedOrthogonalizer
from titan_async.optim.elementwise import blocks, copy_unless_, should_skip
from titan_async.optim.feedback_history import (
    LEVELS,
    History,
    advance_histories,
    changes_flags,
    correct_gradients_,
    correct_updates_,
    history_key,
    may_be_state_init_step,
    negated_weights,
)
from titan_async.optim.gradient_status import GradientStatus, assume_finite, reduce_gradient_status
from titan_async.optim.muon_options import (
    check_options,
    check_parameter,
    groups_to_load,
    lr_scale,
    state_dtype,
    update_dtype,
    with_adjust_lr,
)
from titan_async.optim.shard_regions import Region, slices_within

__all__ = ["Muon"]


class Muon(BaseOptimizer):
    """Momentum whose update is orthogonalized, with decoupled weight decay and error feedback.

    For a gradient G of a matrix W, with momentum m and learning rate lr:

        B <- m B + (1 - m) G
        U  = m B + (1 - m) G  if nesterov else  B
        W <- (1 - lr weight_decay) W - lr scale(rows, cols) orthogonalize(U)

    A parameter is a matrix ``[rows, cols]`` or a stack of them ``[experts, rows, cols]``, each of which is
    updated like a separate parameter. Other parameters (embeddings, norms, biases) need another optimizer,
    such as AdamW.

    **Sharded parameters.** Parameters may be DTensors with any mix of ``Shard`` and ``Replicate``, as used by
    FSDP2, HSDP, tensor and expert parallelism; they and their state stay sharded. Each matrix is
    orthogonalized once, on its owner, one of the ranks that hold a part of it; a matrix that is whole on one
    rank is not sent. With W ranks, the other parts of a matrix are sent to the owner and their updates back,
    in ``compute_dtype``: for even shards of r rows and c columns 2 r c (W - 1) / W elements, and r c more to
    each further replica. All ranks of the mesh must call `step` together, with parameters in the same order.

    **Skipped parameters and steps.** A parameter whose gradient is missing on any rank is skipped: it does
    not decay, its momentum does not change, and its error feedback history is cleared. If any gradient is not
    finite on any rank, or not finite after its partial sums are reduced, the step changes nothing, and
    `step_was_skipped` is true; finite gradients of any magnitude leave weights and state finite. The ranks of
    the parameters' meshes agree on this; the stages of a pipeline agree by
    `ScheduleAsync2BW.clip_grad_norm_`.

    **found_inf.** With this attribute set (`set_found_inf`), the step does not check gradients, ranks do not
    communicate to agree, and the host does not wait for the device; a parameter's gradient must exist on all
    ranks that share it, or on none. Only a step that starts or clears an error feedback history reads it on
    the host.

    **Error feedback** of strength ``error_feedback`` corrects for updates that come one step late, like
    `ErrorFeedback` around this optimizer; `feedback_paused` pauses it.

    **State**, created at construction for every trainable parameter, sharded like it: ``momentum_buffer``;
    with error feedback also ``error_feedback_<level>`` and the flag ``error_feedback_<level>_valid`` (a
    scalar bool tensor on the CPU). Loading keeps their dtypes. The state of ``torch.optim.Muon`` can be
    loaded.

    Args:
        params: parameters, named parameters, or groups; all options but ``bucket_mb`` may differ between
            groups. Unknown keys of a group are kept.
        lr: learning rate, a number or a tensor with one element.
        weight_decay: decoupled weight decay.
        momentum: coefficient m of the moving average of gradients.
        nesterov: use Nesterov momentum.
        ns_coefficients: ``"standard"`` or its triple ``(3.4445, -4.7750, 2.0315)``,
            ``"polar_express"`` (arXiv 2505.16932), another triple (a, b, c), or one triple per iteration.
        eps: guards the normalization of a zero matrix; see `orthogonalize`.
        ns_steps: number of iterations.
        adjust_lr: how the update is scaled by the matrix's shape. ``"original"`` (also ``None``):
            sqrt(max(1, outputs / inputs)). ``"spectral"``, in torch ``"spectral_unclamped"``:
            sqrt(outputs / inputs) (arXiv 2310.17813).
            ``"match_rms_adamw"``: 0.2 sqrt(max(rows, cols)), which makes the root mean square of the
            update about that of AdamW (arXiv 2502.16982, section 2.2).
        compute_dtype: dtype of the iterations and of communication: ``"bfloat16"``, ``"float16"``,
            ``"float32"``, ``"float64"``, or the torch dtype of that name. With ``ns_form="auto"`` the
            iterations run in float32 on CPUs where half precision is slow.
        ns_form: how the iterations are computed, ``"auto"``, ``"standard"`` or ``"gram"``; see
            `orthogonalize`.
        cautious_weight_decay: decay only entries that the update does not move away from zero
            (arXiv 2510.12402).
        split_sizes: sizes of the logical matrices in a fused weight (QKV, gate and up); each is updated like
            a separate parameter.
        split_dim: the dimension along which they are concatenated, -2 (rows) or -1 (columns).
        input_dim: the dimension that is multiplied by the layer's input: -1 for ``torch.nn.Linear`` and
            torchtitan's experts, -2 for weights ``[inputs, outputs]``.
        error_feedback: strength s of error feedback; 1 is the paper's correction, 0 none.
        error_feedback_level: ``"update"`` (the paper's) or ``"gradient"``.
        error_feedback_dtype: dtype of its buffer; ``"auto"`` (also ``None``) is the parameter's, at least
            float32.
        momentum_dtype: dtype of the momentum, likewise.
        bucket_mb: megabytes (2^20 bytes) of matrices in ``compute_dtype`` per all-to-all, over all ranks.
        adjust_lr_fn: the name of ``adjust_lr`` in ``torch.optim.Muon``; also accepted in a group.

    Raises:
        ValueError: a parameter that is not a real, dense matrix or stack of matrices, or that is given twice,
            or an option out of its range.
        NotImplementedError: a DTensor with a partial placement, or one whose shards are not contiguous
        blocks. RuntimeError: a sparse gradient, in `step`.

    Examples:
        The update has the singular vectors of the gradient, and equal singular values:

        >>> weight = torch.nn.Parameter(torch.zeros(2, 3))
        >>> weight.grad = torch.tensor([[9.0, 0.0, 0.0], [0.0, 0.1, 0.0]])
        >>> muon = Muon([weight], lr=0.1, ns_coefficients="polar_express", ns_steps=8)
        >>> muon.step()
        >>> print(weight.data.mul(10).round().int())
        tensor([[-1,  0,  0],
                [ 0, -1,  0]], dtype=torch.int32)

        A gradient that is not finite changes nothing:

        >>> weight.grad[1, 1] = torch.nan
        >>> muon.step()
        >>> muon.step_was_skipped, bool(weight.isfinite().all())
        (True, True)
    """

    feedback_paused: bool = False
    """Whether steps are uncorrected and keep no history, as in `ErrorFeedback`."""

    _BUFFERS = ("momentum_buffer", *map(history_key, LEVELS))

    step_was_skipped: bool = False
    """Whether the last step changed nothing because a gradient was not finite; False if only the device has
    read `found_inf`."""

    skipped_params: frozenset[Tensor] = frozenset()
    """The parameters that the last step did not update because their gradient was missing on a rank."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = STANDARD_COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr: str | None = None,
        compute_dtype: torch.dtype | str = "bfloat16",
        *,
        ns_form: str = "auto",
        cautious_weight_decay: bool = False,
        split_sizes: Sequence[int] | None = None,
        split_dim: int = -2,
        input_dim: int = -1,
        error_feedback: float = 0.0,
        error_feedback_level: str = "update",
        error_feedback_dtype: torch.dtype | str | None = None,
        momentum_dtype: torch.dtype | str | None = None,
        bucket_mb: float = 32,
        adjust_lr_fn: str | None = None,
    ) -> None:
        if not bucket_mb > 0:
            raise ValueError(f"bucket_mb must be above zero, not {bucket_mb!r}")
        self._orthogonalizer = DistributedOrthogonalizer(bucket_mb)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            **with_adjust_lr({"adjust_lr": adjust_lr, "adjust_lr_fn": adjust_lr_fn}),
            "compute_dtype": compute_dtype,
            "ns_form": ns_form,
            "cautious_weight_decay": cautious_weight_decay,
            "split_sizes": split_sizes,
            "split_dim": split_dim,
            "input_dim": input_dim,
            "error_feedback": error_feedback,
            "error_feedback_level": error_feedback_level,
            "error_feedback_dtype": error_feedback_dtype,
            "momentum_dtype": momentum_dtype,
        }
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        # Process groups cannot be copied, and plans refer to the original's parameters.
        return {
            **super().__getstate__(),
            "_orthogonalizer": DistributedOrthogonalizer(self._orthogonalizer.bucket_mb),
            "feedback_paused": self.feedback_paused,
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; raises like the constructor, without changes."""
        super().add_param_group(with_adjust_lr(param_group))

    def _check_options(self, group: dict[str, Any]) -> None:
        check_options(group)

    def _check_param(self, param: Tensor, name: str | None, group: dict[str, Any]) -> None:
        check_parameter(param, name, group)
        try:
            self._orthogonalizer.check(param)
        except NotImplementedError as error:
            raise NotImplementedError(f"Muon cannot update {describe(param, name)}: {error}") from None

    def _create_state_of(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if "momentum_buffer" not in state:
            dtype = state_dtype(group["momentum_dtype"], param)
            state["momentum_buffer"] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
        level = group["error_feedback_level"]
        if group["error_feedback"] and History.from_state(state, level) is None:
            dtype = state_dtype(group["error_feedback_dtype"], param)
            state.update(History.create(param, level, dtype).state())

    def _histories(self) -> dict[Tensor, History]:
        """The histories of error feedback, even if the strength is currently zero."""
        found = {
            param: History.from_state(self.state.get(param, {}), group["error_feedback_level"])
            for group in self.param_groups
            for param in group["params"]
        }
        return {param: history for param, history in found.items() if history is not None}

    def _step(self) -> None:
        self._create_state()
        params = [(param, group) for group in self.param_groups for param in group["params"]]
        for param, _ in params:
            if param.grad is not None and param.grad.layout != torch.strided:
                raise RuntimeError(f"Muon needs dense gradients; that of {describe(param, None)} is sparse")
        histories = self._histories()
        if self.feedback_paused:
            advance_histories(histories, ())
            histories = {}
        found_inf = self.found_inf
        if found_inf is not None and changes_flags(histories):
            if found_inf.item():
                self.step_was_skipped = True
                return
            found_inf = None
        if found_inf is not None:
            status = assume_finite([param for param, _ in params])
        else:
            status = reduce_gradient_status(
                [param for param, _ in params],
                corrections={
                    param: (histories[param].local, group["error_feedback"])
                    for param, group in params
                    if group["error_feedback_level"] == "gradient" and group["error_feedback"]
                    if param in histories and histories[param].is_valid
                },
                check_zero=may_be_state_init_step(histories, self.param_groups),
            )
        self.step_was_skipped = not status.finite
        if not status.finite or status.zero:
            return
        moving = {number: each for number, each in enumerate(params) if status.has_grad[number]}
        moved = {param for param, _ in moving.values()}
        self.skipped_params = frozenset(param for param, _ in params if param not in moved)
        skip = should_skip(found_inf)
        self._orthogonalizer.run(
            moving,
            functools.partial(self._update_momentum, status, histories, skip),
            functools.partial(self._update_weight, histories, skip),
        )
        advance_histories(histories, moved)

    def _update_momentum(
        self,
        status: GradientStatus,
        histories: Mapping[Tensor, History],
        skip: Tensor | None,
        param: Tensor,
        group: dict[str, Any],
    ) -> Tensor:
        """Update the momentum; returns the local part of the matrix to orthogonalize, U."""
        momentum = local_part(self.state[param]["momentum_buffer"])
        redistributed = status.redistributed.pop(param, None)
        grad = local_part(param.grad) if redistributed is None else redistributed
        assert grad is not None
        if group["error_feedback_level"] == "gradient" and param in histories:
            history = histories[param].local
            if status.large:
                grad = _clamped(grad, torch.finfo(history.dtype).max)
            corrected = grad.clone()
            valid = [histories[param].is_valid]
            correct_gradients_([corrected], [grad], [history], valid, group["error_feedback"])
            copy_unless_(skip, history, grad)
            grad = corrected
        update = torch.empty_like(momentum, dtype=update_dtype(group, momentum.dtype))
        for grad_block, momentum_block, update_block in blocks(grad, momentum, update):
            if status.large:
                # Up to half the largest number, neither the difference in lerp nor rounding overflows.
                grad_block = _clamped(grad_block, torch.finfo(momentum.dtype).max / 2)
            grad_block = grad_block.to(momentum.dtype)
            if skip is None:
                new_block = momentum_block.lerp_(grad_block, 1 - group["momentum"])
            else:
                new_block = momentum_block.lerp(grad_block, 1 - group["momentum"])
                copy_unless_(skip, momentum_block, new_block)
            if group["nesterov"]:
                update_block.copy_(grad_block.lerp(new_block, group["momentum"]))
            else:
                update_block.copy_(new_block)
        return update

    def _update_weight(
        self,
        histories: Mapping[Tensor, History],
        skip: Tensor | None,
        param: Tensor,
        group: dict[str, Any],
        local: Region,
        pieces: Sequence[tuple[Region, Region, Tensor]],
    ) -> None:
        """Update this rank's part of a parameter.

        Args:
            local: the region of the parameter on this rank.
            pieces: regions that make up that region, each with the region of its logical matrix and its
                orthogonalized update.
        """
        weight = local_part(param)
        corrects = group["error_feedback_level"] == "update" and param in histories
        # Without error feedback the weight is a placeholder for the history, which is not read.
        history = histories[param].local if corrects else weight
        valid = [corrects and histories[param].is_valid]
        for region, matrix, update in pieces:
            where = slices_within(region, local)
            rows, cols = (stop - start for start, stop in matrix[-2:])
            for weight_block, history_block, update_block in blocks(weight[where], history[where], update):
                negated = negated_weights([weight_block]) if corrects else []
                moved = weight_block if skip is None else weight_block.clone()
                _decay_and_add(moved, update_block, lr_scale(rows, cols, group), group)
                if skip is not None:
                    copy_unless_(skip, weight_block, moved)
                if corrects:
                    strength = group["error_feedback"]
                    correct_updates_([weight_block], negated, [history_block], valid, strength, skip)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, from this class or from ``torch.optim.Muon``.

        Buffers keep their dtypes, and error feedback its strength and level. The error feedback history of a
        parameter for which ``state_dict`` has none is cleared.

        Raises:
            ValueError: a buffer of another shape or placements than its parameter's, or groups that do not
                match. The optimizer is then unchanged.
        """
        super().load_state_dict(state_dict)

    def _groups_to_load(self, loaded: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return groups_to_load(loaded, self.param_groups)

    def _restore(self, loaded: dict[str, Any]) -> None:
        self._orthogonalizer.clear_plans()
        super()._restore(loaded)
        for param, _, entries in self._saved(loaded):
            for level in LEVELS:
                history = History.from_state(self.state.get(param, {}), level)
                if history is not None:
                    history.load(entries)


def _clamped(grad: Tensor, bound: float) -> Tensor:
    bound = min(bound, torch.finfo(grad.dtype).max)  # torch rejects bounds that the dtype cannot represent
    return grad.clamp(-bound, bound)


def _decay_and_add(weight: Tensor, update: Tensor, factor: float, group: dict[str, Any]) -> None:
    """Decay a weight, and add the orthogonalized update."""
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    if group["cautious_weight_decay"]:
        weight.sub_(torch.where(weight * update >= 0, weight, 0), alpha=lr * decay)
    else:
        weight.mul_(1 - lr * decay)
    weight.add_(update, alpha=-lr * factor)
