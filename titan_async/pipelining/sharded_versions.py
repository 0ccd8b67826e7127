"""Two versions of the weights of a module under FSDP2, so that a backward uses the weights of its forward.

The optimizer's parameters are shards, which are never part of a graph and need no second version. Forward and
backward use the unsharded parameters that FSDP gathers, so there are two copies of these, and the copy of the
microbatch's batch is active. Each version is gathered once, layer by layer in the first forward of its batch.
Compared with synchronous training this costs one more unsharded copy in the compute dtype, and no further
communication.
"""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titan_async.local_tensors import canonical_name, local_part
from titan_async.pipelining._fsdp_internals import FsdpParameters
from titan_async.pipelining._torch_internals import ParameterWatch

__all__ = ["ShardedVersions"]


class ShardedVersions:
    """`WeightVersions` for a module under `fully_shard` or `replicate`.

    Between batches the module holds its sharded parameters. Gradients of a batch accumulate unsharded, and
    are reduced over the data-parallel ranks once, when the batch is finished.

    Args:
        module: the root of FSDP; every trainable parameter is managed by it.

    Raises:
        NotImplementedError: if a parameter is not, or FSDP is set up so that two versions cannot coexist.
    """

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, FSDPModule):
            raise NotImplementedError(
                "Async2BW needs FSDP around the whole module of a stage; apply fully_shard to it too, after "
                "its submodules"
            )
        self._fsdp = FsdpParameters(module)
        self._fsdp.reset_outside()
        self._watch = ParameterWatch(module)
        self._sharded = self._fsdp.sharded
        self._names = [canonical_name(name) for name in self._fsdp.names]
        managed = set(self._sharded)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter not in managed:
                raise NotImplementedError(
                    f"the parameter {canonical_name(name)} is not managed by FSDP like the others; Async2BW "
                    "does not support ignored_params that are trained"
                )
        self._version = 0
        self._stashed: int | None = None  # the version that microbatches in flight need
        self._frozen: list[Tensor] | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The module's own, sharded parameters, which the optimizer updates."""
        return self._sharded

    @property
    def names(self) -> list[str]:
        """Their names, in the same order."""
        return self._names

    @torch.no_grad()
    def begin_batch(self) -> int:
        """The version of a new batch: the shards' current values, or the frozen ones."""
        if self._stashed is not None:
            self._version = 1 - self._stashed
        newest = None
        if self._frozen is not None:
            newest = [shard.clone() for shard in self._local()]
            torch._foreach_copy_(self._local(), self._frozen)
        self._fsdp.gather(self._version)
        if newest is not None:
            self._fsdp.finish_gather()
            self._fsdp.activate(None)
            torch._foreach_copy_(self._local(), newest)
            self._frozen = None
        return self._version

    @property
    def is_gathering(self) -> bool:
        """Whether the next forward gathers the active version, layer by layer."""
        return self._fsdp.is_gathering

    @torch.no_grad()
    def finish_gather(self) -> None:
        """Gather what the first forward on the active version has not used. Later calls do nothing."""
        self._fsdp.finish_gather()

    def activate(self, version: int | None) -> None:
        """Put `version` into the module, or its own, sharded parameters (None)."""
        self._fsdp.activate(version)

    def stash(self, version: int) -> None:
        """Keep `version` during the next batch. The other version is no longer needed."""
        self._stashed = version

    def free_other(self, version: int) -> None:
        """Does nothing: a second copy exists only after `stash`."""

    def freeze(self) -> None:
        """Keep the shards' current values for the next batch, whatever update comes first.

        No batch may be in flight. Until that batch begins, a copy of this rank's shards replaces the
        unsharded versions, whose memory is free for a validation.
        """
        self._free()
        if self._frozen is None:
            self._frozen = [shard.clone() for shard in self._local()]

    def unfreeze(self) -> None:
        """Let the next batch read the shards when it begins. No batch may be in flight."""
        self._free()
        self._frozen = None

    def _free(self) -> None:
        """Free the unsharded versions, which no batch needs any more."""
        self._stashed = None
        self._fsdp.free(0)
        self._fsdp.free(1)

    def state_dict(self) -> dict[str, Tensor]:
        """The values that the next batch will read, by name, as DTensors sharded like the parameters."""
        frozen = self._frozen or [shard.clone() for shard in self._local()]
        return {
            name: DTensor.from_local(
                shard,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            for name, parameter, shard in zip(self._names, self._sharded, frozen, strict=True)
            if parameter.requires_grad and isinstance(parameter, DTensor)
        }

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Let the next batch read `state_dict`, DTensors that name every trainable parameter."""
        self.freeze()
        assert self._frozen is not None
        for name, parameter, frozen in zip(self._names, self._sharded, self._frozen, strict=True):
            if parameter.requires_grad:
                frozen.copy_(local_part(state_dict[name]))

    def training_state(self) -> object:
        """FSDP's state within a forward or backward; `set_training_state` restores it when that resumes."""
        return self._fsdp.training_state()

    def set_training_state(self, state: object) -> None:
        """See `training_state`."""
        self._fsdp.set_training_state(state)

    def pop_grads(self, version: int) -> list[Tensor | None]:
        """Reduce, remove and return the gradients accumulated on `version`, which is active.

        In the order of the parameters. A collective of the data-parallel ranks.
        """
        return self._fsdp.reduce_grads()

    def check_unchanged(self) -> None:
        """Refuse a module whose parameters have changed since the start.

        Raises:
            RuntimeError: if one was replaced or added.
        """
        self._fsdp.reset_outside()
        same = [a is b for a, b in zip(self._fsdp.sharded, self._sharded, strict=True)]
        if not all(same) or self._watch.changed():
            raise RuntimeError(
                "the parameters of the stage's module were replaced or added while it was training; call "
                "drain() before such a change and build a new schedule after it"
            )

    def _local(self) -> list[Tensor]:
        return [local_part(shard.detach()) for shard in self._sharded]
