"""The warm-up is a share of the steps, unless a number of steps is given."""

from pathlib import Path

import pytest
import torch

from titan_async.config.recipe_file import resolve, resolve_recipe
from titan_async.training.optimizer.config import AsyncLRSchedulers


def factors(config: AsyncLRSchedulers.Config, steps: int) -> list[float]:
    """The factor of the learning rate in each step."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = config.build(optimizers=[optimizer], training_steps=steps)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("steps", "fields", "warmup"),
    [
        (300, {}, 30),
        (7, {}, 0),
        (100, {"warmup_ratio": 0.29}, 29),  # of which floats make 28.999999999999996
        (100, {"warmup_ratio": 0.0}, 0),
        (100, {"warmup_ratio": 1.0}, 100),
        (100, {"warmup_steps": 5}, 5),
        (100, {"warmup_steps": 0}, 0),
        (100, {"warmup_steps": 5, "warmup_ratio": 0.5}, 5),
        (100, {"total_steps": 400}, 40),
    ],
)
def test_the_rate_rises_over_the_warm_up(steps: int, fields: dict[str, float], warmup: int) -> None:
    config = AsyncLRSchedulers.Config(**fields)
    assert config.resolved_warmup_steps(steps) == warmup
    found = factors(config, steps)
    assert found[:warmup] == pytest.approx([(step + 1) / warmup for step in range(warmup)])
    assert warmup == steps or found[warmup] == 1.0  # torchtitan's schedule stays there for a step


def test_a_recipe_follows_the_steps(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('include = "debug_cpu.toml"\n[training]\nsteps = 1000\n')
    config = resolve([str(file)])
    assert config.lr_scheduler.resolved_warmup_steps(config.training.steps) == 100
    assert factors(config.lr_scheduler, 1000).index(1.0) == 99
    again = tmp_path / "again.toml"
    again.write_text(resolve_recipe([str(file)]).to_toml())
    config = resolve([str(again), "--training.steps", "200"])
    assert config.lr_scheduler.resolved_warmup_steps(config.training.steps) == 20


def test_a_number_of_steps_overrides_the_ratio(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('include = "debug_cpu.toml"\n[lr_scheduler]\nwarmup_steps = 7\n')
    for flags, warmup in [((), 7), (("--lr_scheduler.warmup_steps", "8"), 8)]:
        config = resolve([str(file), "--training.steps", "1000", *flags])
        assert factors(config.lr_scheduler, 1000).index(1.0) == warmup - 1
        again = tmp_path / "again.toml"
        again.write_text(resolve_recipe([str(file), *flags]).to_toml())
        config = resolve([str(again), "--training.steps", "50"])
        assert config.lr_scheduler.resolved_warmup_steps(50) == warmup
    config = resolve([str(file), "--lr_scheduler.warmup_steps", "none"])
    assert config.lr_scheduler.resolved_warmup_steps(1000) == 100
