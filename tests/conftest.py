"""For every test: offline, one thread a process, and torchtitan on the CPU where there is no accelerator."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from titan_async.training import cpu

# Before any test imports a part of torchtitan that binds the device.
cpu.ensure_device()
