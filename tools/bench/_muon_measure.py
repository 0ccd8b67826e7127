"""Runs in the processes of the benchmark: builds the competitors on the same tensors, and measures them.

All update the same parameters. These are restored, with their gradients, before each step, so that every
competitor has the same values at the same addresses. Each has its own momentum.
"""

import gc
import importlib
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from _muon_accuracy import Exact, relative_error
from _muon_competitors import COMPETITORS, LR, Competitor
from _muon_traffic import TrafficCounter
from _muon_workloads import Case, Matrix, make_matrix, parameter, place
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.optim import Optimizer

from titan_async.planning.storage_tracker import StorageTracker

__all__ = ["Profile", "clear", "load", "prepare", "profile", "timed_step"]


@dataclass
class Profile:
    """Traffic, memory and errors of a competitor's step on one rank; times are measured separately."""

    refusal: str | None = None
    """The reason if it does not run."""
    sent: int = 0
    """Bytes, see _muon_traffic.py."""
    collectives: dict[str, int] = field(default_factory=dict)
    extra: int = 0
    """Peak bytes of tensors in a step, in addition to those before it."""
    kept: int = 0
    """Bytes kept between steps: state and buffers."""
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    """On rank 0, by shape: relative errors of the first update against the exact polar factor, and against
    the same iterations in float64."""


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@dataclass
class _Bench:
    """The tensors of a case in this process."""

    matrices: list[Matrix]
    params: list[nn.Parameter]
    as_dtensors: list[nn.Parameter]
    """The same parameters; if ``params`` are plain tensors, DTensors that share their memory."""
    grads: dict[nn.Parameter, Tensor]
    start: list[tuple[Tensor, Tensor]]
    """Initial weights and gradients of ``params`` on this rank."""
    optimizers: dict[str, Optimizer] = field(default_factory=dict)

    def named(self, competitor: Competitor) -> list[tuple[str, nn.Parameter]]:
        params = self.as_dtensors if competitor.only_dtensors else self.params
        return [(matrix.name, param) for matrix, param in zip(self.matrices, params, strict=True)]

    def tensors(self) -> list[Tensor]:
        found = [tensor for pair in self.start for tensor in pair]
        for param in self.params:
            found += [_local(param.data), _local(self.grads[param])]
        return found

    @torch.no_grad()
    def restore(self, at_zero: bool = False) -> None:
        """Restores weights (or zeros) and gradients, because some implementations write into gradients."""
        for param, (weight, grad) in zip(self.params, self.start, strict=True):
            _local(param.data).copy_(torch.zeros(()) if at_zero else weight)
            _local(self.grads[param]).copy_(grad)
        for param, grad in self.grads.items():
            param.grad = grad


_kept: list[_Bench] = []
"""In a worker: the current case."""


def load(rank: int, group: dist.ProcessGroup) -> None:
    """Imports the installed packages on all ranks, before anything is measured."""
    for competitor in COMPETITORS:
        if competitor.installed:
            importlib.import_module(competitor.package)
    import titan_async.optim  # noqa: F401


def prepare(rank: int, group: dist.ProcessGroup, case: Case, matrices: list[Matrix], compiled: bool) -> None:
    """Creates the tensors of a case."""
    clear(rank, group)
    torch.compiler.set_stance("default" if compiled else "force_eager")
    params, as_dtensors, grads = [], [], {}
    places = place(case, group, matrices)
    alone = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp_shard",))
    for index, (matrix, (mesh, placements)) in enumerate(zip(matrices, places, strict=True)):
        weight, gradient = make_matrix(matrix, index, 0.02), _gradient(matrix, index)
        if case.layout == "whole":
            param, grad = nn.Parameter(weight), gradient
            twin = nn.Parameter(DTensor.from_local(weight, alone, [Shard(0)], run_check=False))
            grads[twin] = DTensor.from_local(grad, alone, [Shard(0)], run_check=False)
        else:
            param = twin = parameter(weight, mesh, placements)
            grad = parameter(gradient, mesh, placements).data
        grads[param] = grad
        params.append(param)
        as_dtensors.append(twin)
    start = [(_local(param.data).clone(), _local(grads[param]).clone()) for param in params]
    _kept.append(_Bench(matrices, params, as_dtensors, grads, start))


def _gradient(matrix: Matrix, index: int) -> Tensor:
    return make_matrix(matrix, 10_000 + index, 1e-3)


def profile(rank: int, group: dist.ProcessGroup, name: str) -> Profile:
    """Builds a competitor, and profiles its first two steps."""
    (bench,) = _kept
    competitor = next(c for c in COMPETITORS if c.name == name)
    try:
        return _profile(rank, group, bench, competitor)
    except Exception as error:  # reported as a refusal
        bench.optimizers.pop(name, None)
        first = (str(error).strip() or "no reason given").splitlines()[0]
        return Profile(refusal=f"{type(error).__name__}: {first}")


def _profile(rank: int, group: dist.ProcessGroup, bench: _Bench, competitor: Competitor) -> Profile:
    addresses = [_local(param.data).data_ptr() for param in bench.params]
    bench.restore(at_zero=True)
    tracker = StorageTracker()
    tracker.exclude(*bench.tensors())
    with tracker:
        optimizer = bench.optimizers[competitor.name] = competitor.build(bench.named(competitor))
        optimizer.step()
    gc.collect()  # garbage is not kept
    kept = tracker.live
    errors = _errors(rank, bench, competitor)
    bench.restore()
    dist.barrier(group)
    traffic = TrafficCounter()
    with tracker:
        tracker.reset_peak()
        before = tracker.live
        with traffic:
            optimizer.step()
        extra = tracker.peak - before
    # The others are measured on the same memory.
    assert addresses == [_local(param.data).data_ptr() for param in bench.params]
    return Profile(None, traffic.sent, dict(traffic.calls), extra, kept, errors)


def _errors(rank: int, bench: _Bench, competitor: Competitor) -> dict[str, tuple[float, float]]:
    """The errors of one matrix of each shape, or of the first and the last of a stack."""
    found: dict[str, tuple[float, float]] = {}
    for index, (matrix, param) in enumerate(zip(bench.matrices, bench.params, strict=True)):
        label = " x ".join(map(str, matrix.shape))
        if label in found:
            continue
        found[label] = (0.0, 0.0)
        data = param.data
        update = data.full_tensor() if isinstance(data, DTensor) else data
        if rank:
            continue
        # Weights of zero become the update, without weight decay.
        rows, cols = matrix.shape[-2:]
        update = update / (-LR * (max(1.0, rows / cols) ** 0.5 if competitor.scaled else 1.0))
        for expert in [0, matrix.shape[0] - 1] if matrix.is_stack else [None]:
            exact = _exact(matrix, index, expert)
            measured = update if expert is None else update[expert]
            errors = (
                relative_error(measured, exact.polar),
                relative_error(measured, exact.iterated(competitor.triples)),
            )
            found[label] = max(found[label][0], errors[0]), max(found[label][1], errors[1])
    return found


_references: dict[tuple[tuple[int, ...], int, int | None], Exact] = {}


def _exact(matrix: Matrix, index: int, expert: int | None) -> Exact:
    key = matrix.shape, index, expert
    if key not in _references:
        gradient = _gradient(matrix, index)
        _references[key] = Exact(gradient if expert is None else gradient[expert])
    return _references[key]


def timed_step(rank: int, group: dist.ProcessGroup, name: str) -> float:
    """Seconds of a step on this rank, after a barrier."""
    (bench,) = _kept
    bench.restore()
    step = bench.optimizers[name].step
    dist.barrier(group)
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def clear(rank: int, group: dist.ProcessGroup) -> None:
    """Frees the tensors of the case."""
    for bench in _kept:
        bench.optimizers.clear()
        for param in bench.grads:
            param.grad = None
    _kept.clear()
