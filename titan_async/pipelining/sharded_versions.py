"""Two versions of the weights of a module under FSDP2, so that a backward uses the weights of its forward.

The optimizer's parameters are shards, which no graph ever holds: they need no second version. What forward
and backward use is the unsharded copy that FSDP gathers, so there are two of these, and the module shows the
one of the microbatch's batch. Every version is gathered once, layer by layer in the first forward of its
batch. Beyond synchronous training this costs one unsharded copy in the compute dtype, and no further
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
    """What `WeightVersions` does for a plain module, for one under `fully_shard` or `replicate`.

    Between batches the module shows its sharded parameters. Gradients of a batch gather unsharded, and are
    reduced over the data-parallel ranks once, when the batch is complete.

    Args:
        module: the root of FSDP; every trainable parameter is managed by it.

    Raises:
        NotImplementedError: if a parameter is not, or FSDP is set up so that two versions cannot stand
            beside each other.
    """

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, FSDPModule):
            raise NotImplementedError(
                "Async2BW needs FSDP around the whole module of a stage; apply fully_shard to it too, after "
                "its submodules"
            )
        self._fsdp = FsdpParameters(module)
        self._fsdp.leave_outside()
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
        self._needed: int | None = None  # the version that microbatches still in flight need
        self._held: list[Tensor] | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The module's own, sharded parameters, which the optimizer knows."""
        return self._sharded

    @property
    def names(self) -> list[str]:
        """Their names, in the same order."""
        return self._names

    @torch.no_grad()
    def read(self) -> int:
        """The version that the next batch is to use: the shards' values now, or those that were held."""
        if self._needed is not None:
            self._version = 1 - self._needed
        newest = None
        if self._held is not None:
            newest = [shard.clone() for shard in self._local()]
            torch._foreach_copy_(self._local(), self._held)
        self._fsdp.gather(self._version)
        if newest is not None:
            self._fsdp.finish_gathering()
            self._fsdp.show(None)
            torch._foreach_copy_(self._local(), newest)
            self._held = None
        return self._version

    @torch.no_grad()
    def finish_reading(self) -> None:
        """Gather what the first forward on a version has left out. The module shows that version."""
        self._fsdp.finish_gathering()

    def preserve(self, version: int) -> None:
        """Keep `version` while the next batch runs. The other version is no longer needed."""
        self._needed = version

    def release_other(self, version: int) -> None:
        """Nothing: a second copy exists only once two versions are needed at a time."""

    def hold(self) -> None:
        """Keep the shards' values of now for the next batch, whatever update comes first.

        No batch may be in flight. Until that batch begins, a copy of this rank's shards takes the place of
        the unsharded versions, whose memory is free for a validation.
        """
        self._free()
        if self._held is None:
            self._held = [shard.clone() for shard in self._local()]

    def drop(self) -> None:
        """Let the next batch read the shards as they then are. No batch may be in flight."""
        self._free()
        self._held = None

    def _free(self) -> None:
        """Free the unsharded versions, which no batch needs any more."""
        self._needed = None
        self._fsdp.free(0)
        self._fsdp.free(1)

    def next_weights(self) -> dict[str, Tensor]:
        """What the next batch will read, by parameter name, as DTensors sharded like the parameters."""
        held = self._held or [shard.clone() for shard in self._local()]
        return {
            name: DTensor.from_local(
                shard,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            for name, parameter, shard in zip(self._names, self._sharded, held, strict=True)
            if parameter.requires_grad and isinstance(parameter, DTensor)
        }

    def set_next_weights(self, values: dict[str, Tensor]) -> None:
        """Let the next batch read `values`, DTensors that name every trainable parameter."""
        self.hold()
        assert self._held is not None
        for name, parameter, held in zip(self._names, self._sharded, self._held, strict=True):
            if parameter.requires_grad:
                held.copy_(local_part(values[name]))

    def show(self, version: int | None) -> None:
        """Let the module show `version`, or its own, sharded parameters (None)."""
        self._fsdp.show(version)

    @property
    def is_gathering(self) -> bool:
        """Whether the next forward gathers the version that the module shows, layer by layer."""
        return self._fsdp.is_gathering

    def pass_state(self) -> object:
        """FSDP's state within a forward or backward, to be restored by `set_pass_state` when it resumes."""
        return self._fsdp.pass_state()

    def set_pass_state(self, saved: object) -> None:
        """See `pass_state`."""
        self._fsdp.set_pass_state(saved)

    def take_gradients(self, version: int) -> list[Tensor | None]:
        """Reduce, remove and return the gradients gathered on `version`, in the order of the parameters.

        A collective of the data-parallel ranks. The module shows `version`.
        """
        return self._fsdp.reduce()

    def check_unchanged(self) -> None:
        """Refuse to go on with a module whose parameters are no longer those of the start.

        Raises:
            RuntimeError: if one was replaced or added.
        """
        self._fsdp.leave_outside()
        same = [a is b for a, b in zip(self._fsdp.sharded, self._sharded, strict=True)]
        if not all(same) or self._watch.changed():
            raise RuntimeError(
                "the parameters of the stage's module were replaced or added while it was training; call "
                "drain() before such a change and build a new schedule after it"
            )

    def _local(self) -> list[Tensor]:
        return [local_part(shard.detach()) for shard in self._sharded]
