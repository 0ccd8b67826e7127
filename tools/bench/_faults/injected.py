"""The debug recipes for runs with injected faults: the module of `--module _faults.injected`.

The variable `TITAN_ASYNC_FAULT` contains the fault as JSON: `{"kind": ..., ...}`. The module of that kind
patches the trainer in every worker process, but not the launcher; the key `"hub"` names a folder that
replaces every dataset of the hub in all processes. Without the variable nothing is changed.
"""

from __future__ import annotations

import importlib
import json
import os

from titan_async.recipes.debug import debug, debug_moe

__all__ = ["FAULT", "debug", "debug_moe"]

FAULT = "TITAN_ASYNC_FAULT"


def _inject() -> None:
    options = json.loads(os.environ.get(FAULT, "{}"))
    if folder := options.pop("hub", None):
        importlib.import_module("_faults.local_hub").install(folder)
    if not options or "RANK" not in os.environ:
        return
    # Each of these modules has `install(rank, **options)`.
    module = importlib.import_module(f"_faults.inject_{options.pop('kind')}")
    module.install(int(os.environ["RANK"]), **options)


_inject()
