"""A run that stops and goes on in new processes is, bit for bit, the run that never stopped."""

import dataclasses
import os

import pytest
import torch

from tests.support.processes import WorkerPool


def train(rank, group, folder, steps, schedule="Async2BW"):
    """Train up to `steps`, from the checkpoint in `folder` if there is one; returns the stage's weights."""
    from titan_async.training import cpu

    cpu.ensure_device()
    from titan_async.recipes.debug import debug

    os.environ.update(LOCAL_RANK=str(rank), LOG_RANK="0,1")
    config = debug()
    config = dataclasses.replace(
        config,
        dump_folder=folder,
        training=dataclasses.replace(config.training, steps=steps, seq_len=32, local_batch_size=4),
        parallelism=dataclasses.replace(
            config.parallelism,
            pipeline_parallel_degree=group.size(),
            pipeline_parallel_schedule=schedule,
            pipeline_parallel_microbatch_size=1,
        ),
        lr_scheduler=dataclasses.replace(config.lr_scheduler, warmup_steps=3, total_steps=8),
        validator=dataclasses.replace(config.validator, enable=False),
        checkpoint=dataclasses.replace(config.checkpoint, interval=4),
    )
    trainer = config.build()
    try:
        trainer.train()
        state = trainer.model_parts[0].state_dict()
        return {n: getattr(v, "full_tensor", lambda v=v: v)().detach().clone() for n, v in state.items()}
    finally:
        trainer.close()


def run(pool, *args, **kwargs):
    results = pool.run(2, train, *args, timeout=240, **kwargs)
    return {name: value for result in results for name, value in result.items()}


@pytest.fixture(scope="module")
def pool():
    pool = WorkerPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def whole(pool, tmp_path_factory):
    return run(pool, str(tmp_path_factory.mktemp("whole")), 8)


def test_resuming_in_new_processes_changes_nothing(pool, tmp_path, whole):
    run(pool, str(tmp_path), 4)
    fresh = WorkerPool(2)
    try:
        resumed = run(fresh, str(tmp_path), 8)
    finally:
        fresh.close()
    assert set(resumed) == set(whole)
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name


def test_a_synchronous_start_may_go_on_delayed(pool, tmp_path, whole):
    start = run(pool, str(tmp_path), 4, schedule="1F1B")
    resumed = run(pool, str(tmp_path), 8)
    assert all(torch.isfinite(value).all() for value in resumed.values())
    assert not torch.equal(resumed["norm.weight"], start["norm.weight"])
    assert not torch.equal(resumed["norm.weight"], whole["norm.weight"])


def test_a_delayed_start_may_go_on_synchronously(pool, tmp_path):
    start = run(pool, str(tmp_path), 4)
    resumed = run(pool, str(tmp_path), 8, schedule="1F1B")
    assert not torch.equal(resumed["norm.weight"], start["norm.weight"])
