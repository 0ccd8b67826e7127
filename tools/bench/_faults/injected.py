"""The debug recipes, for runs that do harm to themselves: what `--module _faults.injected` names.

The variable `TITAN_ASYNC_FAULT` says what goes wrong, as JSON: `{"kind": ..., ...}`. The module of that kind
changes the trainer of every worker process, and nothing in the launcher. Without the variable the recipes are
what they are.
"""

from __future__ import annotations

import importlib
import json
import os

from titan_async.recipes.debug import debug, debug_moe

__all__ = ["FAULT", "debug", "debug_moe"]

FAULT = "TITAN_ASYNC_FAULT"


def _inject() -> None:
    fault = os.environ.get(FAULT)
    if fault is None or "RANK" not in os.environ:
        return
    options = json.loads(fault)
    # Each of these modules has `install(rank, **options)`.
    module = importlib.import_module(f"_faults.inject_{options.pop('kind')}")
    module.install(int(os.environ["RANK"]), **options)


_inject()
