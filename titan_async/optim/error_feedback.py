"""Error feedback around any optimizer: corrects for updates that come one step late (arXiv 2606.30634)."""

import warnings
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from titan_async.local_tensors import local_part
from titan_async.optim.base import BaseOptimizer, check_duplicates, describe
from titan_async.optim.compiled_adamw import supports_compiled_update, update_and_correct_
from titan_async.optim.elementwise import at_least_float32, copy_unless_, should_skip
from titan_async.optim.feedback_history import (
    LEVELS,
    History,
    MergedState,
    advance_histories,
    changes_flags,
    checked_level,
    checked_strength,
    correct_gradients_,
    correct_updates_,
    history_key,
    may_be_state_init_step,
    negated_weights,
    split_state,
)
from titan_async.optim.gradient_status import gradients_are_zero
from titan_async.optim.lion import Lion

__all__ = ["ErrorFeedback"]

_SEPARABLE_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, Lion)
"""Optimizers whose update of a parameter does not depend on the other parameters."""

_CHUNK_NUMEL = 2**22
"""Elements that are updated and then corrected at a time."""


class ErrorFeedback(BaseOptimizer):
    """An optimizer that corrects the updates of the optimizer it wraps.

    With a delay of one update, the update applied now is that of the previous batch. The correction
    extrapolates by one step: to an update D_b it adds s (D_b - D_{b-1}). The paper's correction, with s = 1,
    cancels the update before the last: x[t+1] = x[t] - 2 u(g[t-1]) + u(g[t-2]).

    It is meant for optimizers that average gradients, whose next update resembles the last one: Muon, AdamW,
    SGD with momentum. For others it was worse than no correction in measurements, and a warning is issued:
    those that do not average (Adagrad; RMSprop without momentum; Adam and Lion with a first beta of 0), and
    NAdam, which already extrapolates. For Lion it helped in some measurements and not in others
    (docs/delay.md, docs/study_300.md).

    Level "update" lets the wrapped optimizer step, measures the displacement of each parameter (learning rate
    and decoupled weight decay included), and adds ``strength`` times its difference from the previous
    displacement. Level "gradient" passes corrected gradients to the wrapped optimizer, and restores the given
    ones afterwards. At both levels

    - the history is the uncorrected displacement or gradient; a change of the learning rate does not rescale
      it;
    - moments see each gradient once;
    - the first update of a parameter, and the one after an update without a gradient, are uncorrected;
    - a step that the wrapped optimizer reports as skipped (``step_was_skipped``, which `Muon` sets when a
      gradient is not finite) keeps the history, and the history of a parameter that it reports as not updated
      (``skipped_params``, which `Muon` sets when a gradient is missing on another rank) is cleared;
    - with strength 0 updates are bitwise those of the wrapped optimizer; the history is kept, so that
      `strength` may be changed at any time;
    - while `feedback_paused` is true, as for gradients without delay, steps are those of the wrapped
      optimizer and the history is cleared: the first update after the pause is uncorrected.

    With ``found_inf`` (`set_found_inf`) the correction is conditional on the device, like the update of the
    wrapped optimizer. Only a step that starts or clears a parameter's history reads it on the host.

    Parameters, groups and hyperparameters are those of the wrapped optimizer: ``param_groups`` is the
    same list, so that learning-rate schedulers work on either. Register hooks with this object, and call its
    methods. The wrapped optimizer must not need a closure.

    Memory: one buffer per trainable parameter, of its shape and placement, in ``dtype``. During `step` one
    more copy exists, of the parameters (level "update") or of the gradients (level "gradient"). At level
    "update" on the CPU, around torch's Adam, AdamW and SGD and `Lion`, only a few parameters are copied at a
    time, and the wrapped optimizer steps once per chunk. DTensors are corrected shard by shard, without
    communication, except for an all-reduce by which ranks agree whether a first step at learning rate zero
    only creates state.

    State: ``state`` and ``state_dict()`` hold, for each parameter, the entries of the wrapped optimizer,
    the history ``error_feedback_<level>`` and the flag ``error_feedback_<level>_valid`` (a scalar bool tensor
    on the CPU). They are complete for every trainable parameter from the first step on, and empty before it,
    as for torch's own optimizers. torch.distributed.checkpoint and torchtitan create state before loading by
    a step with zero gradients and learning rate zero, which does not count as an update. Loading state
    without a history, such as that of the wrapped optimizer alone, clears the history.

    Args:
        optimizer: the optimizer to wrap.
        strength: s of the formulas; 1 is the paper's correction, 0 none.
        level: "update" (the paper's) or "gradient".
        dtype: of the history; None is that of the parameter, but at least float32. bfloat16 halves the buffer
            and rounds the correction to 3 digits.
        compile: fuse torch's AdamW and its correction at level "update" into one pass with `torch.compile`.
            Compilation takes seconds in the second step and needs a C++ compiler, on GPUs Triton. Results
            differ in rounding. The first update of a parameter, and updates in bfloat16 or with ``amsgrad``
            or ``maximize``, are not compiled.

    Raises:
        TypeError: ``optimizer`` is not a torch optimizer, or ``dtype`` not a floating-point dtype.
        ValueError: unknown level, a strength that is negative or not finite, or ``compile`` with any
            optimizer but AdamW, or at level "gradient".
        RuntimeError: a sparse gradient at level "gradient", in `step`.

    Examples:
        Gradients 1, 3 and 3: the second update came one step late, so 3 - 1 is added to it:

        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = ErrorFeedback(torch.optim.SGD([weight], lr=1.0))
        >>> for gradient in (1.0, 3.0, 3.0):
        ...     weight.grad = torch.tensor([gradient])
        ...     optimizer.step()
        ...     print(weight.item())
        -1.0
        -6.0
        -9.0
    """

    _BUFFERS = tuple(map(history_key, LEVELS))

    feedback_paused: bool = False
    """Whether steps are uncorrected and keep no history; set it while gradients have no delay."""

    optimizer: Optimizer
    _level: str
    _strength: float
    # Not in the wrapped optimizer's state: many optimizers create a parameter's state only if it is empty.
    _histories: dict[Tensor, History]
    # Whether `state` is complete: after a step, after loading, or if the wrapped optimizer had state.
    _has_state: bool
    _dtype: torch.dtype | None
    _compile: bool

    def __init__(
        self,
        optimizer: Optimizer,
        strength: float = 1.0,
        level: str = "update",
        dtype: torch.dtype | None = None,
        compile: bool = False,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"ErrorFeedback wraps a torch.optim.Optimizer, not a {type(optimizer).__name__}")
        if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
            raise TypeError(f"the history of error feedback needs a floating-point dtype, not {dtype!r}")
        if compile and (type(optimizer) is not torch.optim.AdamW or level != "update"):
            raise ValueError(
                f"error feedback is compiled with torch.optim.AdamW at level 'update', not with "
                f"{type(optimizer).__name__} at level {level!r}: omit compile=True"
            )
        for number, group in enumerate(optimizer.param_groups):
            check_duplicates(optimizer, optimizer.param_groups[:number], group)
        if strength and _is_unsuitable(optimizer):
            warnings.warn(
                f"error feedback around {type(optimizer).__name__} with these options was worse than none in "
                f"measurements: omit it, or wrap an optimizer that averages gradients, such as AdamW",
                stacklevel=2,
            )
        # Optimizer.__init__ would create its own groups and state. __setstate__, which unpickling calls, only
        # adds hooks to existing groups and state.
        super().__setstate__(
            {
                "optimizer": optimizer,
                "_level": checked_level(level),
                "_strength": checked_strength(strength),
                "_dtype": dtype,
                "_compile": compile,
                "_histories": {},
                "_has_state": bool(optimizer.state),
            }
        )
        if self._has_state:
            self._create_histories()

    @property
    def level(self) -> str:
        """Where the correction acts: "update" or "gradient"."""
        return self._level

    @property
    def strength(self) -> float:
        """Strength s of the correction; may be changed between steps."""
        return self._strength

    @strength.setter
    def strength(self, value: float) -> None:
        self._strength = checked_strength(value)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's groups, the same list."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults, the same dictionary."""
        return self.optimizer.defaults

    @property
    def found_inf(self) -> Tensor | None:
        """That of the wrapped optimizer: with 1 on the device the next steps change nothing."""
        return getattr(self.optimizer, "found_inf", None)

    @found_inf.setter
    def found_inf(self, value: Tensor | None) -> None:
        self.optimizer.found_inf = value  # type: ignore[attr-defined]

    @property
    def state(self) -> Mapping[Tensor, Any]:  # type: ignore[override]
        """The wrapped optimizer's state and the history, merged for reading; the tensors are live."""
        # Without the history before the first step: checkpointing creates state only if it is empty.
        return MergedState(self.optimizer.state, self._histories if self._has_state else {})

    @property
    def step_was_skipped(self) -> bool:
        """Whether the wrapped optimizer reports that its last step changed nothing."""
        return getattr(self.optimizer, "step_was_skipped", False)

    def _step(self) -> None:
        self._create_histories()
        if self.feedback_paused or self._is_state_init_step():
            self.optimizer.step()
            self._has_state = True
            advance_histories(self._histories, ())
            return

        found_inf = self.found_inf
        if found_inf is not None and changes_flags(self._histories):
            if found_inf.item():
                return
            found_inf = None
        moving = [param for param in _parameters(self.param_groups) if param.grad is not None]
        if self._level == "update":
            self._step_correcting_updates(moving, should_skip(found_inf))
        else:
            self._step_correcting_gradients(moving, should_skip(found_inf))
        self._has_state = True
        if not self.step_was_skipped:
            advance_histories(self._histories, set(self._updated(moving)))

    def _is_state_init_step(self) -> bool:
        if not may_be_state_init_step(self._histories, self.param_groups):
            return False
        # All ranks must agree: gradients may be zero on the shards of some ranks only.
        return gradients_are_zero(list(_parameters(self.param_groups)))

    def _updated(self, params: list[Tensor]) -> list[Tensor]:
        """Those of ``params`` that the wrapped optimizer's last step updated."""
        skipped = getattr(self.optimizer, "skipped_params", ())
        return [param for param in params if param not in skipped]

    def _step_correcting_updates(self, moving: list[Tensor], skip: Tensor | None) -> None:
        if (
            self._compile
            and self._strength != 0
            and all(self._histories[param].is_valid for param in moving)
            and supports_compiled_update(self.optimizer, moving)
        ):
            buffers = {param: self._histories[param].buffer for param in moving}
            update_and_correct_(self.optimizer, buffers, self._strength, skip)
            return
        chunks = self._chunks(moving)
        if len(chunks) == 1:
            self._step_correcting_chunk(moving, None, skip)
            return
        largest = max(sum(local_part(param).numel() for param in chunk) for chunk in chunks)
        buffer = torch.empty(largest, dtype=at_least_float32(moving[0].dtype))
        grads = {param: param.grad for param in moving}
        try:
            for param in moving:
                param.grad = None
            for chunk in chunks:
                for param in chunk:
                    param.grad = grads[param]
                self._step_correcting_chunk(chunk, buffer, skip)
                for param in chunk:
                    param.grad = None
        finally:
            for param, grad in grads.items():
                param.grad = grad

    def _chunks(self, moving: list[Tensor]) -> list[list[Tensor]]:
        """The parameters in chunks that the wrapped optimizer may update one after the other.

        On the CPU a copy of all parameters would allocate memory in each step, whose page faults may take
        longer than the correction.
        """
        kinds = {(param.device.type, param.dtype) for param in moving}
        if type(self.optimizer) not in _SEPARABLE_OPTIMIZERS or len(kinds) != 1 or kinds.pop()[0] != "cpu":
            return [moving]
        chunks: list[list[Tensor]] = []
        numel = _CHUNK_NUMEL
        for param in moving:
            if numel >= _CHUNK_NUMEL:
                chunks.append([])
                numel = 0
            chunks[-1].append(param)
            numel += local_part(param).numel()
        return chunks

    def _step_correcting_chunk(
        self, moving: list[Tensor], buffer: Tensor | None, skip: Tensor | None
    ) -> None:
        negated = dict(
            zip(moving, negated_weights([local_part(param) for param in moving], buffer), strict=True)
        )
        self.optimizer.step()
        updated = self._updated(moving)
        if updated and not self.step_was_skipped:
            histories = [self._histories[param] for param in updated]
            correct_updates_(
                [local_part(param) for param in updated],
                [negated[param] for param in updated],
                [history.local for history in histories],
                [history.is_valid for history in histories],
                self._strength,
                skip,
            )

    def _step_correcting_gradients(self, moving: list[Tensor], skip: Tensor | None) -> None:
        given = {param: param.grad for param in moving if param.grad is not None}
        for param, grad in given.items():
            if grad.layout != torch.strided:
                raise RuntimeError(
                    f"error feedback at level 'gradient' needs dense gradients; that of "
                    f"{describe(param, None)} is {grad.layout}: use level 'update'"
                )
        histories = [self._histories[param] for param in given]
        # Corrected copies, so that the user's gradients can be restored exactly.
        copies = [grad.clone() for grad in given.values()]
        correct_gradients_(
            [local_part(copy) for copy in copies],
            [local_part(grad) for grad in given.values()],
            [history.local for history in histories],
            [history.is_valid for history in histories],
            self._strength,
        )
        try:
            for param, copy in zip(given, copies, strict=True):
                param.grad = copy
            self.optimizer.step()
        finally:
            for param, grad in given.items():
                param.grad = grad
        if self.step_was_skipped:
            return
        updated = self._updated(moving)
        stored = [self._histories[param].local for param in updated]
        grads = [local_part(given[param]) for param in updated]
        if skip is None and updated:
            torch._foreach_copy_(stored, grads)
        else:
            for history, grad in zip(stored, grads, strict=True):
                copy_unless_(skip, history, grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as the wrapped optimizer does."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer; its parameters' first update is uncorrected."""
        check_duplicates(self.optimizer, self.param_groups, param_group)
        self.optimizer.add_param_group(param_group)
        if self._has_state:
            self._create_histories()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's ``state_dict()``, with the history added to each parameter's entries."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = self.optimizer.state_dict()
        if self._has_state:
            state = {key: dict(v) if isinstance(v, dict) else v for key, v in state_dict["state"].items()}
            indices = _parameters(state_dict["param_groups"])
            for index, param in zip(indices, _parameters(self.param_groups), strict=True):
                if param in self._histories:
                    state.setdefault(index, {}).update(self._histories[param].state())
            state_dict = {**state_dict, "state": state}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = _or(post_hook(self, state_dict), state_dict)
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, from this class or from the wrapped optimizer alone.

        The history keeps its dtype; histories that ``state_dict`` lacks are cleared.

        Raises:
            ValueError: a history of another shape or placements than its parameter's, or groups that do not
                match. The optimizer is then unchanged.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = _or(pre_hook(self, state_dict), state_dict)
        own, others = split_state(state_dict["state"])
        saved = [*self._saved({**state_dict, "state": own})]
        for param, _, entries in saved:
            self._check_buffers(param, entries)
        # Without the history, which torch would cast to the dtype of the parameter.
        self.optimizer.load_state_dict({**state_dict, "state": others})
        self._has_state = bool(state_dict["state"])
        if self._has_state:
            self._create_histories()
        for param, _, entries in saved:
            if param in self._histories:
                self._histories[param].load(entries)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        names = ("optimizer", "_level", "_strength", "_dtype", "_compile", "_histories", "_has_state")
        return {name: getattr(self, name) for name in (*names, "feedback_paused")}

    def __repr__(self) -> str:
        return f"ErrorFeedback(strength={self._strength}, level={self._level!r}) of {self.optimizer!r}"

    @torch.no_grad()
    def _create_histories(self) -> None:
        """Create the missing histories of all parameters that may be updated or loaded."""
        for param in _parameters(self.param_groups):
            if param not in self._histories and (param.requires_grad or param.grad is not None):
                dtype = self._dtype or at_least_float32(param.dtype)
                self._histories[param] = History.create(param, self._level, dtype)


def _is_unsuitable(optimizer: Optimizer) -> bool:
    """Whether error feedback around an optimizer was worse than none in measurements."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # inside an adapter
    if isinstance(optimizer, torch.optim.RMSprop):
        return not any(group["momentum"] for group in optimizer.param_groups)
    if isinstance(optimizer, (torch.optim.Adam, Lion)):
        return not any(group["betas"][0] for group in optimizer.param_groups)
    return isinstance(optimizer, (torch.optim.Adagrad, torch.optim.NAdam))


def _parameters(groups: list[dict[str, Any]]) -> Iterable[Any]:
    return chain.from_iterable(group["params"] for group in groups)


def _or(replacement: dict[str, Any] | None, original: dict[str, Any]) -> dict[str, Any]:
    """A hook's result, or ``original`` if it returned None."""
    return original if replacement is None else replacement
