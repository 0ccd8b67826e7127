"""Muon for plain and sharded matrices: momentum, then orthogonalization, with error feedback inside.

Sources: Keller Jordan, "Muon: An optimizer for hidden layers in neural networks"
(https://kellerjordan.github.io/posts/muon/); arXiv 2606.30634 for error feedback. The spelling follows
``torch.optim.Muon`` where that has one, and with ``ns_form="standard"`` so do the bits on float32 matrices.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from titan_async.local_tensors import local_part
from titan_async.optim.coefficients import STANDARD_COEFFICIENTS, Coefficients
from titan_async.optim.distributed_orthogonalization import Distribution
from titan_async.optim.elementwise import tiles
from titan_async.optim.feedback_history import (
    LEVELS,
    correct_gradients_,
    correct_updates_,
    history_key,
    snapshot,
)
from titan_async.optim.gradient_status import Agreement, agree, presume
from titan_async.optim.muon_options import (
    adapted_groups,
    check_options,
    check_parameter,
    scale,
    state_dtype,
    translated,
    update_dtype,
)
from titan_async.optim.param_checks import check_duplicates
from titan_async.optim.shard_regions import Box, relative
from titan_async.optim.tensors import copy_unless_, fits, named, skips

__all__ = ["Muon"]


class Muon(Optimizer):
    """Momentum whose update is orthogonalized, with decoupled weight decay and error feedback.

    For a gradient G of a matrix W, with momentum m and learning rate lr:

        B <- m B + (1 - m) G
        U  = m B + (1 - m) G  if nesterov else  B
        W <- (1 - lr weight_decay) W - lr scale(rows, cols) orthogonalize(U)

    A parameter is a matrix ``[rows, cols]`` or a stack of them ``[experts, rows, cols]``, each matrix of
    which is updated as if it were a parameter of its own. Everything else (embeddings, norms, biases)
    belongs to another optimizer, such as AdamW.

    **Sharded parameters.** Parameters may be DTensors with any mix of ``Shard`` and ``Replicate``, as FSDP2,
    HSDP, tensor and expert parallelism make them; they and their state stay sharded. Each matrix is
    orthogonalized once, on one of the ranks that hold a part of it; a matrix that lies whole on one rank
    stays there. What that rank, of W, does not hold of a matrix comes to it and goes back, in
    ``compute_dtype``: for even shards of r rows and c columns 2 r c (W - 1) / W elements on the wire, and r c
    more to each further replica. All ranks of the mesh call `step` together, and have their parameters in
    the same order.

    **What is skipped.** A parameter without a gradient, be it on one rank only, is left alone: no decay, no
    change of its momentum, and its error feedback starts anew. If any gradient is not finite on any rank, or
    not once its partial sums are added up, the step changes nothing at all, and `step_was_skipped` is true;
    finite ones of any size leave weights and state finite. The ranks that agree on it are those of the
    parameters' meshes; the stages of a pipeline agree by `ScheduleAsync2BW.clip_grad_norm_`.

    **found_inf.** With this attribute set (`set_found_inf`), the step looks at no gradient, agrees on nothing
    and waits for no device; a parameter's gradient has to be there on all ranks that share it, or on none.
    Only a step in which an error feedback starts or starts anew reads it on the host.

    **Error feedback** of strength ``error_feedback`` corrects for updates that come one step late, exactly as
    `ErrorFeedback` around this optimizer does; `feedback_paused` turns it off for a while.

    **State**, made at construction for every trainable parameter, sharded like it: ``momentum_buffer``; with
    error feedback also ``error_feedback_<level>`` and the flag ``error_feedback_<level>_valid`` (a bool
    tensor without dimensions, on the CPU). Loading keeps their dtypes. The state of ``torch.optim.Muon`` can
    be loaded.

    Args:
        params: parameters, named parameters, or groups; all options but ``bucket_mb`` may differ from group
            to group. Keys of a group that Muon does not know are kept.
        lr: learning rate, a number or a tensor with one element.
        weight_decay: decoupled weight decay.
        momentum: coefficient m of the moving average of gradients.
        nesterov: look one step ahead along the momentum.
        ns_coefficients: ``"standard"`` or its triple ``(3.4445, -4.7750, 2.0315)``,
            ``"polar_express"`` (arXiv 2505.16932), another triple (a, b, c), or one triple an iteration.
        eps: guards the normalization of a zero matrix; see `orthogonalize`.
        ns_steps: number of iterations.
        adjust_lr: how the update is scaled to the matrix. ``"original"`` (also ``None``):
            sqrt(max(1, outputs / inputs)). ``"spectral"``, in torch ``"spectral_unclamped"``:
            sqrt(outputs / inputs) (arXiv 2310.17813).
            ``"match_rms_adamw"``: 0.2 sqrt(max(rows, cols)), which makes the root mean square of the
            update about that of AdamW (arXiv 2502.16982, section 2.2).
        compute_dtype: dtype of the iterations and of what ranks send each other: ``"bfloat16"``,
            ``"float16"``, ``"float32"``, ``"float64"``, or the torch dtype of that name. With
            ``ns_form="auto"`` the iterations run in float32 on CPUs that are slow with less.
        ns_form: how the iterations are computed, ``"auto"``, ``"standard"`` or ``"gram"``; see
            `orthogonalize`.
        cautious_weight_decay: decay only entries that the update does not move away from zero
            (arXiv 2510.12402).
        split_sizes: sizes of the logical matrices of which a fused weight (QKV, gate and up) is made; each is
            updated as if it were a parameter of its own.
        split_dim: the dimension along which they lie, -2 (rows) or -1 (columns).
        input_dim: which dimension is multiplied by the layer's input: -1 for ``torch.nn.Linear`` and
            torchtitan's experts, -2 for weights ``[inputs, outputs]``.
        error_feedback: strength s of error feedback; 1 is the paper's correction, 0 none.
        error_feedback_level: ``"update"`` (the paper's) or ``"gradient"``.
        error_feedback_dtype: dtype of its buffer; ``"auto"`` (also ``None``) is the parameter's, at least
            float32.
        momentum_dtype: dtype of the momentum, likewise.
        bucket_mb: megabytes (2^20 bytes) of matrices in ``compute_dtype`` that travel together, over all
            ranks.
        adjust_lr_fn: ``adjust_lr`` by the name that it has in ``torch.optim.Muon``, here as in a group.

    Raises:
        ValueError: a parameter that is no real, dense matrix or stack of matrices, or that is given twice, or
            an option out of its range.
        NotImplementedError: a DTensor with a partial placement, or one whose shards are no blocks.
        RuntimeError: a sparse gradient, in `step`.

    Examples:
        The update has the directions of the gradient, and the same length in all of them:

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
    """Whether steps correct nothing and keep no history, as in `ErrorFeedback`."""

    found_inf: Tensor | None = None
    """A float32 scalar on the parameters' device, 1 if the next steps are to change nothing; see
    `set_found_inf`."""

    step_was_skipped: bool = False
    """Whether the last step changed nothing because a gradient was not finite; False where the host does not
    know, that is with `found_inf`."""

    left_alone: frozenset[Tensor] = frozenset()
    """The parameters that the last step did not update, for want of a gradient on this rank or another."""

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
        self._distribution = Distribution(bucket_mb)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            **translated({"adjust_lr": adjust_lr, "adjust_lr_fn": adjust_lr_fn}),
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
        # Process groups cannot be copied, and what was planned for a copy's parameters is found out anew.
        return {
            **super().__getstate__(),
            "_distribution": Distribution(self._distribution.bucket_mb),
            "feedback_paused": self.feedback_paused,
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; raises as the constructor does, and then leaves no trace."""
        check_duplicates(self, self.param_groups, param_group)
        super().add_param_group(translated(param_group))
        group = self.param_groups[-1]
        try:
            check_options(group)
            names: Sequence[str | None] = group.get("param_names") or [None] * len(group["params"])
            for param, name in zip(group["params"], names, strict=True):
                check_parameter(param, name, group)
                try:
                    self._distribution.check(param)
                except NotImplementedError as error:
                    raise NotImplementedError(f"Muon cannot update {named(param, name)}: {error}") from None
        except (ValueError, NotImplementedError):
            self.param_groups.pop()
            raise
        self._make_state()

    @torch.no_grad()
    def _make_state(self) -> None:
        """See that every trainable parameter has state: a checkpoint can only be loaded into what exists."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.requires_grad or param.grad is not None:
                    self._make_state_of(param, group)

    def _make_state_of(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if "momentum_buffer" not in state:
            dtype = state_dtype(group["momentum_dtype"], param)
            state["momentum_buffer"] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
        key = history_key(group["error_feedback_level"])
        if group["error_feedback"] and key not in state:
            dtype = state_dtype(group["error_feedback_dtype"], param)
            state[key] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
            state[f"{key}_valid"] = torch.zeros((), dtype=torch.bool, device="cpu")

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss, which is handed back.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._make_state()
        params = [(param, group) for group in self.param_groups for param in group["params"]]
        for param, _ in params:
            if param.grad is not None and param.grad.layout != torch.strided:
                raise RuntimeError(f"Muon needs dense gradients; that of {named(param, None)} is sparse")
        if self.feedback_paused:
            for param, group in params:
                self._clear_history(param, group)
        found_inf = self.found_inf
        if found_inf is not None and self._a_history_starts(params):
            if found_inf.item():
                self.step_was_skipped = True
                return loss
            found_inf = None
        if found_inf is not None:
            agreement = presume([param for param, _ in params])
        else:
            agreement = agree(
                [param for param, _ in params],
                corrections=self._corrections(),
                ask_for_zero=self._may_be_void(),
            )
        self.step_was_skipped = not agreement.finite
        if not agreement.finite or agreement.zero:
            return loss
        moving = {
            number: (param, group) for number, (param, group) in enumerate(params) if agreement.moving[number]
        }
        still = [each for number, each in enumerate(params) if number not in moving]
        for param, group in still:
            self._clear_history(param, group)
        self.left_alone = frozenset(param for param, _ in still)
        skip = skips(found_inf)
        self._distribution.run(
            moving,
            functools.partial(self._update_of, agreement, skip),
            functools.partial(self._apply, skip),
        )
        return loss

    def _a_history_starts(self, params: Sequence[tuple[Tensor, dict[str, Any]]]) -> bool:
        """Whether a step would change a history's flag, which is on the host."""
        return any(
            bool(self._history(param, group)[1]) != (param.grad is not None)
            for param, group in params
            if self._keeps_history(param, group)
        )

    def _may_be_void(self) -> bool:
        """Whether this could be the step by which torch.distributed.checkpoint and torchtitan create state.

        Its gradients and learning rates are zero. It changes nothing anyway, except that a displacement of
        zero in the history would double the true first update.
        """
        if any(float(group["lr"]) != 0 for group in self.param_groups):
            return False
        histories = [
            self._history(param, group)
            for group in self.param_groups
            for param in group["params"]
            if self._keeps_history(param, group)
        ]
        return bool(histories) and not any(bool(valid) for _, valid in histories)

    def _corrections(self) -> dict[Tensor, tuple[Tensor, float]]:
        """For each parameter whose gradient is going to be corrected the last gradient, and the strength."""
        return {
            param: (self._history(param, group)[0], group["error_feedback"])
            for group in self.param_groups
            if group["error_feedback_level"] == "gradient" and group["error_feedback"]
            for param in group["params"]
            if self._keeps_history(param, group) and self._history(param, group)[1]
        }

    def _update_of(
        self, agreement: Agreement, skip: Tensor | None, param: Tensor, group: dict[str, Any]
    ) -> Tensor:
        """What is to be orthogonalized: the local part of U. Moves the momentum."""
        momentum = local_part(self.state[param]["momentum_buffer"])
        placed = agreement.placed.pop(param, None)
        grad = local_part(param.grad) if placed is None else placed
        assert grad is not None
        if group["error_feedback_level"] == "gradient" and self._keeps_history(param, group):
            history, valid = self._history(param, group)
            if agreement.large:
                grad = _within(grad, torch.finfo(history.dtype).max)
            corrected = grad.clone()
            correct_gradients_([corrected], [grad], [history], [bool(valid)], group["error_feedback"])
            copy_unless_(skip, history, grad)
            valid.fill_(True)
            grad = corrected
        update = torch.empty_like(momentum, dtype=update_dtype(group, momentum.dtype))
        for grad_tile, momentum_tile, update_tile in tiles(grad, momentum, update):
            if agreement.large:
                # Up to half the largest number, neither a difference (in lerp) nor rounding overflows.
                grad_tile = _within(grad_tile, torch.finfo(momentum.dtype).max / 2)
            grad_tile = grad_tile.to(momentum.dtype)
            if skip is None:
                new_tile = momentum_tile.lerp_(grad_tile, 1 - group["momentum"])
            else:
                new_tile = momentum_tile.lerp(grad_tile, 1 - group["momentum"])
                copy_unless_(skip, momentum_tile, new_tile)
            if group["nesterov"]:
                update_tile.copy_(grad_tile.lerp(new_tile, group["momentum"]))
            else:
                update_tile.copy_(new_tile)
        return update

    def _apply(
        self,
        skip: Tensor | None,
        param: Tensor,
        group: dict[str, Any],
        local: Box,
        pieces: Sequence[tuple[Box, Box, Tensor]],
    ) -> None:
        """Update this rank's part of a parameter.

        Args:
            local: the box of the parameter that lies on this rank.
            pieces: boxes that make up that box, the box of the logical matrix that each belongs to, and
                the orthogonalized update there.
        """
        weight = local_part(param)
        corrects = group["error_feedback_level"] == "update" and self._keeps_history(param, group)
        # Without error feedback the weight itself stands for the history, which is then not looked at.
        history, valid = self._history(param, group) if corrects else (weight, None)
        for box, matrix, update in pieces:
            where = relative(box, local)
            rows, cols = (stop - start for start, stop in matrix[-2:])
            for weight_tile, history_tile, update_tile in tiles(weight[where], history[where], update):
                before = snapshot([weight_tile]) if corrects else []
                moved = weight_tile if skip is None else weight_tile.clone()
                _move(moved, update_tile, scale(rows, cols, group), group)
                if skip is not None:
                    copy_unless_(skip, weight_tile, moved)
                if corrects:
                    correct_updates_(
                        [weight_tile], before, [history_tile], [bool(valid)], group["error_feedback"], skip
                    )
        if valid is not None:
            valid.fill_(True)

    def _has_history(self, param: Tensor, group: dict[str, Any]) -> bool:
        # Not whether there is a strength: it may be zero for a while, and the history goes on.
        return history_key(group["error_feedback_level"]) in self.state.get(param, {})

    def _keeps_history(self, param: Tensor, group: dict[str, Any]) -> bool:
        """Whether this step moves the history, and corrects by it once there is one."""
        return not self.feedback_paused and self._has_history(param, group)

    def _history(self, param: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        key = history_key(group["error_feedback_level"])
        return local_part(self.state[param][key]), self.state[param][f"{key}_valid"]

    def _clear_history(self, param: Tensor, group: dict[str, Any]) -> None:
        if self._has_history(param, group):
            history, valid = self._history(param, group)
            if valid:
                history.zero_()
                valid.fill_(False)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, from this class or from ``torch.optim.Muon``.

        Buffers keep the dtype that this optimizer was given, and error feedback its strength and level. A
        parameter without a history in ``state_dict`` starts its error feedback anew.

        Raises:
            ValueError: a buffer of another shape or placement than its parameter's, or groups that do not
                match. Nothing has been changed then.
        """
        loaded: dict[str, Any] = {}

        def take(optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            loaded.update(given)
            for param, _, entries in self._entries(given):
                for key in ("momentum_buffer", *map(history_key, LEVELS)):
                    if key in entries and not fits(entries[key], param):
                        raise ValueError(
                            f"the {key} of shape {list(entries[key].shape)} does not fit "
                            f"{named(param, None)}, or is placed in another way"
                        )
            # Torch would cast the buffers to the dtype of the parameters, so it never gets to see them.
            groups = adapted_groups(given["param_groups"], self.param_groups)
            return {**given, "state": {}, "param_groups": groups}

        def give(optimizer: Optimizer) -> None:
            self._distribution.forget()
            self.state.update(own)
            self._make_state()
            self._load_buffers(loaded)

        own = dict(self.state)
        # The last before torch's own loading, and the first behind it.
        hooks = [
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(give, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _load_buffers(self, loaded: dict[str, Any]) -> None:
        for param, group, entries in self._entries(loaded):
            if "momentum_buffer" in entries:  # also of a parameter that is frozen for now
                self._make_state_of(param, group)
            for key, own in self.state.get(param, {}).items():
                if key.endswith("_valid"):
                    own.fill_(bool(entries.get(key, True)) and key.removesuffix("_valid") in entries)
                elif key in entries:
                    local_part(own).copy_(local_part(entries[key]))
                else:
                    local_part(own).zero_()

    def _entries(self, loaded: dict[str, Any]) -> Iterator[tuple[Tensor, dict[str, Any], dict[str, Any]]]:
        """The parameters, each with its group and its entries in a state dict."""
        # Torch has a sentence for groups that do not match.
        for new, group in zip(loaded["param_groups"], self.param_groups, strict=False):
            for index, param in zip(new["params"], group["params"], strict=False):
                yield param, group, loaded["state"].get(index, {})


def _within(grad: Tensor, most: float) -> Tensor:
    most = min(most, torch.finfo(grad.dtype).max)  # torch refuses bounds that the dtype does not hold
    return grad.clamp(-most, most)


def _move(weight: Tensor, update: Tensor, factor: float, group: dict[str, Any]) -> None:
    """Decay a weight, and add the orthogonalized update."""
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    if group["cautious_weight_decay"]:
        weight.sub_(torch.where(weight * update >= 0, weight, 0), alpha=lr * decay)
    else:
        weight.mul_(1 - lr * decay)
    weight.add_(update, alpha=-lr * factor)
