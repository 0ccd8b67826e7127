"""The configuration of plans by hand."""

import dataclasses

import pytest


@pytest.fixture(scope="module")
def config():
    """The laptop recipe in bfloat16."""
    from titan_async.recipes.debug import debug  # after `ensure_device` of the tests that need it

    made = debug()
    training = dataclasses.replace(made.training, mixed_precision_param="bfloat16")
    muon = dataclasses.replace(made.optimizer.muon, compute_dtype="bfloat16")
    optimizer = dataclasses.replace(made.optimizer, muon=muon)
    return dataclasses.replace(made, training=training, optimizer=optimizer)
