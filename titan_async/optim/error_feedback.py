"""Error feedback: what the last update should have done and did not is added to this one.

With one update of delay, the update applied now is the one of the previous batch. The correction of
arXiv 2606.30634, for any optimizer, extrapolates by one step. With D_b the displacement that the wrapped
optimizer proposes from the gradient g_b of batch b:

    level "update":    D'_b = D_b + s (D_b - D_{b-1})
    level "gradient":  g'_b = g_b + s (g_b - g_{b-1})

The paper's correction is level "update" with strength s = 1, which makes two updates ago cancel:
x[t+1] = x[t] - 2 u(g[t-1]) + u(g[t-2]).
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from titan_async.local_tensors import local_part
from titan_async.optim.compiled_adamw import fits_one_pass, update_and_correct_
from titan_async.optim.feedback_history import (
    checked_level,
    checked_strength,
    correct_gradients_,
    correct_updates_,
    history_key,
    snapshot,
)
from titan_async.optim.gradient_status import gradients_are_zero
from titan_async.optim.lion import Lion
from titan_async.optim.param_checks import check_duplicates
from titan_async.optim.tensors import at_least_float32, copy_unless_, named, skips

__all__ = ["ErrorFeedback"]

_PREFIX = "error_feedback_"

_BY_PARAMETER = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, Lion)
"""Optimizers that update each parameter as if there were no others."""

_CHUNK = 2**22
"""Elements that are updated and then corrected at a time."""


class ErrorFeedback(Optimizer):
    """An optimizer that corrects the updates of the optimizer it wraps.

    It is meant for optimizers that average gradients, whose next update resembles the last one: Muon, AdamW,
    SGD with momentum. Others it does more harm than good, as measured, and a warning says so: those that
    average none (Adagrad; RMSprop without momentum; Adam and Lion with a first beta of 0), and NAdam, which
    looks ahead by itself. For Lion it helped in some measurements and not in others (docs/delay.md,
    docs/study_300.md).

    Level "update" lets the wrapped optimizer step, measures by how much it moved each parameter
    (learning rate and decoupled weight decay included), and adds ``strength`` times the difference from
    the previous such displacement. Level "gradient" hands the wrapped optimizer corrected gradients, and
    puts the given ones back afterwards. Either way

    - the history is the uncorrected displacement or gradient, and a later change of the learning rate
      does not rescale it;
    - moments see each gradient once;
    - the first update of a parameter is uncorrected, and so is the one after an update in which it had
      no gradient;
    - a step that the wrapped optimizer says to have skipped (``step_was_skipped``, as `Muon` does when a
      gradient is not finite) leaves the history as it was, and a parameter that it says to have left alone
      (``left_alone``, as `Muon` does when a gradient is missing on another rank) starts anew;
    - strength 0 gives the very bits of the wrapped optimizer, and still keeps the history, so that
      `strength` may be set to another value at any time;
    - while `feedback_paused` is true, as for gradients that are not late, a step is that of the wrapped
      optimizer and there is no history: the first update after it is uncorrected.

    With ``found_inf`` (`set_found_inf`) the correction is conditional on the device, as the update of the
    wrapped optimizer is. Only a step in which a parameter's history starts or ends reads it on the host.

    Parameters, groups and hyperparameters are those of the wrapped optimizer: ``param_groups`` is the
    same list, so that learning-rate schedulers work on either, but attach them, hooks and calls to this
    object. The wrapped optimizer must not need a closure.

    Memory: one buffer for each trainable parameter, of its shape and placement, in ``dtype``. During `step`
    one more copy exists, of the parameters (level "update") or of the gradients (level "gradient"); on the
    CPU and around torch's Adam, AdamW and SGD and `Lion` that of a few parameters (level "update"), whose
    optimizer then steps once for every few. DTensors
    are corrected shard by shard, without communication, but for a first step at learning rate zero: whether
    it only creates state, all ranks have to see alike.

    State: ``state`` and ``state_dict()`` hold, for each parameter, the entries of the wrapped optimizer,
    the history ``error_feedback_<level>`` and the flag ``error_feedback_<level>_valid`` (a bool tensor
    without dimensions, on the CPU). They are complete for every trainable parameter from the first step
    on, and empty before it, as for torch's own optimizers. The step with zero gradients and learning rate
    zero by which torch.distributed.checkpoint and torchtitan create state before loading counts as no
    update. State without a history, such as that of the wrapped optimizer alone, loads with the history
    cleared.

    Args:
        optimizer: the optimizer to wrap.
        strength: s of the formulas; 1 is the paper's correction, 0 none.
        level: "update" (the paper's) or "gradient".
        dtype: of the history; None is that of the parameter, but at least float32. bfloat16 halves the buffer
            and rounds the correction to 3 digits.
        compile: make torch's AdamW and its correction, at level "update", one pass by `torch.compile`, which
            takes seconds in the second step and needs what it needs: a C++ compiler, on GPUs Triton. Results
            differ in rounding. Updates for which it is not made are made as without: a parameter's first, in
            bfloat16, by ``amsgrad`` or ``maximize``.

    Raises:
        TypeError: ``optimizer`` is no torch optimizer, or ``dtype`` no floating-point dtype.
        ValueError: unknown level, a strength that is negative or not finite, or ``compile`` of anything but
            AdamW at level "update".
        RuntimeError: a sparse gradient at level "gradient", in `step`.

    Examples:
        Gradients 1, 3 and 3: the second update should have come one step earlier, so 3 - 1 is added to it:

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

    feedback_paused: bool = False
    """Whether steps correct nothing and keep no history; to be set while gradients are not late."""

    optimizer: Optimizer
    _level: str
    _strength: float
    # Kept apart from the wrapped optimizer's state: many optimizers take a parameter whose state is not
    # empty for one that they have initialized.
    _history: dict[Tensor, Tensor]
    _valid: dict[Tensor, Tensor]
    # Whether there is state to show: after a step, after a load, or from before the wrapping.
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
                f"{type(optimizer).__name__} at level {level!r}: leave out compile=True"
            )
        for number, group in enumerate(optimizer.param_groups):
            check_duplicates(optimizer, optimizer.param_groups[:number], group)
        if strength and _is_harmed(optimizer):
            warnings.warn(
                f"error feedback around {type(optimizer).__name__} with these options was measured to be "
                f"worse than none: leave it out, or wrap an optimizer that averages gradients, such as AdamW",
                stacklevel=2,
            )
        # Optimizer.__init__ would make groups and state of its own. This is the way in which unpickling
        # makes an optimizer around groups and state that exist: it adds hooks, and nothing else.
        super().__setstate__(
            {
                "optimizer": optimizer,
                "_level": checked_level(level),
                "_strength": checked_strength(strength),
                "_dtype": dtype,
                "_compile": compile,
                "_history": {},
                "_valid": {},
                "_has_state": bool(optimizer.state),
            }
        )
        if self._has_state:
            self._make_histories()

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
        """That of the wrapped optimizer: 1 on the device if the next steps are to change nothing."""
        return getattr(self.optimizer, "found_inf", None)

    @found_inf.setter
    def found_inf(self, value: Tensor | None) -> None:
        self.optimizer.found_inf = value  # type: ignore[attr-defined]

    @property
    def state(self) -> Mapping[Tensor, Any]:  # type: ignore[override]
        """The wrapped optimizer's state and the history, merged for reading; the tensors are live."""
        return _MergedState(self)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Let the wrapped optimizer update its parameters, and correct the update.

        Args:
            closure: evaluates the model again and returns the loss, which is handed back. It is called
                once, before the wrapped optimizer, which does not see it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.feedback_paused:
            self._step_uncorrected()
            return loss
        creates_state_only = self._is_void()
        self._make_histories()
        moving = [param for param in _parameters(self.param_groups) if param.grad is not None]
        found_inf = self.found_inf
        if found_inf is not None and self._valid_ones() != set(moving) and not creates_state_only:
            # The flags are on the host.
            if found_inf.item():
                return loss
            found_inf = None

        if creates_state_only:
            self.optimizer.step()
        elif self._level == "update":
            self._step_correcting_updates(moving, skips(found_inf))
        else:
            self._step_correcting_gradients(moving, skips(found_inf))
        self._has_state = True

        if not creates_state_only and not self.step_was_skipped:
            moving = self._moved(moving)
            for param in moving:
                self._valid[param].fill_(True)
            for param in self._history.keys() - set(moving):
                self._clear_history(param)
        return loss

    def _step_uncorrected(self) -> None:
        self._make_histories()
        self.optimizer.step()
        self._has_state = True
        for param in self._history:
            self._clear_history(param)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the wrapped optimizer says that its last step changed nothing."""
        return getattr(self.optimizer, "step_was_skipped", False)

    def _moved(self, params: list[Tensor]) -> list[Tensor]:
        """Those of ``params`` that the wrapped optimizer did not leave alone."""
        left_alone = getattr(self.optimizer, "left_alone", ())
        return [param for param in params if param not in left_alone]

    def _step_correcting_updates(self, moving: list[Tensor], skip: Tensor | None) -> None:
        is_corrected = self._strength != 0 and all(self._validity(moving))
        if self._compile and is_corrected and fits_one_pass(self.optimizer, moving):
            update_and_correct_(self.optimizer, self._history, self._strength, skip)
            return
        chunks = self._chunks(moving)
        if len(chunks) == 1:
            self._step_correcting_chunk(moving, None, skip)
            return
        most = max(sum(local_part(param).numel() for param in chunk) for chunk in chunks)
        room = torch.empty(most, dtype=at_least_float32(moving[0].dtype))
        grads = {param: param.grad for param in moving}
        try:
            for param in moving:
                param.grad = None
            for chunk in chunks:
                for param in chunk:
                    param.grad = grads[param]
                self._step_correcting_chunk(chunk, room, skip)
                for param in chunk:
                    param.grad = None
        finally:
            for param, grad in grads.items():
                param.grad = grad

    def _chunks(self, moving: list[Tensor]) -> list[list[Tensor]]:
        """The parameters, divided into those that the wrapped optimizer may update one after the other.

        On the CPU a snapshot of all would be fresh memory at each step, whose page faults may take longer
        than the correction.
        """
        kinds = {(param.device.type, param.dtype) for param in moving}
        if type(self.optimizer) not in _BY_PARAMETER or len(kinds) != 1 or kinds.pop()[0] != "cpu":
            return [moving]
        chunks: list[list[Tensor]] = []
        size = _CHUNK
        for param in moving:
            if size >= _CHUNK:
                chunks.append([])
                size = 0
            chunks[-1].append(param)
            size += local_part(param).numel()
        return chunks

    def _step_correcting_chunk(self, moving: list[Tensor], room: Tensor | None, skip: Tensor | None) -> None:
        before = snapshot([local_part(param) for param in moving], room)
        snapshots = dict(zip(moving, before, strict=True))
        self.optimizer.step()
        moving = self._moved(moving)
        if moving and not self.step_was_skipped:
            weights = [local_part(param) for param in moving]
            before = [snapshots[param] for param in moving]
            history = [local_part(self._history[param]) for param in moving]
            correct_updates_(weights, before, history, self._validity(moving), self._strength, skip)

    def _step_correcting_gradients(self, moving: list[Tensor], skip: Tensor | None) -> None:
        given = [param.grad for param in moving if param.grad is not None]
        for param, grad in zip(moving, given, strict=True):
            if grad.layout != torch.strided:
                raise RuntimeError(
                    f"error feedback at level 'gradient' needs dense gradients; that of {named(param, None)} "
                    f"is {grad.layout}: use level 'update'"
                )
        given_parts = [local_part(grad) for grad in given]
        history = [local_part(self._history[param]) for param in moving]
        copies = [grad.clone() for grad in given]
        parts = [local_part(copy) for copy in copies]
        correct_gradients_(parts, given_parts, history, self._validity(moving), self._strength)
        try:
            # The user's gradients stay untouched, so that they can be put back exactly.
            for param, copy in zip(moving, copies, strict=True):
                param.grad = copy
            self.optimizer.step()
        finally:
            for param, grad in zip(moving, given, strict=True):
                param.grad = grad
        moved = set(self._moved(moving))
        kept = [index for index, param in enumerate(moving) if param in moved]
        if kept and not self.step_was_skipped:
            if skip is None:
                torch._foreach_copy_([history[i] for i in kept], [given_parts[i] for i in kept])
            else:
                for index in kept:
                    copy_unless_(skip, history[index], given_parts[index])

    def _valid_ones(self) -> set[Tensor]:
        return {param for param, valid in self._valid.items() if valid}

    def _validity(self, params: list[Tensor]) -> list[bool]:
        return [bool(self._valid[param]) for param in params]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as the wrapped optimizer does."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer; its parameters' first update is uncorrected."""
        check_duplicates(self.optimizer, self.param_groups, param_group)
        self.optimizer.add_param_group(param_group)
        if self._has_state:
            self._make_histories()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's ``state_dict()``, with the history added to each parameter's entries."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = self.optimizer.state_dict()
        if self._has_state:
            state = {key: dict(v) if isinstance(v, dict) else v for key, v in state_dict["state"].items()}
            for index, param in _numbered(state_dict["param_groups"], self.param_groups):
                if param in self._history:
                    state.setdefault(index, {}).update(self._history_entries(param))
            state_dict = {**state_dict, "state": state}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = _or(post_hook(self, state_dict), state_dict)
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, from this class or from the wrapped optimizer alone.

        The history keeps its own dtype; a parameter for which ``state_dict`` has none starts anew.

        Raises:
            ValueError: a history of another shape than its parameter's, or groups that do not match.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = _or(pre_hook(self, state_dict), state_dict)
        own, others = _split(state_dict["state"])
        # Torch would cast the history to the dtype of the parameter, so it never gets to see it.
        self.optimizer.load_state_dict({**state_dict, "state": others})
        self._has_state = bool(state_dict["state"])
        if self._has_state:
            self._make_histories()
        for index, param in _numbered(state_dict["param_groups"], self.param_groups):
            if param in self._history:
                self._load_history(param, own.get(index, {}))
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        names = ("optimizer", "_level", "_strength", "_dtype", "_compile", "_history", "_valid", "_has_state")
        return {name: getattr(self, name) for name in (*names, "feedback_paused")}

    def __repr__(self) -> str:
        return f"ErrorFeedback(strength={self._strength}, level={self._level!r}) of {self.optimizer!r}"

    def _is_void(self) -> bool:
        """Whether a step now would be the one that only creates state.

        torch.distributed.checkpoint and torchtitan make every gradient zero and every learning rate 0. If it
        counted as an update, the true first one would be corrected by a displacement of 0, that is,
        doubled. A true first step at learning rate 0, as a warm-up may have, has gradients that are not zero.
        """
        if any(self._valid.values()):
            return False
        if any(float(group.get("lr", 0.0)) != 0 for group in self.param_groups):
            return False
        # On all ranks: those on which the shards of the gradients happen to be zero have to do as the others.
        return gradients_are_zero(list(_parameters(self.param_groups)))

    @torch.no_grad()
    def _make_histories(self) -> None:
        """See that every parameter has a history which an update may need or a checkpoint may fill."""
        for param in _parameters(self.param_groups):
            if param not in self._history and (param.requires_grad or param.grad is not None):
                dtype = self._dtype or at_least_float32(param.dtype)
                self._history[param] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
                self._valid[param] = torch.zeros((), dtype=torch.bool, device="cpu")

    def _clear_history(self, param: Tensor) -> None:
        if self._valid[param]:
            local_part(self._history[param]).zero_()
            self._valid[param].fill_(False)

    def _history_entries(self, param: Tensor) -> dict[str, Tensor]:
        key = history_key(self._level)
        return {key: self._history[param], f"{key}_valid": self._valid[param]}

    @torch.no_grad()
    def _load_history(self, param: Tensor, entries: dict[str, Any]) -> None:
        key = history_key(self._level)
        if key not in entries or not bool(entries.get(f"{key}_valid", True)):
            self._clear_history(param)
            return
        loaded = entries[key]
        if loaded.shape != param.shape:
            raise ValueError(
                f"the error-feedback history of shape {list(loaded.shape)} does not fit {named(param, None)}"
            )
        local_part(self._history[param]).copy_(local_part(loaded))
        self._valid[param].fill_(True)


class _MergedState(Mapping[Tensor, Any]):
    """What `ErrorFeedback.state` shows: for a parameter, both optimizers' entries in one new dictionary."""

    def __init__(self, owner: ErrorFeedback) -> None:
        self._owner = owner
        # None before the first step, or whoever wants complete state would not think of creating it.
        self._history = owner._history if owner._has_state else {}

    def __getitem__(self, key: Tensor) -> Any:
        # Looked up without inserting: the wrapped optimizer's state makes entries on access.
        entries = self._owner.optimizer.state.get(key, {})
        if not isinstance(entries, dict):
            return entries
        return {**entries, **self._owner._history_entries(key)} if key in self._history else dict(entries)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(dict.fromkeys([*self._owner.optimizer.state, *self._history]))

    def __len__(self) -> int:
        return len({*self._owner.optimizer.state, *self._history})

    def __contains__(self, key: object) -> bool:
        return key in self._owner.optimizer.state or key in self._history


def _is_harmed(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one around which feedback was measured to be worse than none."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # of one that adapts it
    if isinstance(optimizer, torch.optim.RMSprop):
        return not any(group["momentum"] for group in optimizer.param_groups)
    if isinstance(optimizer, (torch.optim.Adam, Lion)):
        return not any(group["betas"][0] for group in optimizer.param_groups)
    return isinstance(optimizer, (torch.optim.Adagrad, torch.optim.NAdam))


def _parameters(groups: list[dict[str, Any]]) -> Iterable[Tensor]:
    return chain.from_iterable(group["params"] for group in groups)


def _numbered(packed: list[dict[str, Any]], groups: list[dict[str, Any]]) -> Iterable[tuple[Any, Tensor]]:
    """The pairs (key in a state dict, parameter) for the groups of a state dict and of an optimizer."""
    return zip(_parameters(packed), _parameters(groups), strict=True)


def _split(state: dict[Any, Any]) -> tuple[dict[Any, dict[str, Any]], dict[Any, Any]]:
    """Split a state dict's state into this class's entries and the wrapped optimizer's."""
    own: dict[Any, dict[str, Any]] = {}
    others: dict[Any, Any] = {}
    for index, entries in state.items():
        if not isinstance(entries, dict):
            others[index] = entries
            continue
        own[index] = {key: value for key, value in entries.items() if str(key).startswith(_PREFIX)}
        rest = {key: value for key, value in entries.items() if key not in own[index]}
        if rest:
            others[index] = rest
    return own, others


def _or(replacement: dict[str, Any] | None, original: dict[str, Any]) -> dict[str, Any]:
    """What a hook returned, or what it was given if it returned nothing."""
    return original if replacement is None else replacement
