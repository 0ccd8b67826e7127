"""Imports the modules of launchers and ranks once, in the server process that tests fork.

Replaces a sleep in torchtitan and a look-up in torchelastic that take seconds per run and affect no result.
"""

# ruff: noqa: E402, F401

import gc
import time
from types import SimpleNamespace

import hypothesis
import pytest
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.run
import torch.distributed.tensor

from titan_async.config.device import ensure_device

ensure_device()

import torch.distributed.elastic.rendezvous.dynamic_rendezvous as rendezvous
import torchtitan.trainer

import titan_async.cli.elastic
import titan_async.cli.launch
import titan_async.cli.live
import titan_async.cli.main
import titan_async.cli.train
import titan_async.config.dump
import titan_async.config.recipe_file
import titan_async.data.shakespeare
import titan_async.monitor.stalls
import titan_async.recipes.debug
import titan_async.recipes.dense
import titan_async.recipes.moe
import titan_async.training.models.cpu_overrides
import titan_async.training.preflight.check
import titan_async.training.process.hung_ranks
import titan_async.training.process.run_folder
import titan_async.training.trainer

# Cached here; otherwise each launcher and rank would need half a second.
titan_async.data.shakespeare.play_scenes()

# For its log of each message torchelastic looks for the source of every frame in every imported module.
rendezvous.get_method_name = lambda depth=2: ""
# After training torchtitan's rank 0 sleeps for two seconds. Launcher and tests wait for all ranks anyway.
torchtitan.trainer.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)

# Otherwise the first collection of each fork would write to, and so copy, all of these pages.
gc.collect()
gc.freeze()
