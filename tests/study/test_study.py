"""The study: training of a run, results and their selection, and the tables in docs/."""

import functools
import itertools
import json
import math
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path

import _training
import pytest
import report
import run as run_study
import torch
from _gaps import Losses, interval
from _long_tables import LONG_TABLES, RATES, long_run
from _model import MODELS, Decoder, Mixture, Shape, language_loss
from _optimizers import OPTIMIZERS, build_optimizers
from _remedies import (
    AdaptiveStrength,
    PaciGradients,
    Prediction,
    SmoothedFeedback,
    compensate_gradients_,
)
from _results import DEFAULT_PATH, Results, own_rate, own_rate_runs, resolved, tuned_rate
from _rotation import RotatedAdamW
from _runs import Run, grid_runs, load_questions, rates_of, run_key
from _text import Batches, splits
from _training import evaluate, learning_rate, stages_of, train
from torch import nn

from tests.support import forks
from tests.support.selection import slow
from titan_async.errors import UserError
from titan_async.optim import ErrorFeedback

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "tools" / "study"


@pytest.fixture(autouse=True)
def _short_evaluations(monkeypatch):
    monkeypatch.setattr(_training, "_EVALUATED_BYTES", 4096)


TINY = Run(model="tiny", lr=1e-2, steps=20, sequences=4)


def loop(run, delay, switch=0, end=None):
    """An independent computation of the recurrence: gradients are taken at the weights `delay` updates ago.

    Before the batch `switch` and from the batch `end` there is no delay and no feedback. At `end` the last
    proposed displacement, which feedback has applied twice, is subtracted once.
    """
    torch.manual_seed(run.seed)
    model = Decoder(MODELS[run.model])
    params = list(model.parameters())
    optimizers = build_optimizers(model, run.optimizer, run.lr)
    if run.feedback != "none":
        optimizers = [ErrorFeedback(optimizer, run.strength, run.feedback) for optimizer in optimizers]
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    versions = [[p.detach().clone() for p in params]]
    end = run.steps if end is None else end
    for step in range(run.steps):
        if step == end and run.feedback == "update":
            proposed = [new - old for old, new in zip(versions[switch], versions[switch + 1], strict=True)]
            for before, after in itertools.pairwise(versions[switch + 1 :]):
                proposed = [(new - old + d) / 2 for old, new, d in zip(before, after, proposed, strict=True)]
            for param, displacement in zip(params, proposed, strict=True):
                param.data.sub_(displacement)
            versions[-1] = [p.detach().clone() for p in params]
        old = versions[max(step - delay, switch) if switch <= step < end else step]
        shown = {name: w for (name, _), w in zip(model.named_parameters(), old, strict=True)}
        leaves = {name: w.clone().requires_grad_() for name, w in shown.items()}

        def at_old(x, leaves=leaves):
            return torch.func.functional_call(model, leaves, x)

        _, objective = language_loss(at_old, *Batches("training", run.sequences, 32, run.seed)(step))
        gradients = [
            gradient + run.curvature * gradient**2 * (newest - weight)
            for gradient, newest, weight in zip(
                torch.autograd.grad(objective, list(leaves.values())), versions[step], old, strict=True
            )
        ]
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient * min(1.0, 1.0 / (norm + 1e-6))
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * learning_rate(step, run.steps)
        for optimizer in optimizers:
            if run.feedback != "none":
                optimizer.feedback_paused = not switch <= step < end
            optimizer.step()
        versions.append([p.detach().clone() for p in params])
    return evaluate(model, "test", 32)


@pytest.mark.parametrize(
    ("optimizer", "delay"), [("adamw", 0), slow("adamw", 1), slow("muon", 1), ("muon", 2)]
)
def test_a_run_follows_the_recurrence(optimizer, delay):
    run = replace(TINY, optimizer=optimizer, delay=delay)
    assert train(run)["test"] == pytest.approx(loop(run, delay), abs=5e-5)
    assert abs(loop(run, delay) - loop(run, delay + 1)) > 1e-3


@pytest.mark.parametrize("feedback", [slow("none"), "update"])
def test_a_synchronous_start_ends_after_its_fraction_of_the_run(feedback):
    run = replace(TINY, optimizer="muon", lr=3e-2, delay=1, synchronous_start=0.5, feedback=feedback)
    expected = loop(run, 1, switch=10)
    assert train(run)["test"] == pytest.approx(expected, abs=5e-5)
    assert abs(loop(run, 1, switch=0) - expected) > 1e-3 and abs(loop(run, 1, switch=20) - expected) > 1e-3


@pytest.mark.parametrize("feedback", ["none", "update"])
def test_synchronous_end_has_no_delay_and_no_look_ahead(feedback):
    run = replace(TINY, optimizer="muon", lr=3e-2, delay=1, synchronous_end=0.5, feedback=feedback)
    expected = loop(run, 1, end=10)
    assert train(run)["test"] == pytest.approx(expected, abs=5e-5)
    assert abs(loop(run, 1, end=20) - expected) > 1e-3 and abs(loop(run, 1, end=11) - expected) > 1e-3


def test_rates_rise_over_a_tenth_and_fall_to_a_tenth():
    rates = [learning_rate(step, 100) for step in range(100)]
    assert rates[:11] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0])
    assert rates[10:] == sorted(rates[10:], reverse=True) and 0.1 < rates[-1] < 0.101
    assert [learning_rate(step, 100, 0.25) for step in (0, 23, 24, 25)] == pytest.approx(
        [0.04, 0.96, 1.0, 1.0]
    )


def test_warm_up_and_the_rate_of_adamw_next_to_muon_change_the_run():
    muon = replace(TINY, optimizer="muon", lr=3e-2)
    plain = train(muon)["test"]
    others = [train(replace(muon, **change))["test"] for change in ({"warm_up": 0.5}, {"rest_lr": 6e-3})]
    assert min(abs(other - plain) for other in others) > 1e-3


def test_compiled_runs_differ_only_in_rounding(monkeypatch):
    """With the full graph, but a backend that needs no C++ compiler."""
    run = replace(TINY, optimizer="muon", delay=1, feedback="update", steps=3)
    plain = train(run)["test"]
    monkeypatch.setattr(_training, "_loss_of_batch", language_loss)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    _training.compile_training()
    assert _training._loss_of_batch is not language_loss
    assert train(run)["test"] == pytest.approx(plain, abs=2e-5)


def test_the_error_of_a_missing_compiler_is_one_sentence(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert run_study.main(["q10", "--compile", "--results", str(tmp_path / "r.jsonl")]) == 2
    assert capsys.readouterr().err == (
        "There is no C++ compiler 'no-such-compiler': install it, or leave out --compile.\n"
    )


def test_the_time_constant_of_the_averaged_weights_is_a_fiftieth_of_the_run(monkeypatch):
    heads, evaluated = [], []
    step = _training._Loop.step

    def recorded(loop):
        step(loop)
        heads.append(loop.params[-1].detach().clone())

    def evaluate(model, split, length):
        evaluated.append(list(model.parameters())[-1].detach().clone())
        return 1.0

    monkeypatch.setattr(_training._Loop, "step", recorded)
    monkeypatch.setattr(_training, "evaluate", evaluate)
    train(replace(TINY, steps=150, sequences=1))
    # A time constant of 3 of the 150 updates.
    average = heads[0]
    for head in heads[1:]:
        average = 2 / 3 * average + 1 / 3 * head
    torch.testing.assert_close(evaluated[:2], [heads[-1]] * 2)
    torch.testing.assert_close(evaluated[2:], [average] * 2)


def test_curvature_extrapolates_a_gradient_to_the_newest_weights():
    param = nn.Parameter(torch.tensor([3.0, 5.0]))
    param.grad = torch.tensor([2.0, -1.0])
    compensate_gradients_([param], [torch.tensor([1.0, 6.0])], 0.5)
    assert param.grad.tolist() == [2.0 + 0.5 * 4.0 * 2.0, -1.0 + 0.5 * 1.0 * -1.0]


def test_curvature_acts_between_the_weights_read_and_the_newest():
    run = replace(TINY, delay=1, curvature=3000.0)
    expected = loop(run, 1)
    assert train(run)["test"] == pytest.approx(expected, abs=5e-5)
    assert abs(loop(replace(run, curvature=0.0), 1) - expected) > 1e-3


def test_rotated_adamw_is_adamw_in_the_basis_of_the_first_moment():
    """Gradients that share their singular vectors are diagonal there."""
    torch.manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))
    weight = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    rotated = nn.Parameter(left.T @ weight.detach() @ right)
    # With this eps, entries that are zero up to rounding have no update.
    options = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-4}
    optimizer, reference = RotatedAdamW([weight], **options), torch.optim.AdamW([rotated], **options)
    for step in range(25):
        diagonal = torch.zeros(3, 4, dtype=torch.float64)
        diagonal.diagonal().copy_(torch.tensor([8.0, 3.0, 1.0]) * (1 + 0.5 * math.sin(step)))
        weight.grad, rotated.grad = left @ diagonal @ right.T, diagonal
        optimizer.step()
        reference.step()
        torch.testing.assert_close(weight.detach(), left @ rotated.detach() @ right.T, atol=1e-9, rtol=0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_updates_every_parameter_once_and_trains_with_feedback(optimizer):
    torch.manual_seed(0)
    model = Decoder(MODELS["tiny"])
    built = build_optimizers(model, optimizer, 1e-3)
    taken = [param for each in built for group in each.param_groups for param in group["params"]]
    assert len(taken) == len(set(taken)) and set(taken) == set(model.parameters())
    assert math.isfinite(
        train(replace(TINY, optimizer=optimizer, delay=1, feedback="update", steps=4))["test"]
    )


def test_a_mixture_routes_each_byte_only_to_its_best_experts():
    shape = Shape(width=8, layers=1, heads=1, hidden=4, length=4, experts=4)
    torch.manual_seed(0)
    mixture = Mixture(shape)
    for param in mixture.parameters():
        nn.init.normal_(param)
    x = torch.randn(1, 3, 8)
    out, _ = mixture(x)
    for place in range(3):
        byte = x[0, place]
        scores = (mixture.router.weight @ byte).softmax(0)
        best = scores.topk(2)
        expected = sum(
            score
            / best.values.sum()
            * (mixture.down[e] @ (nn.functional.silu(mixture.gate[e] @ byte) * (mixture.up[e] @ byte)))
            for score, e in zip(best.values, best.indices, strict=True)
        )
        torch.testing.assert_close(out[0, place], expected)


def test_smoothed_feedback_without_smoothing_is_the_librarys():
    runs = [
        replace(TINY, optimizer="muon", delay=1, feedback="update", strength=0.5),
        replace(TINY, optimizer="muon", delay=1, feedback="smoothed", strength=0.5, smoothing=0.0),
        replace(TINY, optimizer="muon", delay=1, feedback="smoothed", strength=0.5, smoothing=0.5),
    ]
    library, same, other = (train(run)["test"] for run in runs)
    assert same == pytest.approx(library, abs=1e-4)
    assert abs(other - library) > 2e-4


def test_smoothed_feedback_follows_its_formula():
    weight = nn.Parameter(torch.tensor([0.0], dtype=torch.float64))
    feedback = SmoothedFeedback([weight], strength=2.0, smoothing=0.75)
    own, average = 0.0, None
    for displacement in (1.0, 3.0, -2.0, 0.5):
        feedback.before_step()
        with torch.no_grad():
            weight.add_(displacement)
        feedback.after_step()
        own += displacement
        average = displacement if average is None else 0.75 * average + 0.25 * displacement
        # Twice the sum of all changes of the average; the first displacement, 1, does not change it.
        assert weight.item() == pytest.approx(own + 2.0 * (average - 1.0))


def test_prediction_moves_by_the_displacement_known_at_the_start_of_the_batch():
    weight = nn.Parameter(torch.tensor([0.0]))
    prediction = Prediction([weight], horizon=2.0)
    displacements = [1.0, 10.0, 100.0]
    for displacement in displacements:
        with torch.no_grad():
            weight.add_(displacement)
        prediction.after_step()
    with torch.no_grad():
        weight.fill_(11.0)  # the weights of one update ago; the newest are 111
    prediction.move()
    assert weight.item() == 11.0 + 2.0 * 10.0


def test_feedback_and_prediction_take_gradients_at_the_same_weights():
    """Weights under feedback are those of prediction, moved ahead, except for the first displacement.

    Feedback leaves that one uncorrected. With plain gradient descent, because weight decay would act on
    different weights.
    """

    def gradient(w):
        return w**3 + 0.5 * w

    rate, steps = 0.1, 30
    fed = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = ErrorFeedback(torch.optim.SGD([fed], lr=rate))
    seen = deque([fed.detach().clone()] * 2, maxlen=2)
    places_fed = []
    for _ in range(steps):
        places_fed.append(float(seen[0]))
        fed.grad = gradient(seen[0])
        optimizer.step()
        seen.append(fed.detach().clone())

    y = [1.0]
    displacements, places = [], []
    for step in range(steps):
        at = y[max(step - 1, 0)] + (displacements[step - 2] - displacements[0] if step > 1 else 0.0)
        places.append(at)
        displacements.append(-rate * float(gradient(torch.tensor(at, dtype=torch.float64))))
        y.append(y[-1] + displacements[-1])
    assert places_fed == pytest.approx(places, abs=1e-12)
    # The "settled" weights of the study.
    settled = fed.detach() - optimizer.state[fed]["error_feedback_update"]
    assert float(settled) == pytest.approx(y[-1] - displacements[0], abs=1e-12)


def test_adaptive_strength_is_the_cosine_of_successive_updates():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = ErrorFeedback(torch.optim.SGD([weight], lr=1.0))
    adaptive = AdaptiveStrength([optimizer], "update")
    expected = [1.0, 0.6, 0.0]
    for gradient, strength in zip([[1.0, 0.0], [3.0, 4.0], [-3.0, -4.0]], expected, strict=True):
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        adaptive.after_step()
        assert adaptive.values[-1] == optimizer.strength == pytest.approx(strength, abs=1e-6)


class TwoStages(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))), x.new_zeros(())


def test_paci_uses_old_weights_in_the_forward_and_new_ones_in_the_backward():
    torch.manual_seed(0)
    model = TwoStages().double()
    stages = [list(model.first.parameters()), list(model.second.parameters())]
    paci = PaciGradients(model, stages)
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    target = torch.randint(3, (4, 2))
    paci.backward(x, target)
    model.zero_grad()
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param))
    new = {name: p.detach().clone() for name, p in model.named_parameters()}
    paci.backward(x, target)

    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for index in range(2):
        part, wanted = x[2 * index : 2 * index + 2].flatten(0, 1), target[2 * index : 2 * index + 2].flatten()
        # Stage 0 of 2 is one microbatch ahead: the first forward of a batch precedes its update.
        first = old["first.weight"] if index == 0 else new["first.weight"]
        hidden = torch.tanh(part @ first.T)
        second = new["second.weight"]
        error = (torch.softmax(hidden @ second.T, -1) - nn.functional.one_hot(wanted, 3)) / len(wanted)
        expected["second.weight"] += error.T @ hidden / 2
        # The activations are those of the forward.
        expected["first.weight"] += ((error @ second) * (1 - hidden**2)).T @ part / 2
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad, expected[name])


def test_paci_propagates_gradients_through_new_weights():
    """With three stages the weights of the middle one differ between forward and backward."""
    torch.manual_seed(1)

    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))

        def forward(self, x):
            for part in self.parts:
                x = part(x)
            return x, x.new_zeros(())

    model = Three().double()
    paci = PaciGradients(model, [list(part.parameters()) for part in model.parts])
    x, target = torch.randn(3, 1, 3, dtype=torch.float64), torch.randint(3, (3, 1))
    paci.backward(x, target)
    model.zero_grad()
    old = [part.weight.detach().clone() for part in model.parts]
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param))
    new = [part.weight.detach().clone() for part in model.parts]
    paci.backward(x, target)
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for index in range(3):
        stale = [index < 2 - stage for stage in range(3)]
        seen = [o if late else n for o, n, late in zip(old, new, stale, strict=True)]
        logits = x[index] @ seen[0].T @ seen[1].T @ seen[2].T
        error = torch.softmax(logits, -1) - nn.functional.one_hot(target[index], 3)
        expected += (error @ new[2] @ new[1]).T @ x[index] / 3
    torch.testing.assert_close(model.parts[0].weight.grad, expected)
    assert all(torch.equal(part.weight, weight) for part, weight in zip(model.parts, new, strict=True))


def test_stages_are_in_order_and_complete():
    model = Decoder(MODELS["tiny"])
    names = {param: name for name, param in model.named_parameters()}
    for count in (1, 2, 4, 8, 16):
        stages = stages_of(model, count)
        assert sorted(names[p] for stage in stages for p in stage) == sorted(names.values())
        assert "embedding.weight" in {names[p] for p in stages[0]}
        assert "head.weight" in {names[p] for p in stages[-1]}
        layers = [int(names[p].split(".")[1]) for stage in stages for p in stage if "layers" in names[p]]
        assert layers == sorted(layers)
    with pytest.raises(ValueError, match="at most 16 stages"):
        stages_of(model, 17)


def test_splits_share_no_scene_and_batches_are_of_their_split():
    parts = splits()
    total = sum(len(part) for part in parts.values())
    assert 0.88 < len(parts["training"]) / total < 0.92
    text = bytes(parts["training"].tolist())
    for held_out in ("validation", "test"):
        sample = bytes(parts[held_out][5000:5200].tolist())
        assert sample not in text
        inputs, targets = Batches(held_out, 3, 50, seed=1)(7)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert bytes(inputs[0].tolist()) in bytes(parts[held_out].tolist())
    assert not torch.equal(Batches("test", 3, 50, 1)(7)[0], Batches("test", 3, 50, 2)(7)[0])


def result(validation, test, diverged=False):
    return {"validation": validation, "test": test, "diverged": diverged}


def tuned(results, *rows):
    """Fills a grid of two rates with (rate, seed, validation, test, diverged)."""
    for rate, seed, *losses in rows:
        results.add(replace(TINY, lr=rate, seed=seed), result(*losses))
    return tuned_rate(replace(TINY, lr="tuned"), results)


def test_the_rate_is_chosen_by_validation_loss_of_complete_synchronous_grids(tmp_path):
    low, high = rates_of("tiny", "adamw")
    # The test split, a single seed and a delayed run would each select the other rate.
    rows = [
        (low, 0, 2.0, 9.0),
        (high, 0, 2.2, 1.0),
        (low, 1, 2.0, 9.0),
        (high, 1, 1.9, 1.0),
        (high, 2, 0.5, 1.0),
    ]
    results = Results(tmp_path / "results.jsonl")
    results.add(replace(TINY, lr=high, delay=1), result(0.1, 0.1))
    assert tuned(results, *rows) == low
    diverged = Results(tmp_path / "diverged.jsonl")
    assert tuned(diverged, (low, 0, 1.0, 1.0, True), (high, 0, 3.0, 3.0)) == high
    with pytest.raises(UserError, match="have not been compared"):
        tuned(Results(tmp_path / "none.jsonl"), (low, 0, 1.0, 1.0))


def test_the_search_of_a_runs_own_rate_ends_when_the_best_is_inside(tmp_path):
    """Losses of delayed runs, with a minimum at a quarter of the grid's lowest rate."""
    results = Results(tmp_path / "results.jsonl")
    delayed = replace(TINY, lr="own", delay=1, seed=3)
    low, high = rates_of("tiny", "adamw")
    tried = []
    while missing := own_rate_runs([delayed, replace(delayed, seed=0), replace(TINY, lr=low)], results):
        with pytest.raises(UserError, match="have not been compared"):
            own_rate(delayed, results)
        for run in missing:
            assert replace(run, lr="own") == replace(delayed, seed=0)
            tried.append(run.lr)
            results.add(run, result(abs(math.log(run.lr / (low / 4))), 0.0))
    assert tried == pytest.approx([low, high, low / 2, low / 4, low / 8])
    assert own_rate(delayed, results) == low / 4
    assert resolved([delayed], results) == [replace(delayed, lr=low / 4)]


def test_a_gap_is_paired_by_seed_and_a_diverged_run_has_none(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    for seed, (base, delayed) in enumerate([(1.0, 1.1), (5.0, 5.2), (3.0, 3.3)]):
        results.add(replace(TINY, seed=seed), result(0.0, base))
        results.add(replace(TINY, seed=seed, delay=1), result(0.0, delayed))
    found = Losses(results).gap(replace(TINY, delay=1))
    # Student's t with two degrees of freedom: 4.303 times the standard deviation 0.1 over the root of three.
    assert found.mean == pytest.approx(0.2) and found.half == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert Losses(results).shown_gap(replace(TINY, delay=1)) == "+0.200 ± 0.248"
    results.add(replace(TINY, seed=2, delay=2), result(0.0, 9.0, True))
    assert Losses(results).shown_gap(replace(TINY, delay=2)) == "1 of 1 diverged"
    assert math.isnan(interval([1.0]).half)


def test_long_tables_report_the_number_of_seeds_and_leave_out_missing_runs(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    empty = {name: table(Losses(results)) for name, table in LONG_TABLES.items()}
    assert empty["length"] == "Not run yet." and "±" not in "".join(empty.values())
    for seed in range(5):
        results.add(long_run("muon", seed=seed), result(0.0, 1.0) | {"averaged_test": 0.9})
        if seed < 2:
            results.add(long_run("muon", delay=1, seed=seed), result(0.0, 1.25 + seed / 2))
    made = {name: table(Losses(results)) for name, table in LONG_TABLES.items()}
    assert made["length"].splitlines()[2:] == [
        "| Muon | synchronous, loss | - | - | 1.000 ± 0.000 | - |",
        "| Muon | delayed, gap | - | - | +0.500 ± 3.176 (2 seeds) | - |",
    ]
    assert "| Muon | synchronous | - | -0.100 ± 0.000 | - |" in made["averaged"]
    assert "| Muon | 3000 | synchronous, delay | +0.500 ± 3.176 (2 seeds) | - | - | - | - |" in made["start"]
    assert "| nothing | - | +0.500 ± 3.176 (2 seeds) |" in made["remedies"]
    assert "| q10_length | 7 | 162 |" in made["progress"]


def test_the_rates_of_long_runs_are_the_tuned_ones():
    results = Results(DEFAULT_PATH)
    assert {name: tuned_rate(Run(optimizer=name), results) for name in RATES} == RATES
    for question in load_questions(["q10", "q12"]):
        assert {(run.optimizer, run.lr) for run in question.runs} <= set(RATES.items()), question.name


def test_a_question_file_expands_to_runs(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        'title = "Mine"\n[defaults]\nmodel = "tiny"\n[[runs]]\ndelay = [0, 1]\nlr = "grid"\nseed = [0, 1]\n'
        '[[runs]]\noptimizer = "muon"\nmomentum = [0.9, 0.95]\n'
    )
    (question,) = load_questions([str(file)])
    assert len(question.runs) == 2 * 2 * len(rates_of("tiny", "adamw")) + 2
    # An explicit default momentum is the same run.
    assert {run.momentum for run in question.runs if run.optimizer == "muon"} == {0.9, None}
    assert {run.lr for run in grid_runs(question.runs)} == set(rates_of("tiny", "muon"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[[runs]]\ndelays = 1", "a run has no 'delays'; it has curvature, delay,"),
        ('[[runs]]\noptimizer = "adam"', "There is no optimizer 'adam': choose from adamw"),
        ("[[runs", "cannot be read as TOML"),
        (
            '[[runs]]\noptimizer = "sgd"\nmodel = "tiny"\nlr = "grid"',
            "no learning rates for sgd on the model",
        ),
        ('[[runs]]\nmodel = "huge"', "There is no model 'huge': choose from dense"),
    ],
)
def test_the_error_of_an_invalid_question_file_is_one_sentence(tmp_path, capsys, text, sentence):
    (tmp_path / "wrong.toml").write_text(text)
    assert run_study.main([str(tmp_path / "wrong.toml"), "--results", str(tmp_path / "r.jsonl")]) == 2
    said = capsys.readouterr().err
    assert sentence in said and len(said.strip().splitlines()) == 1


@pytest.mark.slow
def test_the_study_runs_resumes_and_reports(tmp_path):
    """The real command, on a question of one minute."""
    file, path = tmp_path / "short.toml", tmp_path / "results.jsonl"
    file.write_text(
        'title = "Short"\n[defaults]\nmodel = "tiny"\nsteps = 10\nsequences = 2\nseed = [0, 1]\n'
        '[[runs]]\noptimizer = ["adamw", "muon"]\ndelay = [0, 1]\n'
    )
    command = [sys.executable, STUDY / "run.py", file, "--results", path, "--workers", "2"]

    def run():
        done = forks.run(command, timeout=200)
        assert done.returncode == 0, done.stderr
        return path.read_text().splitlines(keepends=True)

    lines = run()
    # Two rates for each optimizer and seed, and delayed runs at the better one.
    assert len(lines) == 2 * 2 * 2 + 4
    rows = [json.loads(line) for line in lines]
    assert all(row["versions"]["torch"] == torch.__version__.split("+")[0] for row in rows)
    assert all(row["seconds"] > 0 and len(row["curve"]) == 10 for row in rows)
    assert sum(row["run"]["delay"] == 1 for row in rows) == 4
    # Killed during a write: only that line is lost.
    path.write_text("".join(lines[:-1]) + lines[-1][:50])
    again = run()
    assert again[:-1] == lines[:-1]
    first, second = json.loads(lines[-1]), json.loads(again[-1])
    assert second["run"] == first["run"] and second["test"] == first["test"]
    assert run() == again


def test_the_error_of_an_invalid_results_file_names_the_line(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"loss": 1}\n')
    with pytest.raises(UserError, match="line 1 is not a result of the study"):
        Results(path)


def test_questions_have_three_seeds_and_share_runs():
    questions = load_questions([])
    assert [question.name.split("_")[0] for question in questions] == [
        "q1", "q2", "q3", "q4", "q5", "q6", "q7", "q9", "q10", "q11", "q12", "q13", "q14"
    ]  # fmt: skip
    for question in questions:
        for run in question.runs:
            assert {replace(run, seed=seed) for seed in range(3)} <= set(question.runs), question.name
    runs = [run for question in questions for run in question.runs]
    assert len({run_key(run) for run in runs}) == len(set(runs)) < len(runs)


def test_runs_of_a_question_are_ordered_by_length_and_seed():
    (question,) = load_questions(["q10"])
    places = [(run.steps, run.seed) for run in question.runs]
    assert places == sorted(places)
    assert len({(run.optimizer, run.delay, run.feedback) for run in question.runs[:9]}) == 9


def test_the_committed_results_answer_every_question():
    """Questions with 300 updates. Longer runs take nights, and the document counts those that exist."""
    results = Results(DEFAULT_PATH)
    for question in load_questions(["q1", "q2", "q3", "q4", "q5", "q6", "q7", "q9"]):
        missing = [run for run in resolved(question.runs, results) if results.get(run) is None]
        assert not missing, f"{question.name} lacks {missing[:3]}"


def test_the_document_shows_the_committed_results():
    document = "".join((report.DOCS / page).read_text(encoding="utf-8") for page in report.PAGES)
    made = report.tables(Results(DEFAULT_PATH), Run())
    assert report.filled(document, made) == document, "run tools/study/report.py"
    for name in made:
        assert f"<!-- table {name} -->" in document, name
    for picture in report.PLOTS:
        assert f"study/{picture}.svg" in document and (report.DOCS / "study" / f"{picture}.svg").is_file()


def test_all_rows_of_a_table_have_equal_numbers_of_cells():
    for name, table in report.tables(Results(DEFAULT_PATH), Run()).items():
        widths = {line.count("|") for line in table.splitlines()}
        assert len(widths) == 1 and len(table.splitlines()) > 2, name


def test_the_error_of_an_unknown_table_names_it():
    with pytest.raises(UserError, match="no table 'nonsense'"):
        report.filled("<!-- table nonsense -->\n<!-- end -->", {"optimizers": ""})
