"""Implementations of Muon that the benchmark compares, configured for the same update if possible.

The update has momentum 0.95 with Nesterov, five iterations with Keller Jordan's coefficients, weight decay
0.1, and the scale sqrt(max(1, rows / cols)).
"""

import contextlib
import importlib.util
import inspect
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _muon_accuracy import STANDARD, YOU, Triples
from _muon_dist_muon import build_dist_muon_on_cpu
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

__all__ = ["COMPETITORS", "Competitor"]

Named = list[tuple[str, nn.Parameter]]

LR, DECAY, MOMENTUM, STEPS = 1.0, 0.1, 0.95, 5


@dataclass(frozen=True)
class Competitor:
    name: str
    package: str
    """Module that has to be importable."""
    build: Callable[[Named], Optimizer]
    ours: bool = False
    triples: Triples = STANDARD
    scaled: bool = True
    """Whether the update is scaled by sqrt(max(1, rows / cols)); otherwise it is not scaled."""
    only_dtensors: bool = False
    compiles: bool = False
    """Whether it uses torch.compile."""
    parts: tuple[str, ...] = ("notes", "dense", "moe")
    """Parts of the benchmark in which it is measured."""
    note: str = ""

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


def _parameters(named: Named) -> list[nn.Parameter]:
    return [parameter for _, parameter in named]


def _accepted(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Those of ``options`` that ``function`` accepts, for packages whose arguments change."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in known}


def _torch(named: Named) -> Optimizer:
    return torch.optim.Muon(_parameters(named), lr=LR, weight_decay=DECAY)


def _dist_muon(named: Named) -> Optimizer:
    return build_dist_muon_on_cpu(named, lr=LR, weight_decay=DECAY)


def _without_triton(module: Any) -> None:
    """Disables the Triton kernel that muonium and dtensor-muon use by default, even on CPU."""
    original = module._get_orthogonalization_fn
    if not hasattr(original, "on_cpu"):
        module._get_orthogonalization_fn = lambda strategy, use_triton: original(strategy, use_triton=False)
        module._get_orthogonalization_fn.on_cpu = True


def _muonium(named: Named) -> Optimizer:
    import muonium
    import muonium.orthogonalize.orthogonalize as orthogonalize

    _without_triton(orthogonalize)
    return muonium.Muon(
        _parameters(named), lr=LR, wd=DECAY, use_cautious_wd=False, orthogonalization_strategy="newton_schulz"
    )


def _dtensor_muon(named: Named) -> Optimizer:
    import dtensor_muon
    import dtensor_muon.orthogonalize.orthogonalize as orthogonalize

    _without_triton(orthogonalize)
    group = {"params": _parameters(named), "flatten": False}  # a stack is not one matrix
    return dtensor_muon.Muon(
        [group], lr=LR, wd=DECAY, use_cautious_wd=False, orthogonalization_strategy="newton_schulz"
    )


def _muon_fsdp2(named: Named) -> Optimizer:
    import muon_fsdp2

    group = {"params": _parameters(named), "lr": LR, "weight_decay": DECAY, "use_muon": True}
    return muon_fsdp2.Muon([{**group, "rms_scale": False}])


def _heavyball(named: Named) -> Optimizer:
    import heavyball

    return heavyball.Muon(
        _parameters(named), lr=LR, betas=(MOMENTUM, 0.99), weight_decay=DECAY, compile_step=False
    )


class _TorchWithoutFloat16:
    """Replaces torch in gram-newton-schulz, which converts to ``torch.float16``.

    CPUs multiply matrices of float16 in software, forty times slower than others.
    """

    float16 = torch.bfloat16

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _gram_newton_schulz(named: Named) -> Optimizer:
    import gram_newton_schulz.gram_newton_schulz as iterations
    from gram_newton_schulz import Muon

    iterations.torch = _TorchWithoutFloat16()
    with contextlib.redirect_stdout(io.StringIO()):  # it prints how it chooses where to restart
        return Muon(
            _parameters(named), lr=LR, weight_decay=DECAY, adjust_lr=None,
            ns_coefficients=list(STANDARD), ns_use_kernels=False,
        )  # fmt: skip


def _dion(named: Named) -> Optimizer:
    from dion import Muon

    first = named[0][1]
    return Muon(
        _parameters(named),
        **_accepted(
            Muon, distributed_mesh=first.device_mesh if isinstance(first, DTensor) else None, lr=LR,
            mu=MOMENTUM, weight_decay=DECAY, nesterov=True, adjust_lr=None, use_triton=False,
        ),
    )  # fmt: skip


def _emerging_optimizers(named: Named) -> Optimizer:
    from emerging_optimizers.orthogonalized_optimizers import Muon

    return Muon(
        _parameters(named),
        **_accepted(
            Muon, lr=LR, weight_decay=DECAY, momentum=MOMENTUM, momentum_beta=MOMENTUM, nesterov=True,
            use_nesterov=True, coefficient_type="simple", num_ns_steps=STEPS, scale_mode="shape_scaling",
        ),
    )  # fmt: skip


def _ours(**options: Any) -> Callable[[Named], Optimizer]:
    def build(named: Named) -> Optimizer:
        from titan_async.optim import Muon

        return Muon(_parameters(named), lr=LR, weight_decay=DECAY, **options)

    return build


def _wrapped(named: Named) -> Optimizer:
    from titan_async.optim import ErrorFeedback

    return ErrorFeedback(_ours()(named))


ALL = ("aspects", "notes", "dense", "moe")

COMPETITORS = [
    Competitor("torch.optim.Muon", "torch", _torch, parts=ALL),
    Competitor("DistMuon", "torchtitan", _dist_muon, only_dtensors=True, note="CUDA check off, no streams"),
    Competitor("muonium", "muonium", _muonium, compiles=True, note="without Triton"),
    Competitor("dtensor-muon", "dtensor_muon", _dtensor_muon, compiles=True, note="without Triton"),
    Competitor("muon-fsdp2", "muon_fsdp2", _muon_fsdp2, compiles=True),
    Competitor("heavyball", "heavyball", _heavyball, triples=YOU, compiles=True, note="own coefficients"),
    Competitor("gram-newton-schulz", "gram_newton_schulz", _gram_newton_schulz, scaled=False, compiles=True,
               note="no kernels, bfloat16 for float16"),
    Competitor("dion", "dion", _dion, triples=YOU, scaled=False, compiles=True, note="own coefficients"),
    Competitor("emerging-optimizers", "emerging_optimizers", _emerging_optimizers),
    Competitor("ours", "titan_async", _ours(), ours=True, parts=ALL),
    Competitor("ours, error feedback", "titan_async", _ours(error_feedback=1.0), ours=True),
    Competitor("ours in ErrorFeedback", "titan_async", _wrapped, ours=True),
    Competitor("ours, float32", "titan_async", _ours(compute_dtype="float32"), ours=True,
               parts=("aspects", "notes")),
    Competitor("ours, standard form", "titan_async", _ours(ns_form="standard"), ours=True,
               parts=("aspects",)),
    Competitor("ours, Gram form", "titan_async", _ours(ns_form="gram"), ours=True,
               parts=("aspects",)),
]  # fmt: skip
