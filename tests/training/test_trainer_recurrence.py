"""AsyncTrainer, whole, against a plain loop on one process over the same batches.

The loop knows only the recurrence, error feedback's formula, and torch: it checks that the trainer clips
by the whole model's norm, moves the learning rate, normalizes the loss, drains for validation and
checkpoints without changing the trajectory, and applies the last gradient.
"""

import dataclasses
import os

import pytest
import torch

from tests.support.processes import WorkerPool

STEPS = 6
LR = 0.5


def make_config(folder, schedule, strength, stages=2):
    from titan_async.training import cpu

    cpu.ensure_device()
    from titan_async.recipes.debug import debug

    from titan_async.training.optimizer import ErrorFeedbackConfig, SGDConfig

    config = debug()
    return dataclasses.replace(
        config,
        dump_folder=str(folder),
        training=dataclasses.replace(
            config.training, steps=STEPS, seq_len=32, local_batch_size=4, max_norm=0.25
        ),
        parallelism=dataclasses.replace(
            config.parallelism,
            pipeline_parallel_degree=stages,
            pipeline_parallel_schedule=schedule,
            pipeline_parallel_microbatch_size=1,
        ),
        lr_scheduler=dataclasses.replace(config.lr_scheduler, warmup_steps=3),
        optimizer=dataclasses.replace(
            config.optimizer,
            name="sgd",
            sgd=SGDConfig(lr=LR, momentum=0.9),
            implementation="foreach",
            error_feedback=ErrorFeedbackConfig(strength=strength),
        ),
        validator=dataclasses.replace(config.validator, freq=3, steps=1),
        checkpoint=dataclasses.replace(config.checkpoint, interval=2),
    )


def train(rank, group, folder, schedule, strength):
    """The stage's weights before and after training, and the losses that rank 0 would print."""
    os.environ.update(LOCAL_RANK=str(rank), LOG_RANK="0,1")
    config = make_config(folder, schedule, strength)
    config.metrics.log_freq = 1
    trainer = config.build()
    reported = []
    trainer.reporter.step = lambda report: reported.append((report.loss, report.grad_norm))
    (part,) = trainer.model_parts

    def weights():
        # A copy: a schedule may change where the parameters live.
        state = part.state_dict()
        return {
            name: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone()
            for name, v in state.items()
        }

    before = weights()
    try:
        trainer.train()
    finally:
        trainer.close()
    return before, weights(), reported


def loop(folder, before, delay, strength):
    """The same by hand: one whole model, SGD with momentum and error feedback written out."""
    from torchtitan.components.loss import IGNORE_INDEX
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.config.override import apply_overrides

    from titan_async.training import cpu

    config = cpu.adapt_config(make_config(folder, "Async2BW", strength))
    config.model_spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    model = config.model_spec.model.build()
    with torch.no_grad():
        model.init_states()
    model.load_state_dict(before)
    tokenizer = HuggingFaceTokenizer.Config().build(tokenizer_path=config.hf_assets_path)
    loader = config.dataloader.build(
        dp_world_size=1, dp_rank=0, tokenizer=tokenizer, seq_len=32, local_batch_size=1
    )
    batches = iter(loader)
    parameters = list(model.parameters())
    newest = [p.detach().clone() for p in parameters]
    history = [newest]
    momentum, last = [torch.zeros_like(w) for w in newest], None
    losses, norms = [], []
    for b in range(STEPS):
        microbatches = [next(batches) for _ in range(4)]
        valid = sum(int((y != IGNORE_INDEX).sum()) for _, y in microbatches)
        with torch.no_grad():
            for p, w in zip(parameters, history[max(b - delay, 0)], strict=True):
                p.copy_(w)
        model.zero_grad()
        loss = 0.0
        for x, y in microbatches:
            masks = model.get_attention_masks(positions=x["positions"])
            logits = model(x["input"], positions=x["positions"], attention_masks=masks)
            part = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), y.flatten(), reduction="sum"
            )
            (part / valid).backward()
            loss += float(part.detach()) / valid
        losses.append(loss)
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in parameters]))
        norms.append(float(norm))
        scale = min(1.0, 0.25 / (float(norm) + 1e-6))
        lr = LR * factor(b)
        moved = []
        for m, p in zip(momentum, parameters, strict=True):
            m.mul_(0.9).add_(p.grad * scale)
            moved.append(-lr * m)
        corrected = (
            moved if last is None else [d + strength * (d - e) for d, e in zip(moved, last, strict=True)]
        )
        last = moved
        newest = [w + d for w, d in zip(newest, corrected, strict=True)]
        history.append(newest)
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, newest, strict=True)), losses, norms


def factor(step):
    """Linear warm-up over 3 steps, then cosine to 10 % at step 6."""
    if step < 3:
        return (step + 1) / 3
    from math import cos, pi

    # torchtitan holds the peak for one more step, and ends its decay at the last one.
    progress = (step + 1 - 4) / 3
    return 0.1 + 0.9 * 0.5 * (1 + cos(pi * progress)) if step >= 4 else 1.0


@pytest.fixture(scope="module")
def pool():
    pool = WorkerPool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("schedule", "delay", "strength"), [("Async2BW", 1, 0.0), ("Async2BW", 1, 1.0), ("1F1B", 0, 0.0)]
)
def test_the_trainer_follows_the_recurrence(pool, tmp_path, schedule, delay, strength):
    # Under 1F1B error feedback is configured and must have no effect.
    configured = strength if delay else 1.0
    results = pool.run(2, train, str(tmp_path / "run"), schedule, configured, timeout=240)
    before = {name: value for result in results for name, value in result[0].items()}
    after = {name: value for result in results for name, value in result[1].items()}
    wanted, losses, norms = loop(tmp_path, before, delay, strength)
    other, _, _ = loop(tmp_path, before, 1 - delay, strength)

    def distance(weights):
        return max(float((after[name] - value).abs().max()) for name, value in weights.items())

    assert set(after) == set(wanted)
    assert distance(wanted) < 2e-6
    assert distance(other) > 1e-3
    for reported in (results[0][2], results[1][2]):
        assert [loss for loss, _ in reported] == pytest.approx(losses, abs=1e-5)
    # The norm reported with a step is that of the latest update: one batch back unless just drained
    # (checkpoints after steps 2, 4 and 6, a validation after step 3).
    latest = [None, norms[1], norms[2], norms[3], norms[3], norms[5]] if delay else norms
    for (_, found), norm in zip(results[0][2], latest, strict=True):
        assert found == (None if norm is None else pytest.approx(norm, rel=1e-4))
