"""For every test: offline, one thread a process, and torchtitan on the CPU where there is no accelerator.

Drawn examples may take their time: how long one takes says more about the machine than about the code.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

from titan_async.config.device import ensure_device

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

# Before any test imports a part of torchtitan that binds the device.
ensure_device()
