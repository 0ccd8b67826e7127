"""Overlapped pairs of torchtitan's mixtures of experts: where they switch, and where the backward runs."""

import dataclasses
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.config.override import apply_overrides
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.config_utils import make_token_dispatcher_config

from tests.support.recipes import tiny_llama, tiny_moe
from tests.support.selection import slow
from tests.support.training import start, train
from titan_async.training.pipeline import overlap
from titan_async.training.pipeline.schedule import PipelineConfig
from titan_async.training.preflight.notes import start_notes

EXPERT_PARALLEL = {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2}


def configured(recipe: Any = tiny_moe, on: bool = True, checkpointing: Any = None, **parallelism: Any) -> Any:
    config = recipe()
    return dataclasses.replace(
        config,
        pipeline=PipelineConfig(overlap=on),
        parallelism=dataclasses.replace(config.parallelism, **{**EXPERT_PARALLEL, **parallelism}),
        activation_checkpoint=checkpointing,
    )


def test_dispatchers_switch_in_the_all_to_all_whose_output_is_saved() -> None:
    config = configured(checkpointing=SelectiveAC.Config(preserve_rng_state=False))
    adapted = overlap.adapt_config(config)
    assert overlap.adapt_config(adapted).override == adapted.override
    assert not config.override.imports
    apply_overrides(adapted.override, adapted)
    for layer in adapted.model_spec.model.layers:
        dispatcher = layer.moe.routed_experts.token_dispatcher
        assert isinstance(dispatcher, overlap.HandOverTokenDispatcher.Config)
        assert (dispatcher.num_experts, dispatcher.top_k) == (4, 2)
    checkpointing = adapted.activation_checkpoint
    assert not checkpointing.preserve_rng_state
    saved = checkpointing.build().get_save_ops()
    own = torch.ops.titan_async.all_to_all_single.default
    assert saved == SelectiveAC(SelectiveAC.Config()).get_save_ops() | {own}


def test_full_activation_checkpointing_is_unchanged() -> None:
    adapted = overlap.adapt_config(configured(checkpointing=FullAC.Config()))
    apply_overrides(adapted.override, adapted)
    assert type(adapted.activation_checkpoint) is FullAC.Config


@pytest.mark.parametrize(
    "options", [{"on": False}, {"pipeline_parallel_schedule": "1F1B"}, {"pipeline_parallel_degree": 1}]
)
def test_without_pairs_nothing_is_replaced(options: dict[str, Any]) -> None:
    config = configured(**options)
    assert overlap.adapt_config(config) is config


def deep_ep() -> Any:
    """`tiny_moe` with a dispatcher for GPUs."""
    config = tiny_moe()
    for layer in config.model_spec.model.layers:
        experts = layer.moe.routed_experts
        experts.token_dispatcher = make_token_dispatcher_config(num_experts=4, top_k=2, comm_backend="deepep")
    return config


@pytest.mark.parametrize(
    ("recipe", "options", "parts"),
    [
        (tiny_moe, {}, None),
        (tiny_moe, {"on": False, "pipeline_parallel_schedule": "1F1B"}, None),
        (tiny_moe, {"pipeline_parallel_schedule": "1F1B"}, ["has no effect", '"Async2BW" on several stages']),
        (tiny_moe, {"expert_parallel_degree": 1}, ["hides nothing", "expert_parallel_degree is 1"]),
        (tiny_llama, {"expert_parallel_degree": 1}, ["hides nothing", "no tokens are sent", "turn it off"]),
        (deep_ep, {}, ["hides nothing", "DeepEPTokenDispatcher does not hand over", "turn it off"]),
    ],
)
def test_a_start_note_warns_if_overlap_hides_nothing(
    recipe: Any, options: dict[str, Any], parts: list[str] | None
) -> None:
    config = configured(recipe, **options)
    notes = [note for note in start_notes(config, []) if "pipeline.overlap" in note]
    assert len(notes) == (parts is not None)
    assert all(part in notes[0] for part in parts or [])


def test_a_backward_in_another_thread_runs_in_the_train_context() -> None:
    place = threading.local()
    place.mesh = "of the main thread"

    @contextmanager
    def context() -> Iterator[None]:
        place.mesh = "entered"
        yield
        del place.mesh

    class Stage:
        def backward_one_chunk(self, slot: int, loss: Any = None) -> tuple:
            return slot, loss, place.mesh

    stage, found = Stage(), []
    overlap.enter_in_backward(stage, context)
    thread = threading.Thread(target=lambda: found.append(stage.backward_one_chunk(3, loss="a loss")))
    thread.start()
    thread.join()
    assert found == [(3, "a loss", "entered")]
    assert stage.backward_one_chunk(4) == (4, None, "of the main thread")


FLAGS = (
    *(f"--parallelism.{name}={degree}" for name, degree in EXPERT_PARALLEL.items()),
    "--pipeline.overlap",
    "--validator.no-enable",
)

FAILING = """
import os

from tests.support.recipes import tiny_moe
from titan_async.training.models.cpu_overrides import LoopGroupedExperts
from titan_async.training.trainer import AsyncTrainer

forward, train_step, calls, steps = LoopGroupedExperts.forward, AsyncTrainer.train_step, [], []


def fail(*_):
    raise ArithmeticError("as asked")


def failing_forward(self, *args, **kwargs):
    output = forward(self, *args, **kwargs)
    calls.append(1)
    # The third microbatch's first layer: it is computed together with another one's backward.
    if steps == [1, 2, 3] and len(calls) == 5 and os.environ["RANK"] == "1":
        {fail}
    return output


def counting_step(self, batches):
    calls.clear()
    steps.append(self.step)
    train_step(self, batches)


LoopGroupedExperts.forward, AsyncTrainer.train_step = failing_forward, counting_step


def failing() -> AsyncTrainer.Config:
    return tiny_moe()
"""


@pytest.mark.parametrize(
    ("fail", "sentence"),
    [
        slow("fail()", "[Stage 0] failed to run forward:"),
        ("output.register_hook(fail)", "Failed to run stage backward:"),
    ],
)
def test_an_error_in_one_half_on_one_rank_ends_the_run(tmp_path: Path, fail: str, sentence: str) -> None:
    (tmp_path / "own.py").write_text(FAILING.replace("{fail}", fail))
    (tmp_path / "own.toml").write_text('recipe = "failing"\n')
    run = train(tmp_path, "--module", "own", *FLAGS, recipe="own.toml")
    assert run.status == 1
    last = run.err.splitlines()[-1]
    assert last.startswith(f"rank 1 failed (exit status 1): RuntimeError: {sentence}")
    # The error, and torch's error from it; neither the other half nor another rank prints anything.
    assert run.err.count("\nArithmeticError: as asked\n") == 1
    assert run.err.count("Traceback (most recent call last)") == 2


@pytest.mark.slow
def test_ctrl_c_saves(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('recipe = "tiny_moe"\n')
    recipe = ("--module", "tests.support.recipes", "--training.steps", 500)
    run = start(tmp_path, *recipe, *FLAGS, recipe="x.toml")
    assert run.stdout is not None
    assert any(line.startswith("step   3/500") for line in run.stdout)
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate(timeout=100)
    assert run.returncode == 130
    assert out.rstrip().splitlines()[-1].startswith("Ctrl-C: saved step ")
