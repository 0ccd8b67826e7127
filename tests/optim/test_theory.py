"""Theory of delayed updates, on problems with a known solution.

Linear updates have a sharp bound on the learning rate, which a delay lowers. The updates of a linear
minimization oracle (Muon: the spectral norm; signs: the largest entry) have none: at any delay they end
within a few steps of the solution (arXiv 2606.30634, section 4 and appendix C). docs/delay.md has all
measurements, including negative results.
"""

import functools
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.selection import slow
from titan_async.optim import DelayedGradients, ErrorFeedback, Lion, Muon
from tools.delay_theory import OPTIMIZERS, PROBLEMS, SEEDS, distances, key, ratio, tables

pytestmark = pytest.mark.filterwarnings("ignore:error feedback around")

DOCS = Path(__file__).parents[2] / "docs"


def trajectory(start, optimizer, delay, feedback, steps):
    """The iterates [steps + 1, ...] on |W|^2 / 2, whose gradient is W itself."""
    weights = nn.ParameterList([start.clone()])
    built = optimizer(list(weights))
    if feedback:
        built = ErrorFeedback(built, level=feedback)
    delayed = DelayedGradients(weights, delay)
    iterates = [start]
    for _ in range(steps):
        with delayed.batch():
            (0.5 * weights[0].square()).sum().backward()
        built.step()
        built.zero_grad()
        iterates.append(weights[0].detach().clone())
    return torch.stack(iterates)


def grows(lr, delay, feedback):
    """Whether gradient descent with this learning rate diverges from a minimum of curvature 1."""
    start = torch.ones(1, dtype=torch.float64)
    path = trajectory(start, lambda params: torch.optim.SGD(params, lr=lr), delay, feedback, 300).abs()
    early, late = path[100:150].max(), path[250:300].max()
    assert not 0.99 < late / early < 1.01, "too near to the bound"
    return bool(late > early)


@pytest.mark.parametrize("delay", range(5))
def test_largest_rate_of_delayed_gradient_descent(delay):
    """x[b+1] = x[b] - a x[b-k] is stable for a < 2 cos(k pi / (2k + 1)): 2, 1, 0.618 (Levin, May 1976)."""
    bound = 2 * math.cos(delay * math.pi / (2 * delay + 1))
    assert not grows(0.99 * bound, delay, None)
    assert grows(1.01 * bound, delay, None)


@pytest.mark.parametrize("level", ["update", "gradient"])
def test_feedback_lowers_the_largest_rate_of_gradient_descent(level):
    """x[b+1] = x[b] - a (2 x[b-1] - x[b-2]) is stable for a < (sqrt(5) - 1) / 2, without feedback for a < 1.

    Jury's conditions on z^3 - z^2 + 2 a z - a give 1 - a^2 > a. So feedback does not prevent divergence.
    """
    bound = (math.sqrt(5) - 1) / 2
    assert not grows(0.98 * bound, 1, level)
    assert grows(1.02 * bound, 1, level)
    assert not grows(1.02 * bound, 1, None)


def sign_cycle(delay, feedback):
    """Amplitude of the final cycles of 200 entries, in steps, from initial distances of 20 to 21."""
    start = 20 + torch.linspace(0.003, 0.997, 200, dtype=torch.float64)
    path = trajectory(start, lambda params: Lion(params, lr=1.0, betas=(0, 0)), delay, feedback, 200)
    return path[100:].abs().amax(0)


@pytest.mark.parametrize("delay", range(5))
def test_amplitude_of_a_delayed_sign(delay):
    """It changes k steps after the solution: between k + 1/2 and k + 1 steps, depending on the start."""
    cycle = sign_cycle(delay, None)
    assert cycle.min() > delay + 0.49 and cycle.max() < delay + 1


def test_feedback_at_level_update_widens_the_cycle_of_a_sign():
    """When the sign changes, 2u - u' is three steps: an amplitude of 2 to 3 steps instead of 3/2 to 2.

    Corrected gradients still give single steps, and change sign no later than delayed ones.
    """
    delayed, update, gradient = (sign_cycle(1, level) for level in (None, "update", "gradient"))
    assert update.min() > 2 and update.max() < 3
    assert gradient.min() > 1 and gradient.max() < 2
    assert (update > delayed).all() and (gradient < delayed + 1e-9).all()


@pytest.mark.parametrize("delay", [0, 1, slow(2), 4])
def test_amplitude_of_delayed_muon_in_the_spectral_norm(delay):
    """Without momentum, singular values behave like entries of a sign, up to the iteration's error."""
    lr = 0.05
    torch.manual_seed(0)
    start = torch.linalg.qr(torch.randn(12, 6, dtype=torch.float64)).Q @ torch.diag(
        torch.linspace(0.3, 1, 6).double()
    )
    path = trajectory(
        start,
        lambda params: Muon(
            params,
            lr=lr,
            weight_decay=0.0,
            momentum=0.0,
            ns_coefficients="polar_express",
            ns_steps=12,
            adjust_lr="match_rms_adamw",
            compute_dtype="float64",
        ),
        delay,
        None,
        200,
    )
    step = lr * 0.2 * math.sqrt(12)
    norms = torch.linalg.matrix_norm(path[150:], ord=2)
    assert norms.max() < (delay + 1) * step * 1.02
    assert norms.max() > step / 2


# The best learning rates of synchronous runs with other seeds, from the grid of tools/delay_theory.py.
RATES = {
    ("quadratic", "Muon"): 2**-4,
    ("quadratic", "Lion"): 2**-4,
    ("quadratic", "signSGD"): 2**-5,
    ("quadratic", "AdamW"): 2**-4,
    ("quadratic", "SGD, momentum 0.9"): 2**-1,
    ("regression", "Muon"): 2**-5,
    ("regression", "Lion"): 2**-4,
    ("regression", "signSGD"): 2**-5,
    ("regression", "AdamW"): 2**-5,
    ("regression", "SGD, momentum 0.9"): 2**-8,
}
ORACLES = ("Muon", "Lion", "signSGD")


@functools.cache
def found(problem, optimizer, delay, feedback=None):
    return distances(PROBLEMS[problem](SEEDS), optimizer, RATES[problem, optimizer], delay, feedback)


def synchronous_delayed_and_corrected(problem, optimizer):
    return (
        found(problem, optimizer, 0),
        found(problem, optimizer, 1),
        found(problem, optimizer, 1, "update"),
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("delay", [0, 1, slow(2), slow(4)])
@pytest.mark.parametrize("optimizer", ORACLES)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_oracles_end_near_the_solution_at_every_delay(problem, optimizer, delay):
    for feedback in (None, "update") if delay else (None,):
        assert (found(problem, optimizer, delay, feedback) < 0.3).all()


@pytest.mark.parametrize("optimizer", [slow("Muon"), "Lion", "signSGD"])
def test_larger_delays_end_farther_away_on_the_quadratic(optimizer):
    delays = [found("quadratic", optimizer, delay) for delay in (0, 1, 2, 4)]
    for less, more in zip(delays, delays[1:], strict=False):
        mean, low, high = ratio(more, less)
        assert low > 1


def test_one_update_of_delay_costs_adamw_and_sgd_more_than_an_oracle():
    """At the best learning rates without a delay, as in the paper."""
    for optimizer in ORACLES:
        synchronous, delayed, _ = synchronous_delayed_and_corrected("quadratic", optimizer)
        assert ratio(delayed, synchronous)[2] < 5
    synchronous, delayed, _ = synchronous_delayed_and_corrected("quadratic", "AdamW")
    assert ratio(delayed, synchronous)[1] > 20
    assert (found("quadratic", "SGD, momentum 0.9", 0) < 1e-3).all()
    assert (found("quadratic", "SGD, momentum 0.9", 1) > 1e3).all()


@pytest.mark.parametrize(
    ("problem", "optimizer"), [("quadratic", "Muon"), ("quadratic", "AdamW"), ("regression", "Lion")]
)
def test_feedback_ends_between_synchronous_and_delayed(problem, optimizer):
    """Both inequalities hold for the mean over 16 seeds, with 95 % intervals of paired ratios."""
    synchronous, delayed, corrected = synchronous_delayed_and_corrected(problem, optimizer)
    assert ratio(delayed, corrected)[1] > 1
    assert ratio(corrected, synchronous)[1] > 1


@pytest.mark.parametrize("optimizer", [slow("Muon"), slow("AdamW"), "SGD, momentum 0.9"])
def test_feedback_ends_nearer_to_synchronous_if_noise_dominates(optimizer):
    """On the regression, the delay costs a percent or less, and feedback ends within half a percent."""
    synchronous, delayed, corrected = synchronous_delayed_and_corrected("regression", optimizer)
    assert ratio(delayed, corrected)[1] > 1
    assert abs(math.log(ratio(corrected, synchronous)[0])) < abs(math.log(ratio(delayed, synchronous)[0]))


# With the power of two that is best for synchronous runs on the quadratic.
OTHERS = {
    "Adagrad": (2.0, lambda params, lr: torch.optim.Adagrad(params, lr=lr)),
    "RMSprop": (1.0, lambda params, lr: torch.optim.RMSprop(params, lr=lr)),
    "NAdam": (1.0, lambda params, lr: torch.optim.NAdam(params, lr=lr)),
    "Adam, first beta 0": (2.0, lambda params, lr: torch.optim.Adam(params, lr=lr, betas=(0.0, 0.99))),
    "RMSprop, momentum 0.9": (0.125, lambda params, lr: torch.optim.RMSprop(params, lr=lr, momentum=0.9)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_feedback_costs_optimizers_that_do_not_average_gradients(monkeypatch, name):
    """And NAdam, which already extrapolates; RMSprop with momentum benefits, like AdamW."""
    lr, build = OTHERS[name]
    monkeypatch.setitem(OPTIMIZERS, name, build)
    problem = PROBLEMS["quadratic"](SEEDS)
    delayed, corrected = (distances(problem, name, lr, 1, feedback) for feedback in (None, "update"))
    _, low, high = ratio(corrected, delayed)
    assert high < 0.1 if "momentum" in name else low > 1.5


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [*OTHERS, *OPTIMIZERS])
def test_feedback_around_unsuitable_optimizers_warns(name):
    lr, build = OTHERS.get(name) or (0.1, OPTIMIZERS[name])
    optimizer = build([nn.Parameter(torch.zeros(2, 2))], lr)
    if name in ("Adagrad", "RMSprop", "NAdam", "Adam, first beta 0", "signSGD"):
        kind = type(optimizer).__name__
        with pytest.warns(UserWarning, match=f"error feedback around {kind} .* worse than none"):
            ErrorFeedback(optimizer)
    else:
        ErrorFeedback(optimizer)
    ErrorFeedback(optimizer, strength=0.0)


@pytest.mark.parametrize("optimizer", ["Lion", "signSGD"])
def test_feedback_costs_signs_without_noise(optimizer):
    """On the quadratic, runs with feedback end farther away than without."""
    _, delayed, corrected = synchronous_delayed_and_corrected("quadratic", optimizer)
    assert ratio(corrected, delayed)[1] > 1


def test_tables_of_the_documentation_match_its_data():
    results = json.loads((DOCS / "delay.json").read_text(encoding="utf-8"))
    assert tables(results) in (DOCS / "delay.md").read_text(encoding="utf-8")
    for (problem, optimizer), lr in RATES.items():
        assert results[problem][optimizer]["lr"] == lr


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("problem", ["quadratic", slow("regression")])
def test_data_of_the_documentation_match_the_code(problem, optimizer):
    written = json.loads((DOCS / "delay.json").read_text(encoding="utf-8"))[problem][optimizer]["distances"]
    for delay in (0, 1):
        now = found(problem, optimizer, delay).log().mean()
        # Signs and iterations amplify rounding.
        assert abs(now - torch.tensor(written[key(delay, None)]).log().mean()) < 0.3
