"""Error feedback and optimizers by their formulas."""

import math

import torch

from titan_async.optim import ErrorFeedback, Lion, Muon

LEVELS = ["update", "gradient"]
SHAPES = [(6, 4), (3, 5)]
DECAY = 0.1


# Each returns the displacement that an optimizer proposes for a parameter, given its weights, its gradient,
# the learning rate and the optimizer's state, which it updates. They do not depend on error feedback.


def propose_sgd(x, g, lr, memory):
    return -lr * (g + DECAY * x)


def propose_momentum(x, g, lr, memory):
    g = g + DECAY * x
    memory["m"] = g if "m" not in memory else 0.9 * memory["m"] + g
    return -lr * memory["m"]


def propose_adamw(x, g, lr, memory):
    t = memory["t"] = memory.get("t", 0) + 1
    memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    memory["v"] = 0.95 * memory.get("v", 0) + 0.05 * g * g
    m, v = memory["m"] / (1 - 0.9**t), memory["v"] / (1 - 0.95**t)
    return -lr * DECAY * x - lr * m / (v.sqrt() + 1e-8)


def propose_muon(x, g, lr, memory):
    memory["m"] = 0.95 * memory.get("m", 0) + 0.05 * g
    update = 0.95 * memory["m"] + 0.05 * g
    u, s, vh = torch.linalg.svd(update, full_matrices=False)
    s = s / update.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    rows, cols = x.shape
    return -lr * DECAY * x - lr * math.sqrt(max(1, rows / cols)) * (u @ torch.diag(s) @ vh)


def propose_lion(x, g, lr, memory):
    m = memory.get("m", torch.zeros_like(x))
    memory["m"] = 0.99 * m + 0.01 * g
    return -lr * DECAY * x - lr * (0.9 * m + 0.1 * g).sign()


ADAMW = {"betas": (0.9, 0.95), "weight_decay": DECAY}


OPTIMIZERS = {
    "sgd": (lambda ps: torch.optim.SGD(ps, 0.1, weight_decay=DECAY), propose_sgd),
    "momentum": (lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=DECAY), propose_momentum),
    "adamw": (lambda ps: torch.optim.AdamW(ps, 0.1, **ADAMW), propose_adamw),
    "adamw_foreach": (lambda ps: torch.optim.AdamW(ps, 0.1, foreach=True, **ADAMW), propose_adamw),
    "adamw_fused": (lambda ps: torch.optim.AdamW(ps, 0.1, fused=True, **ADAMW), propose_adamw),
    "lion": (lambda ps: Lion(ps, 0.1, weight_decay=DECAY), propose_lion),
    "muon": (lambda ps: Muon(ps, 0.1, weight_decay=DECAY, compute_dtype="float64"), propose_muon),
}


IN_MUON = "in muon"


def with_feedback(name, params, level="update", strength=1.0):
    """`ErrorFeedback` around an optimizer, or Muon with its own."""
    if name != IN_MUON:
        return ErrorFeedback(OPTIMIZERS[name][0](params), strength, level)
    options = {"weight_decay": DECAY, "compute_dtype": "float64"}
    return Muon(params, 0.1, error_feedback=strength, error_feedback_level=level, **options)


def proposal(name):
    return OPTIMIZERS["muon" if name == IN_MUON else name][1]


def reference(propose, level, strengths, start, gradient, rates, paused=()):
    """The weights after each update: D' = D + s (D - D_prev), or g' = g + s (g - g_prev).

    The first update is uncorrected, and so is the one after a gradient None or a paused batch.
    """
    strengths = strengths if isinstance(strengths, list) else [strengths] * len(rates)
    weights = [x.clone() for x in start]
    memories: list[dict] = [{} for _ in weights]
    previous: list[torch.Tensor | None] = [None for _ in weights]
    trajectory = []
    for batch, (lr, strength) in enumerate(zip(rates, strengths, strict=True)):
        if batch in paused:
            previous = [None for _ in weights]
        for i, x in enumerate(weights):
            g = gradient(batch, i, x)
            if g is None:
                previous[i] = None
                continue
            if level == "gradient":
                corrected = g if previous[i] is None else g + strength * (g - previous[i])
                weights[i] = x + propose(x, corrected, lr, memories[i])
                previous[i] = g
            else:
                d = propose(x, g, lr, memories[i])
                weights[i] = x + d if previous[i] is None else x + d + strength * (d - previous[i])
                previous[i] = d
        if batch in paused:
            previous = [None for _ in weights]
        trajectory.append([x.clone() for x in weights])
    return trajectory


def noisy_gradient(batch: int, index: int, x: torch.Tensor) -> torch.Tensor:
    """Depends on the batch and on the weights."""
    generator = torch.Generator().manual_seed(100 * batch + index)
    return 0.5 * x + torch.randn(x.shape, dtype=x.dtype, generator=generator)


def gaps(batch, index, x):
    """The second parameter has no gradient in batches 0, 3 and 4."""
    return None if index == 1 and batch in (0, 3, 4) else noisy_gradient(batch, index, x)


def zero_in_batch_2(batch, index, x):
    """With a learning rate of zero, this is a step that only creates state."""
    return torch.zeros_like(x) if batch == 2 else noisy_gradient(batch, index, x)


def start_weights(dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in SHAPES]


def parameters(dtype=torch.float64):
    return [torch.nn.Parameter(x) for x in start_weights(dtype)]


def give_gradients(params, batch, gradient=noisy_gradient):
    for i, param in enumerate(params):
        param.grad = gradient(batch, i, param.detach())
