"""What ranks need: imported once, in the process of which the workers of `WorkerPool` are copies."""

import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor  # noqa: F401

from titan_async.config.device import ensure_device

ensure_device()

import titan_async.training.trainer  # noqa: E402, F401
