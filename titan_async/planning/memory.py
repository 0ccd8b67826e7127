"""Peak memory of a rank, by item.

Allocations and frees of the rank's tasks are added up in their order. They include tensors, as torch
allocates them, and an estimate for NCCL; a reserve (`usable_memory`) covers the allocator's rounding, other
libraries and the CUDA context. docs/memory.md describes the memory of the schedule, and docs/planning.md
compares predictions with runs.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.trainer import Trainer

from titan_async.pipelining.actions import in_flight
from titan_async.pipelining.simulation import Task
from titan_async.planning.fsdp_memory import (
    Held,
    Unit,
    backward_memory,
    forward_memory,
    reshards_after_forward,
)
from titan_async.planning.hardware import Cluster
from titan_async.planning.layout import Layout
from titan_async.planning.network import buffer_bytes
from titan_async.planning.optimizer_cost import Shards, optimizer_bytes, shards_of
from titan_async.planning.step_time import KEPT_STAGES
from titan_async.planning.traced_parts import Part, deduplicated
from titan_async.training.checkpoint.ema import keeps_average
from titan_async.training.pipeline.schedule import needs_fsdp

__all__ = ["Memory", "memory_of", "usable_memory"]

_RESERVED_SHARE = 0.1
"""Reserved share of an accelerator's memory: context, libraries, fragmentation. An assumption."""

_BATCHES = 4
"""Batches after which Async2BW has reached its peak."""


@dataclass(frozen=True)
class Memory:
    """Peak memory of a rank."""

    items: dict[str, int]
    """Bytes by purpose."""
    moment: str
    """The task during which the peak occurs."""
    saved: int
    """Bytes of its part of a checkpoint: weights, the next batch's weights, average, optimizer state."""

    @property
    def total(self) -> int:
        return sum(self.items.values())


def usable_memory(cluster: Cluster) -> float:
    """Bytes of an accelerator that are available to a plan."""
    return cluster.accelerator.memory * (1 - _RESERVED_SHARE)


def memory_of(
    config: Trainer.Config, layout: Layout, parts: dict[str, Part], pp_rank: int, *, on_cpu: bool = False
) -> Memory:
    """Peak memory of a rank in training; validation and checkpoints need less.

    Args:
        config: resolved; for its dtypes and optimizers.
        layout: of the run.
        parts: of its model.
        pp_rank: the rank's place in the pipeline.
        on_cpu: whether the parts were traced for a CPU.

    Raises:
        ValueError: if the schedule does not support the layout.
    """
    stages = {
        stage: _Stage(config, layout, [parts[name] for name in layout.stages[stage]], stage, on_cpu)
        for stage in layout.stages_of(pp_rank)
    }
    account = _Account(stages, layout)
    account.run(layout.programs(layout.microbatches, _BATCHES)[pp_rank])
    items = {name: size for name, size in account.at_peak.items() if size}
    if not on_cpu and layout.world_size > 1:
        items["NCCL's buffers"] = buffer_bytes(layout, pp_rank)
    saved = sum(
        stage.sharded * stage.versions + stage.average + stage.state.total() for stage in stages.values()
    )
    return Memory(items, account.moment, saved)


class _Stage:
    """Sizes of a stage in bytes."""

    def __init__(
        self, config: Trainer.Config, layout: Layout, parts: Sequence[Part], index: int, on_cpu: bool
    ) -> None:
        training = config.training
        if layout.pp == 1:  # torchtitan frees the logits before the backward
            parts = [*parts[:-1], _without_output(parts[-1])]
        self.parts = parts
        compute = TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize
        reduce = TORCH_DTYPE_MAP[training.mixed_precision_reduce].itemsize
        master = TORCH_DTYPE_MAP[training.dtype].itemsize
        wrapped = needs_fsdp(layout.world_size // layout.pp, training)
        if not wrapped:
            reduce = compute = master
        self.casts_gradients = compute != reduce
        weights = [weight for part in deduplicated(parts) for weight in part.weights]
        shards = {weight.name: shards_of(weight, layout) for weight in weights}
        self.sharded = sum(shard.sharded for shard in shards.values()) * master
        self.average = self.sharded if keeps_average(config) else 0
        self.unsharded = sum(shard.unsharded for shard in shards.values()) * compute
        self.first_copy = self.unsharded if wrapped else 0  # else computation uses the parameters themselves
        units: dict[str, list[Shards]] = {}
        for weight in weights:
            units.setdefault(weight.unit, []).append(shards[weight.name])
        self.gathers = [_buffers(unit, compute, copies_alone=False) for unit in units.values()]
        # FSDP reduces the head's gradient in each forward of a chunked loss, but Async2BW once per batch.
        early = [units.pop("head")] if wrapped and parts[-1].chunked and not layout.delayed else []
        self.early_gradients = sum(s.unsharded for unit in early for s in unit) * reduce
        self.early_shards = sum(s.sharded for unit in early for s in unit) * master
        self.reductions = [_buffers(unit, reduce, copies_alone=wrapped) for unit in units.values()]
        self.unit_gradients = [sum(s.unsharded for s in unit) * reduce for unit in units.values()]
        self.unit_shards = [sum(s.sharded for s in unit) * master for unit in units.values()]
        self.unsharded_gradients = sum(self.unit_gradients)
        self.state, self.optimizer_extra = optimizer_bytes(config, layout, weights, shards, on_cpu)
        self.tp = tp = layout.tp
        self.activations = sum(part.saved_bytes for part in parts) // tp
        self.forward_peak = self._forward_peak() // tp
        self.backward_peak = self._backward_peak(first=False) // tp
        self.first_backward_peak = self._backward_peak(first=True) // tp
        self.units = (
            self._layerwise(config, layout, shards, compute, reduce, master)
            if wrapped and layout.pp == 1
            else []
        )
        self.prefetches = layout.ep > 1
        self.splits = index > 0  # on the first stage torch runs the whole backward as "W"
        self.between = sum(part.between_bytes for part in parts) // tp if self.splits else self.activations
        self.input_peak = self._input_peak() // tp if self.splits else self.activations
        self.masks = parts[0].mask_bytes * layout.microbatches
        self.messages = self._messages(layout, index) // tp
        self.versions = 1
        if layout.delayed and in_flight(index, layout.pp, overlap=layout.overlap):
            self.versions = 2

    def _layerwise(
        self,
        config: Trainer.Config,
        layout: Layout,
        shards: dict[str, Shards],
        compute: int,
        reduce: int,
        master: int,
    ) -> list[Unit]:
        frees = reshards_after_forward(config.parallelism.fsdp_reshard_after_forward, self.parts)
        units = []
        for part, own, reshards in zip(self.parts, deduplicated(self.parts), frees, strict=True):
            of_part = [shards[weight.name] for weight in own.weights]
            whole, piece = (sum(getattr(s, n) for s in of_part) for n in ("unsharded", "sharded"))
            units.append(
                Unit(
                    part=part,
                    weights=whole * compute,
                    gather=_buffers(of_part, compute, copies_alone=False),
                    reduction=whole * reduce,
                    reduced=piece * (reduce + master * (reduce != master)),
                    shard=piece * master,
                    reshards=reshards,
                    foreign=max(part.gradient_bytes // layout.tp - whole * compute, 0) * (layout.ep > 1),
                )
            )
        return units

    def _forward_peak(self) -> int:
        peak = done = 0
        for part in self.parts:
            early = 2 * self.early_gradients * part.chunked  # and the reduction's input buffer
            peak = max(peak, done + part.forward_peak + early * self.tp)
            done += part.saved_bytes
        return peak

    def _backward_peak(self, first: bool) -> int:
        """Relative to the memory before the forward; without gradients after they are reduced or cast."""
        peak, before = 0, sum(part.saved_bytes for part in self.parts)
        made = 0
        for part in reversed(self.parts):
            before -= part.saved_bytes
            makes = first or self.casts_gradients
            of_part = part.first_backward_peak if makes else part.backward_peak
            peak = max(peak, before + made + of_part)
            if first and not self.casts_gradients:
                made += part.gradient_bytes
        return peak

    def _input_peak(self) -> int:
        peak, before, between = 0, sum(part.saved_bytes for part in self.parts), 0
        for part in reversed(self.parts):
            before -= part.saved_bytes
            peak = max(peak, before + between + part.input_peak)
            between += part.between_bytes
        return peak

    def _messages(self, layout: Layout, index: int) -> int:
        message, last = self.parts[0].message_bytes, len(layout.stages) - 1
        if layout.pp == 1:
            return 0
        if layout.delayed:
            inputs = sent = in_flight(index, layout.pp, layout.lookahead, layout.overlap) + 2
            gradients = 2  # one in use by a backward, and the next
        else:
            inputs = gradients = layout.microbatches // layout.passes
            sent = 1
        return message * ((inputs + sent) * (index > 0) + (gradients + 1) * (index < last))


def _without_output(part: Part) -> Part:
    changed = ("saved_bytes", "backward_peak", "first_backward_peak")
    return dataclasses.replace(part, **{name: getattr(part, name) - part.unused_bytes for name in changed})


def _buffers(unit: Sequence[Shards], itemsize: int, copies_alone: bool) -> int:
    """Buffer bytes of a unit's collective; without data parallelism only the reduction has one."""
    return sum(s.unsharded for s in unit if s.gathering > 1 or copies_alone) * itemsize


class _Account:
    """Tracks live bytes by item, and the items at the peak."""

    def __init__(self, stages: dict[int, _Stage], layout: Layout) -> None:
        self._stages, self._delayed = stages, layout.delayed
        self._microbatches = layout.microbatches
        self._live: Counter[str] = Counter()
        self._delivered: Counter[int] = Counter()  # gradients of past updates, by stage
        self._gathered: Counter[int] = Counter()
        self._started: set[tuple[int, int]] = set()  # batches with unsharded gradients
        self.at_peak: Counter[str] = Counter()
        self.moment = ""
        for stage in stages.values():
            self._live["weights"] += stage.sharded
            self._live["average of the weights"] += stage.average
            self._live.update(stage.state)
            self._live["messages"] += stage.messages
        self._live["attention masks"] = max(stage.masks for stage in stages.values())

    def run(self, program: Sequence[Task]) -> None:
        for task in program:
            stage = self._stages[task.stage]
            for half in task.halves:
                getattr(self, f"_{half.kind}")(half, stage)
                if task.overlapped is not None:  # the forward's temporary tensors are held
                    sign = 1 if half.kind == "F" else -1
                    self._live["temporary"] += sign * (stage.forward_peak - stage.activations)

    def _note(self, task: Task, extra: int, **held: int) -> None:
        if self._live.total() + extra + sum(held.values()) > self.at_peak.total():
            named = Counter({name.replace("_", " "): size for name, size in held.items()})
            self.at_peak = self._live + Counter({"temporary": extra}) + named
            self.moment = str(task)

    def _note_units(self, task: Task, moments: Iterable[Held]) -> None:
        for held in moments:
            self._note(
                task,
                held.temporary,
                unsharded_weights=held.weights,
                unsharded_gradients=held.gradients,
                activations=held.activations,
                gradients=held.summed,
            )

    def _G(self, task: Task, stage: _Stage) -> None:  # noqa: N802
        self._live["gradients"] -= self._delivered.pop(task.stage, 0)
        if stage.units:  # gathered per microbatch
            return
        if self._gathered[task.stage] < stage.versions:
            self._gathered[task.stage] += 1
            if self._gathered[task.stage] == 2:
                self._live["second version"] += stage.unsharded
            self._count_gathered()
        # The copy-out of one unit overlaps with the gather of the next.
        pairs = zip(stage.gathers, [*stage.gathers[1:], 0], strict=True)
        self._note(task, max(one + other for one, other in pairs))

    def _F(self, task: Task, stage: _Stage) -> None:  # noqa: N802
        if stage.units:
            first = (task.stage, task.batch) not in self._started
            self._note_units(task, forward_memory(stage.units, stage.tp, stage.prefetches, first))
            return
        self._note(task, stage.forward_peak)
        self._live["activations"] += stage.activations
        self._live["gradients"] += stage.early_shards * (task.microbatch == 0)

    def _B(self, task: Task, stage: _Stage) -> None:  # noqa: N802
        first = (task.stage, task.batch) not in self._started
        if stage.units:
            self._note_units(task, backward_memory(stage.units, stage.tp, first))
            self._started.add((task.stage, task.batch))
            self._live["gradients"] += sum(unit.shard for unit in stage.units) * first
            return
        self._live["activations"] -= stage.activations
        peak = stage.first_backward_peak if first else stage.backward_peak
        if first and stage.casts_gradients:
            self._make_gradients(task, stage)
        # Remaining activations are counted as such.
        self._live["activations"] += stage.activations
        self._note(task, peak - stage.activations)
        self._live["activations"] -= stage.activations
        if first and not stage.casts_gradients:
            self._make_gradients(task, stage)

    def _make_gradients(self, task: Task, stage: _Stage) -> None:
        self._started.add((task.stage, task.batch))
        self._live["unsharded gradients"] += stage.unsharded_gradients

    def _I(self, task: Task, stage: _Stage) -> None:  # noqa: N802
        self._note(task, stage.input_peak - stage.activations)
        self._live["activations"] += stage.between - stage.activations

    def _W(self, task: Task, stage: _Stage) -> None:  # noqa: N802
        self._live["activations"] += stage.activations - stage.between
        if stage.splits:
            if (task.stage, task.batch) not in self._started:
                self._make_gradients(task, stage)
            self._note(task, stage.between - stage.activations)
            self._live["activations"] -= stage.activations
        else:
            self._B(task, stage)

    def _R(self, task: Task, stage: _Stage) -> None:  # noqa: N802
        if stage.units:  # reduced per backward
            return
        for buffer, unit, shard in zip(
            stage.reductions, stage.unit_gradients, stage.unit_shards, strict=True
        ):
            self._note(task, buffer)
            self._live["unsharded gradients"] -= unit
            self._live["gradients"] += shard
            self._note(task, buffer)
        if not self._delayed:
            self._gathered[task.stage] = 0
            self._count_gathered()

    def _count_gathered(self) -> None:
        copies = sorted(stage.first_copy for index, stage in self._stages.items() if self._gathered[index])
        self._live["unsharded weights"] = sum(copies[-KEPT_STAGES:])

    def _U(self, task: Task, stage: _Stage) -> None:  # noqa: N802
        self._note(task, stage.optimizer_extra)
        self._delivered[task.stage] += stage.sharded
