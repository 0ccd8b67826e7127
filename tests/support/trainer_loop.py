"""The whole AsyncTrainer, and a plain loop in one process to compare it with.

The loop implements the recurrence, and the formulas of error feedback and load balancing, with torch only.
From the project it uses the data, and the model that torchtitan builds from a recipe of
`tests.support.recipes`.
"""

import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.support.muon_rule import muon_displacement
from tests.support.processes import Pools

Values = dict[str, Tensor]
"""Weights and routers' biases by name."""


@dataclass
class Trained:
    """Results of a rank: values before and after, and one entry for each log line or each update."""

    before: Values
    after: Values = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    counts: list[Values] = field(default_factory=list)
    """Tokens of each expert before an update."""
    state: Values = field(default_factory=dict)
    """State of the optimizers and of the schedule."""
    extra: dict[str, Any] = field(default_factory=dict)


class Trainers:
    """Runs with any number of ranks, each in a pool of this size."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    def __call__(self, ranks: int, argv: list[str], *args: Any) -> list[Trained]:
        return self._pools(ranks).run(ranks, train, argv, *args, timeout=500)


def arguments(folder: Path, recipe: str, *flags: object) -> list[str]:
    """Arguments of `resolve` for a recipe of `tests.support.recipes`; files of the run are in `folder`."""
    file = folder / f"{recipe}.toml"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'recipe = "{recipe}"\n')
    return [str(file), "--module", "tests.support.recipes", "--dump_folder", str(folder), *map(str, flags)]


def become_worker(rank: int, group: Any) -> None:
    """Prepares this process of a pool for torchtitan as a rank of a run, even after an earlier run."""
    from titan_async.config.device import ensure_device

    ensure_device()
    os.environ.update(LOCAL_RANK=str(rank), LOG_RANK=",".join(map(str, range(group.size()))))
    _clear_sharding_prop_cache()  # it may contain meshes of an earlier trainer


def train(
    rank: int, group: Any, argv: Sequence[str], prepare: Callable[[Any, Trained], None] | None = None
) -> Trained:
    """Trains one rank's part; `prepare` is called with the trainer before it starts."""
    become_worker(rank, group)
    from titan_async.config.recipe_file import resolve

    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does when it starts torch.distributed
    trainer = resolve(argv).build()
    bfloat16 = torch.Tensor.bfloat16
    try:
        trained = Trained(whole_values(trainer.model_parts))
        _watch(trainer, trained)
        if prepare is not None:
            prepare(trainer, trained)
        trainer.train()
        trained.after = whole_values(trainer.model_parts)
        state = trainer.optimizers.state_dict() | trainer.state_dict().get("next_weights", {})
        trained.state = {name: whole(v) for name, v in state.items() if isinstance(v, Tensor)}
    finally:
        torch.Tensor.bfloat16 = bfloat16  # `prepare` may have replaced it
        trainer.close()
    return trained


def _watch(trainer: Any, trained: Trained) -> None:
    def report(figures: Any) -> None:
        trained.losses.append(figures.loss)
        trained.norms.append(figures.grad_norm)

    def count(*_: Any) -> None:
        trained.counts.append(
            {
                plain_name(name): whole(buffer)
                for part in trainer.model_parts
                for name, buffer in part.named_buffers()
                if name.endswith("tokens_per_expert_E")
            }
        )

    trainer.reporter.step = report
    # Before the hook of torchtitan that resets the counts.
    trainer.optimizers.register_step_pre_hook(count)
    trainer.optimizers._optimizer_step_pre_hooks.move_to_end(
        next(reversed(trainer.optimizers._optimizer_step_pre_hooks)), last=False
    )


def whole(tensor: Tensor) -> Tensor:
    """A copy of a tensor, gathered from its shards."""
    full = getattr(tensor, "full_tensor", None)
    return (tensor if full is None else full()).detach().clone()


def whole_values(parts: Sequence[nn.Module]) -> Values:
    """All values that training changes, by the names in the unwrapped model."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a validation leaves the head unsharded
    return {
        plain_name(name): whole(value)
        for part in parts
        for name, value in chain(part.named_parameters(), part.named_buffers())
        if isinstance(value, nn.Parameter) or name.endswith("expert_bias_E")
    }


def plain_name(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def merged(values: Sequence[Values]) -> Values:
    """The values of all stages."""
    return {name: value for each in values for name, value in each.items()}


@dataclass
class Looped:
    """Results of the plain loop, with one entry per batch."""

    after: Values
    losses: list[float]
    norms: list[float]
    counts: list[Values]
    """Tokens of each expert."""
    valid_tokens: list[list[int]]
    """By data-parallel rank."""


def loop(
    argv: Sequence[str],
    before: Values,
    *,
    delay: int = 1,
    strength: float = 1.0,
    shares: int = 1,
    skipped: Collection[int] = (),
    synchronous: int = 0,
) -> Looped:
    """Computes the recurrence for one whole model, with SGD with momentum (or Muon) and error feedback.

    Args:
        argv: as for the trainer.
        before: initial values.
        delay: updates between the values that a batch reads and those that it changes.
        strength: of error feedback.
        shares: number of data-parallel ranks, each with its own data.
        skipped: batches without an update, because their gradient is not finite.
        synchronous: number of batches at the start without delay and feedback.
    """
    from tests.support.recipes import BALANCE, LR, MAX_NORM, MOMENTUM, MUON, STEPS, fused_split

    config, model = build(argv)
    _set(model, before)
    loaders = _loaders(config, shares)
    microbatches = _microbatches(config, shares)
    parameters = dict(model.named_parameters())
    biases = {name: value for name, value in model.named_buffers() if name.endswith("expert_bias_E")}
    newest = {name: value.detach().clone() for name, value in {**parameters, **biases}.items()}
    history = [newest]
    by_muon = _names_of_muon(config, parameters)
    momentum = {
        name: torch.zeros_like(value, dtype=torch.float64 if name in by_muon else None)
        for name, value in parameters.items()
    }
    last: Values | None = None
    done = Looped({}, [], [], [], [])
    for b in range(STEPS):
        batch = [[next(loader) for _ in range(microbatches)] for loader in loaders]
        _set(model, history[b if b < synchronous else max(b - delay, synchronous)])
        done.losses.append(_gradient(model, batch))
        done.counts.append(
            {n: v.clone() for n, v in model.named_buffers() if n.endswith("tokens_per_expert_E")}
        )
        done.valid_tokens.append([_valid(share) for share in batch])
        norm = torch.stack([p.grad.norm().double() for p in parameters.values()]).norm()
        done.norms.append(float(norm))
        if b in skipped:
            history.append(newest)
            continue
        scale = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
        moved = {}
        for name, parameter in parameters.items():
            if name in by_muon:
                moved[name] = muon_displacement(
                    newest[name],
                    parameter.grad * scale,
                    momentum[name],
                    lr=MUON["lr"] * factor(b),
                    decay=MUON["weight_decay"],
                    coefficient=MUON["momentum"],
                    split_sizes=fused_split(name),
                )
                continue
            momentum[name] = MOMENTUM * momentum[name] + parameter.grad * scale
            moved[name] = -LR * factor(b) * momentum[name]
        corrected = {
            name: move if last is None else move + strength * (move - last[name])
            for name, move in moved.items()
        }
        last = moved if b >= synchronous else None
        for name in biases:
            counts = done.counts[-1][name.replace("expert_bias", "tokens_per_expert")]
            lift = BALANCE * torch.sign(counts.mean() - counts)
            corrected[name] = lift - lift.mean()
        newest = {name: value + corrected[name] for name, value in newest.items()}
        history.append(newest)
    done.after = newest
    return done


def _names_of_muon(config: Any, names: Collection[str]) -> set[str]:
    """The parameters that the recipe's groups assign to Muon; all others have SGD."""
    found = set()
    for name in names:
        group = next((g for g in config.optimizer.param_groups if re.search(g.pattern, name)), None)
        if group is not None and group.optimizer_name == "Muon":
            found.add(name)
    return found


def build(argv: Sequence[str]) -> tuple[Any, nn.Module]:
    """The configuration, and the whole model as one module."""
    from torchtitan.config.override import apply_overrides

    from titan_async.config.recipe_file import resolve
    from titan_async.training.prepare import adapt_to_cpu

    config = adapt_to_cpu(resolve(argv))
    config.parallelism.pipeline_parallel_degree = 1  # with more, torchtitan refuses a tied model
    config.model_spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    model = config.model_spec.model.build()
    with torch.no_grad():
        model.init_states()
    return config, model


def _loaders(config: Any, shares: int) -> list[Any]:
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    tokenizer = HuggingFaceTokenizer.Config().build(tokenizer_path=config.hf_assets_path)
    return [
        iter(
            config.dataloader.build(
                dp_world_size=shares,
                dp_rank=share,
                tokenizer=tokenizer,
                seq_len=config.training.seq_len,
                local_batch_size=1,
            )
        )
        for share in range(shares)
    ]


def _microbatches(config: Any, shares: int) -> int:
    """Microbatches of one sequence in each share of a batch."""
    whole_batch = config.training.global_batch_size
    return config.training.local_batch_size if whole_batch < 0 else whole_batch // shares


def _valid(share: list[Any]) -> int:
    from torchtitan.components.loss import IGNORE_INDEX

    return sum(int((labels != IGNORE_INDEX).sum()) for _, labels in share)


def _set(model: nn.Module, values: Values) -> None:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, value in values.items():
            named[name].copy_(value)
        for name, buffer in model.named_buffers():
            if name.endswith("tokens_per_expert_E"):
                buffer.zero_()


def _gradient(model: nn.Module, batch: list[list[Any]]) -> float:
    """Returns the batch's loss, the mean over all valid labels; its gradient is in `.grad`."""
    valid = sum(map(_valid, batch))
    model.zero_grad()
    loss = 0.0
    for x, y in (microbatch for share in batch for microbatch in share):
        masks = model.get_attention_masks(positions=x["positions"])
        logits = model(x["input"], positions=x["positions"], attention_masks=masks)
        part = nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="sum")
        (part / valid).backward()
        loss += float(part.detach()) / valid
    return loss


def factor(step: int) -> float:
    """Linear warm-up over 3 steps, then cosine to 10 % at step 6."""
    if step < 3:
        return (step + 1) / 3
    # torchtitan keeps the peak for one more step, and ends the decay at the last step.
    progress = (step + 1 - 4) / 3
    return 0.1 + 0.9 * 0.5 * (1 + cos(pi * progress)) if step >= 4 else 1.0


def distance(one: Values, other: Values) -> float:
    """The largest difference between two values of the same name."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return max(float((value.double() - other[name].double()).abs().max()) for name, value in one.items())
