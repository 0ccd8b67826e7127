"""What launchers and ranks need: imported once, in the process of which those of tests are forks."""

# ruff: noqa: E402, F401

import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.run
import torch.distributed.tensor

from titan_async.config.device import ensure_device

ensure_device()

import titan_async.cli.elastic
import titan_async.cli.launch
import titan_async.cli.live
import titan_async.cli.main
import titan_async.cli.train
import titan_async.config.dump
import titan_async.config.recipe_file
import titan_async.monitor.view.stalls
import titan_async.recipes.debug
import titan_async.recipes.dense
import titan_async.recipes.moe
import titan_async.training.cpu_overrides
import titan_async.training.no_answer
import titan_async.training.preflight
import titan_async.training.saved_recipe
import titan_async.training.trainer
