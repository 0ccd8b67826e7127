"""All uses of FSDP2's private state in this layer, for torch 2.11 to 2.14.

`tests/pipelining/test_torch_internals.py` fails when one of these names is removed.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from titan_async.local_tensors import local_part
from titan_async.pipelining.side_stream import record_on_current_stream

__all__ = ["FsdpParameters"]


_OUTSIDE = -1
"""The copy that FSDP uses itself, when the module runs outside of a schedule's step."""


class _Unsharded(NamedTuple):
    """FSDP's state of one unsharded parameter."""

    parameter: nn.Parameter | None  # None before the first all-gather
    outputs: list[Tensor]  # the storage that all-gathers write to
    grad: Tensor | None  # accumulated over microbatches in the dtype of the reduction


class FsdpParameters:
    """The parameters of a module under `fully_shard`, with several unsharded copies instead of one.

    Args:
        root: the module to which `fully_shard` or `replicate` was applied last, after its submodules.

    Raises:
        NotImplementedError: if FSDP would free an unsharded copy itself, or gathers it in a way that leaves
            no room for a second one.
    """

    def __init__(self, root: FSDPModule) -> None:
        self._root: Any = root
        state = self._root._get_fsdp_state()
        state._lazy_init()
        self._state = state
        self._groups = [group for each in state._state_ctx.all_states for group in _groups_of(each)]
        self._params = [param for group in self._groups for param in group.fsdp_params]
        self._copies: dict[int, list[_Unsharded]] = {}
        self._installed = _OUTSIDE
        self.is_gathering = False
        """Whether the next forward gathers the active copy."""
        self._check_supported()

    @property
    def sharded(self) -> list[nn.Parameter]:
        """The parameters that the optimizer updates."""
        return [param.sharded_param for param in self._params]

    @property
    def names(self) -> list[str]:
        """Their names, in the same order."""
        return [param._param_fqn for param in self._params]

    def gather(self, copy: int) -> None:
        """Start to gather the current shards into `copy`, group by group; the module keeps its shards.

        Starts the all-gathers of the first two groups. FSDP starts the others, and waits for each, in the
        first forward with `copy` active. Call `finish_gather` after it, and before a shard changes.
        """
        self.reset_outside()
        # Until `reduce_grads`. A loss may run backwards before torch does this.
        self._set_gradient_sync(False)
        self._install(copy)
        self.is_gathering = True
        for group in self._groups[:2]:
            group.unshard(async_op=True)

    def finish_gather(self) -> None:
        """Gather what no forward has gathered; the copy is active then. Later calls do nothing."""
        if not self.is_gathering:
            return
        for group, following in zip(self._groups, [*self._groups[1:], None], strict=True):
            group.unshard(async_op=True)
            if following is not None:  # overlaps with the copy-out of this one
                following.unshard(async_op=True)
            group.wait_for_unshard()
        self.is_gathering = False

    def activate(self, copy: int | None) -> None:
        """Put `copy` into the module, or its shards (None). FSDP puts in one that is being gathered."""
        if self.is_gathering:
            if copy == self._installed:
                return
            for group in self._groups:  # after an error: started all-gathers must not continue
                group.wait_for_unshard()
            self.is_gathering = False
        self._install(_OUTSIDE if copy is None else copy)
        state = ShardedState.SHARDED if copy is None else ShardedState.UNSHARDED
        for param in self._params:
            param._setattr_on_modules(param.sharded_param if copy is None else param._unsharded_param)
            param.sharded_state = state
        for group in self._groups:
            group._sharded_state = state

    def training_state(self) -> Any:
        """The training states of FSDP's hooks within a forward or backward, for `set_training_state`."""
        states = self._state._state_ctx.all_states
        return (
            self._state._state_ctx.iter_forward_root,
            [(each._training_state, set(each._modules_to_run_forward)) for each in states],
            [group._training_state for group in self._groups],
        )

    def set_training_state(self, saved: Any) -> None:
        """Restore the training states of FSDP's hooks, so that an interrupted forward or backward resumes."""
        root, of_states, of_groups = saved
        self._state._state_ctx.iter_forward_root = root
        for state, (training, to_run) in zip(self._state._state_ctx.all_states, of_states, strict=True):
            state._training_state = training
            state._modules_to_run_forward.clear()
            state._modules_to_run_forward.update(to_run)
        for group, training in zip(self._groups, of_groups, strict=True):
            group._training_state = training

    def reset_outside(self) -> None:
        """Activate the shards, and free what forwards outside of a schedule's step have gathered."""
        self.activate(None)
        for param in self._params:
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None
        self._save()
        self.free(_OUTSIDE)

    def free(self, copy: int) -> None:
        """Free the memory of `copy`, which is not active; the next `gather` allocates it again."""
        for unsharded in self._copies.get(copy, []):
            for output in unsharded.outputs:
                output.untyped_storage().resize_(0)

    def reduce_grads(self) -> list[Tensor | None]:
        """Reduce the gradients accumulated on the active copy over the data-parallel ranks.

        FSDP waits for its reductions on the current stream, and copies gradients there. Call it on another
        stream than that of the backwards, which then need not wait.

        Returns:
            The sharded gradients, in the order of `sharded`; existing `.grad` is not changed.
        """
        before = [param.sharded_param.grad for param in self._params]
        for param in self._params:
            param.sharded_param.grad = None
        self._set_gradient_sync(True)
        for param in self._params:
            unsharded = getattr(param, "_unsharded_param", None)
            for grad in (param.unsharded_accumulated_grad, getattr(unsharded, "grad", None)):
                if grad is not None:
                    record_on_current_stream(local_part(grad))
        for group in self._groups:
            group.post_backward()
        self._state._root_post_backward_final_callback()
        self._set_gradient_sync(False)
        grads = [param.sharded_param.grad for param in self._params]
        for param, grad in zip(self._params, before, strict=True):
            param.sharded_param.grad = grad
        return grads

    def _set_gradient_sync(self, enabled: bool) -> None:
        self._root.set_is_last_backward(enabled)
        self._root.set_reshard_after_backward(False)
        self._root.set_requires_gradient_sync(enabled)

    def _save(self) -> None:
        self._copies[self._installed] = [
            _Unsharded(
                getattr(param, "_unsharded_param", None),
                param.all_gather_outputs,
                param.unsharded_accumulated_grad,
            )
            for param in self._params
        ]

    def _install(self, copy: int) -> None:
        if copy == self._installed:
            return
        self._save()
        self._installed = copy
        blank = [_Unsharded(None, [], None)] * len(self._params)
        for param, unsharded in zip(self._params, self._copies.get(copy, blank), strict=True):
            if unsharded.parameter is not None:
                param._unsharded_param = unsharded.parameter
            elif hasattr(param, "_unsharded_param"):
                del param._unsharded_param  # FSDP creates it, as at its first all-gather
            param.all_gather_outputs = unsharded.outputs
            param.unsharded_accumulated_grad = unsharded.grad

    def _check_supported(self) -> None:
        for group in self._groups:
            if group._reshard_after_forward:
                raise NotImplementedError(
                    "Async2BW does not support FSDP modules that reshard after forward: their backward would "
                    "gather weights of another version; use fully_shard(..., reshard_after_forward=False)"
                )
        for param in self._params:
            if param.offload_to_cpu:
                raise NotImplementedError(
                    "Async2BW does not support FSDP's offload to the CPU; use fully_shard without "
                    "an offload_policy"
                )
            local = param.sharded_param.to_local()
            if hasattr(local, "fsdp_pre_all_gather"):
                raise NotImplementedError(
                    f"the parameter {param._param_fqn} is a {type(local).__name__} with its own all-gather, "
                    "of which Async2BW cannot keep two versions; use plain tensors"
                )


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
