"""The optimizers of the study by name: ours, torch's, and those of the package pytorch-optimizer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from _rotation import RotatedAdamW
from pytorch_optimizer import MARS, SOAP, Adan, NorMuon
from torch import nn
from torch.optim.optimizer import Optimizer

from titan_async.optim import Lion, Muon

__all__ = ["OPTIMIZERS", "REST_LR", "build_optimizers", "hidden_matrices"]

REST_LR = 3e-3
"""Peak rate of AdamW for the parameters without Muon or NorMuon: embedding, head, router and norms."""

_WEIGHT_DECAY = 0.1  # as in arXiv 2606.30634; of matrices only

Params = list[nn.Parameter]


@dataclass(frozen=True)
class Kind:
    """How to build an optimizer of the study."""

    build: Callable[[Params, float, float, float], Optimizer]
    """Called with parameters, peak learning rate, momentum and weight decay."""
    momentum: float
    """The default of beta1 (Adam's kind) or mu (Muon's), which question 3 varies."""

    matrices_only: bool = False
    """Whether AdamW updates all parameters except the matrices of hidden layers."""

    decay: float = _WEIGHT_DECAY


def _nadam(params: Params, lr: float, beta1: float, decay: float) -> Optimizer:
    return torch.optim.NAdam(
        params, lr=lr, betas=(beta1, 0.95), weight_decay=decay, decoupled_weight_decay=True
    )


OPTIMIZERS = {
    "adamw": Kind(
        lambda params, lr, beta1, decay: torch.optim.AdamW(
            params, lr=lr, betas=(beta1, 0.95), weight_decay=decay, fused=True
        ),
        momentum=0.9,
    ),
    "muon": Kind(
        lambda params, lr, mu, decay: Muon(
            params,
            lr=lr,
            momentum=mu,
            weight_decay=decay,
            adjust_lr="match_rms_adamw",
            compute_dtype="float32",
        ),
        momentum=0.95,
        matrices_only=True,
    ),
    "normuon": Kind(
        lambda params, lr, mu, decay: NorMuon(
            [{"params": params, "use_muon": True}],
            lr=lr,
            momentum=mu,
            weight_decay=decay,
            update_scale="match_rms",
        ),
        momentum=0.95,
        matrices_only=True,
    ),
    # The weight decay of Lion is ten times AdamW's, its rate a tenth (arXiv 2302.06675, section 5).
    "lion": Kind(
        lambda params, lr, beta1, decay: Lion(params, lr=lr, betas=(beta1, 0.99), weight_decay=decay),
        momentum=0.9,
        decay=10 * _WEIGHT_DECAY,
    ),
    "soap": Kind(
        lambda params, lr, beta1, decay: SOAP(
            params, lr=lr, betas=(beta1, 0.95), weight_decay=decay, precondition_frequency=10
        ),
        momentum=0.95,
    ),
    "adan": Kind(
        lambda params, lr, beta1, decay: Adan(
            params, lr=lr, betas=(beta1, 0.92, 0.99), weight_decay=decay, weight_decouple=True
        ),
        momentum=0.98,
    ),
    "mars": Kind(
        lambda params, lr, beta1, decay: MARS(
            params, lr=lr, betas=(beta1, 0.99), weight_decay=decay, lr_1d=lr, weight_decay_1d=0.0
        ),
        momentum=0.95,
    ),
    "nadam": Kind(_nadam, momentum=0.9),
    # As in arXiv 2505.01099, for pipelines with a delay.
    "nadam_99": Kind(_nadam, momentum=0.99),
    "adamw_rotated": Kind(
        lambda params, lr, beta1, decay: RotatedAdamW(params, lr=lr, betas=(beta1, 0.95), weight_decay=decay),
        momentum=0.9,
    ),
    # Its decay is added to the gradient, which 0.1 would dominate.
    "sgd": Kind(
        lambda params, lr, mu, decay: torch.optim.SGD(params, lr=lr, momentum=mu, weight_decay=decay),
        momentum=0.9,
        decay=0.0,
    ),
}


def hidden_matrices(model: nn.Module) -> Params:
    """The matrices of a decoder's layers, and the stacks of its experts; not the routers."""
    return [
        param
        for name, param in model.named_parameters()
        if name.startswith("layers.") and param.ndim > 1 and "router" not in name
    ]


def build_optimizers(
    model: nn.Module,
    name: str,
    lr: float,
    lr_factor: float = 1.0,
    momentum: float | None = None,
    rest_lr: float = REST_LR,
) -> list[Optimizer]:
    """The optimizers of all of a model's parameters; `momentum` None is the optimizer's default.

    `rest_lr` is the rate of AdamW next to Muon or NorMuon; `lr_factor` scales both rates.
    """
    kind = OPTIMIZERS[name]
    matrices = hidden_matrices(model) if kind.matrices_only else [p for p in model.parameters() if p.ndim > 1]
    taken = set(matrices)
    rest = [param for param in model.parameters() if param not in taken]
    if momentum is None:
        momentum = kind.momentum
    first = kind.build(matrices, lr * lr_factor, momentum, kind.decay)
    if kind.matrices_only:
        second = torch.optim.AdamW(
            rest, lr=rest_lr * lr_factor, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
    else:
        second = kind.build(rest, lr * lr_factor, momentum, 0.0)
    return [first, second]
