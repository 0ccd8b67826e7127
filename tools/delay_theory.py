"""The cost of a delay for problems with a known solution, with and without error feedback.

    python tools/delay_theory.py            # three minutes on one core

For two convex problems of matrices [16, 8] with a known solution W*, and 16 seeds: the distance of the final
weights from W*, for delays of 0, 1, 2 and 4 updates, with and without error feedback. Learning rates are
selected on synchronous runs only, with other seeds, so that nothing is tuned for the delay; a second table
has rates selected for the delay. Prints both tables of docs/delay.md as Markdown, and writes docs/delay.json
(all values) and docs/delay.svg.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from titan_async.optim import DelayedGradients, ErrorFeedback, Lion, Muon

ROWS, COLS = 16, 8
CONDITION = 100.0  # of the quadratic problem
SAMPLES, NOISE = 32, 1.0  # per batch of the regression
STEPS = 300
SEEDS, CHOICE_SEEDS = 16, 8
DELAYS = (0, 1, 2, 4)
FEEDBACKS = (None, "update", "gradient")
RATES = tuple(2.0**-exponent for exponent in range(1, 13))

Gradient = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Problem:
    """One problem for several seeds at once: the seeds are the first dimension of every tensor."""

    solution: Tensor  # [seeds, rows, cols], float64
    loss: Callable[[Tensor, int], Tensor]  # of weights [seeds, rows, cols] in a batch, summed over seeds


def quadratic(seeds: int, first: int = 0) -> Problem:
    """tr((W - W*)' H (W - W*)) / 2, with eigenvalues of H logarithmically spaced from 1/CONDITION to 1."""
    solutions, curvatures = [], []
    values = torch.logspace(-math.log10(CONDITION), 0, ROWS, dtype=torch.float64)
    for seed in range(first, first + seeds):
        generator = torch.Generator().manual_seed(seed)
        solutions.append(torch.randn(ROWS, COLS, dtype=torch.float64, generator=generator))
        basis = torch.linalg.qr(torch.randn(ROWS, ROWS, dtype=torch.float64, generator=generator)).Q
        curvatures.append(basis @ torch.diag(values) @ basis.T)
    solution, curvature = torch.stack(solutions), torch.stack(curvatures)

    def loss(weights: Tensor, batch: int) -> Tensor:
        error = weights - solution
        return 0.5 * (error * (curvature @ error)).sum()

    return Problem(solution, loss)


def regression(seeds: int, first: int = 0) -> Problem:
    """Mean of |x'W - y|^2 / 2 over SAMPLES new x ~ N(0, I) per batch, with y = x'W* + NOISE N(0, I)."""
    solutions, generators = [], []
    for seed in range(first, first + seeds):
        generators.append(torch.Generator().manual_seed(seed))
        solutions.append(torch.randn(ROWS, COLS, dtype=torch.float64, generator=generators[-1]))
    solution = torch.stack(solutions)

    def loss(weights: Tensor, batch: int) -> Tensor:
        # The same samples for every optimizer and delay, so that differences between runs are paired.
        drawn = [g.manual_seed(1_000_003 * (first + i + 1) + batch) for i, g in enumerate(generators)]
        x = torch.stack([torch.randn(SAMPLES, ROWS, dtype=torch.float64, generator=g) for g in drawn])
        noise = torch.stack([torch.randn(SAMPLES, COLS, dtype=torch.float64, generator=g) for g in drawn])
        return 0.5 * (x @ (weights - solution) - NOISE * noise).square().sum() / SAMPLES

    return Problem(solution, loss)


PROBLEMS = {"quadratic": quadratic, "regression": regression}

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter], float], torch.optim.Optimizer]] = {
    "Muon": lambda params, lr: Muon(params, lr=lr, weight_decay=0.0, compute_dtype="float64"),
    "Lion": lambda params, lr: Lion(params, lr=lr),
    "signSGD": lambda params, lr: Lion(params, lr=lr, betas=(0.0, 0.0)),
    "AdamW": lambda params, lr: torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    "SGD, momentum 0.9": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
}


def schedule(step: int, steps: int) -> float:
    """That of arXiv 2606.30634: linear over the first tenth, then a cosine to a tenth of the peak."""
    warm_up = steps // 10
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / (steps - warm_up))


def distances(
    problem: Problem, optimizer: str, lr: float, delay: int, feedback: str | None, steps: int = STEPS
) -> Tensor:
    """|W - W*| / |W*| (Frobenius) after a run from W = 0, by seed; not finite if a run diverged."""
    weights = nn.ParameterList([torch.zeros_like(problem.solution)])
    built = OPTIMIZERS[optimizer](list(weights), lr)
    if feedback is not None:
        built = ErrorFeedback(built, level=feedback)
    delayed = DelayedGradients(weights, delay)
    rates = LambdaLR(built, lambda step: schedule(step, steps))
    for batch in range(steps):
        with delayed.batch():
            problem.loss(weights[0], batch).backward()
        built.step()
        built.zero_grad()
        rates.step()
    error = torch.linalg.matrix_norm(weights[0].detach() - problem.solution)
    return error / torch.linalg.matrix_norm(problem.solution)


def best_rate(problem: Problem, optimizer: str, delay: int = 0, feedback: str | None = None) -> float:
    """The learning rate of the grid with the smallest distance, averaged over seeds."""
    means = {lr: float(distances(problem, optimizer, lr, delay, feedback).mean()) for lr in RATES}
    return min((lr for lr in means if math.isfinite(means[lr])), key=means.__getitem__)


def ratio(one: Tensor, other: Tensor) -> tuple[float, float, float]:
    """Geometric mean of one / other over the seeds, paired, and its 95 % interval (Student's t)."""
    logs = (one / other).log()
    half = _T_95[len(logs)] * float(logs.std()) / math.sqrt(len(logs))
    mean = float(logs.mean())
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


_T_95 = {8: 2.365, 16: 2.131}  # two-sided, by the number of seeds


def cells() -> list[tuple[int, str | None]]:
    """Every delay with every kind of feedback; without a delay there is no feedback."""
    return [(0, None), *((delay, feedback) for delay in DELAYS[1:] for feedback in FEEDBACKS)]


def measure() -> dict[str, Any]:
    """Results by problem and optimizer: rate, distances by cell and seed, and distances with own rates."""
    results: dict[str, Any] = {}
    for problem_name, make in PROBLEMS.items():
        choice, problem = make(CHOICE_SEEDS, 1000), make(SEEDS)
        for optimizer in OPTIMIZERS:
            lr = best_rate(choice, optimizer)
            entry: dict[str, Any] = {"lr": lr, "distances": {}, "own_rate": {}}
            for delay, feedback in cells():
                found = distances(problem, optimizer, lr, delay, feedback)
                entry["distances"][key(delay, feedback)] = [float(f"{x:.4g}") for x in found.tolist()]
            for feedback in (None, "update"):
                own = best_rate(choice, optimizer, 1, feedback)
                found = distances(problem, optimizer, own, 1, feedback)
                entry["own_rate"][key(1, feedback)] = {"lr": own, "mean": float(f"{found.mean():.4g}")}
            results.setdefault(problem_name, {})[optimizer] = entry
            print(f"{problem_name}, {optimizer}: done", flush=True)
    return results


def key(delay: int, feedback: str | None) -> str:
    return f"{delay} {feedback or 'none'}"


def tables(results: dict[str, Any]) -> str:
    """Two Markdown tables: distances with the rates of synchronous runs, and with own rates."""
    lines = [
        "| problem | optimizer, rate | synchronous | delay | no feedback | update level | gradient level |",
        "|---|---|---|---|---|---|---|",
    ]
    for problem, optimizers in results.items():
        for optimizer, entry in optimizers.items():
            found = {cell: torch.tensor(values) for cell, values in entry["distances"].items()}
            base = found[key(0, None)]
            for delay in DELAYS[1:]:
                shown = [_shown(found[key(delay, feedback)], base) for feedback in FEEDBACKS]
                first = [problem, f"{optimizer}, {entry['lr']:.3g}", f"{base.mean():.2g}"]
                start = first if delay == 1 else [""] * 3
                lines.append("| " + " | ".join([*start, str(delay), *shown]) + " |")
    lines += [
        "",
        "| problem | optimizer | synchronous | delay 1 | delay 1, update level |",
        "|---|---|---|---|---|",
    ]
    for problem, optimizers in results.items():
        for optimizer, entry in optimizers.items():
            base = torch.tensor(entry["distances"][key(0, None)]).mean()
            own = [
                f"{entry['own_rate'][key(1, feedback)]['mean']:.2g} "
                f"({entry['own_rate'][key(1, feedback)]['lr']:.3g})"
                for feedback in (None, "update")
            ]
            lines.append(
                "| " + " | ".join([problem, optimizer, f"{base:.2g} ({entry['lr']:.3g})", *own]) + " |"
            )
    return "\n".join(lines)


def _shown(found: Tensor, base: Tensor) -> str:
    if not bool((found < 1).all()):
        return "diverged"
    mean, low, high = ratio(found, base)
    return f"{mean:.3g} [{low:.3g}, {high:.3g}]"


def plot(results: dict[str, Any], path: Path) -> None:
    """Plots distance against delay: a row of panels for each problem, a column for each optimizer."""
    import matplotlib

    matplotlib.use("Agg")
    # Reproducible files.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "delay", "font.size": 8}
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(results), len(OPTIMIZERS), figsize=(11, 4.6), sharex=True, sharey="row", layout="constrained"
    )
    for panel in panels.flat:
        panel.set_yscale("log")
    labels = {None: "no feedback", "update": "feedback, update", "gradient": "feedback, gradient"}
    for row, (problem, optimizers) in zip(panels, results.items(), strict=True):
        means = [
            math.exp(torch.tensor(values).log().mean())
            for entry in optimizers.values()
            for values in entry["distances"].values()
        ]
        # The initial distance is 1; diverged runs are outside of the panel.
        low, high = 0.7 * min(means), min(1.4 * max(means), 1.5)
        digits = (1,) if high / low > 100 else (1, 2, 5)
        ticks = [digit * 10.0**exponent for exponent in range(-6, 1) for digit in digits]
        row[0].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        row[0].set_ylim(low, high)
        for panel, (optimizer, entry) in zip(row, optimizers.items(), strict=True):
            for feedback, marker in zip(FEEDBACKS, "os^", strict=True):
                series = [entry["distances"][key(delay, feedback if delay else None)] for delay in DELAYS]
                mean = torch.tensor(series).log().mean(1).exp()
                panel.plot(DELAYS, mean, marker=marker, markersize=3, linewidth=1, label=labels[feedback])
            panel.set(title=f"{problem}\n{optimizer}", xticks=DELAYS)
            panel.grid(alpha=0.3)
            panel.minorticks_off()
        row[0].set_ylabel("|W - W*| / |W*| at the end")
    panels[0][0].legend(fontsize=6)
    for panel in panels[-1]:
        panel.set_xlabel("delay, updates")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    docs = Path(__file__).resolve().parents[1] / "docs"
    parser.add_argument("--out", type=Path, default=docs, help="folder of delay.json and delay.svg")
    parser.add_argument("--from-json", action="store_true", help="only print and plot delay.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "delay.json"
    if not arguments.from_json:
        lines = [
            f'"{problem}": {{\n'
            + ",\n".join(f'"{optimizer}": {json.dumps(entry)}' for optimizer, entry in optimizers.items())
            + "\n}"
            for problem, optimizers in measure().items()
        ]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    results = json.loads(path.read_text(encoding="utf-8"))
    plot(results, arguments.out / "delay.svg")
    print(tables(results))


if __name__ == "__main__":
    main()
