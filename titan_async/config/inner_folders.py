"""What a configuration names inside a run's folder has to stay there."""

import os
from typing import Any

from titan_async.errors import UserError

__all__ = ["check_inner_folders"]

_INNER = (
    ("checkpoint", "folder"),
    ("metrics", "save_tb_folder"),
    ("profiler", "save_traces_folder"),
    ("profiler", "save_memory_snapshot_folder"),
    ("comm", "save_traces_folder"),
    ("comm", "save_traces_file_prefix"),
    ("debug", "save_config_file"),
)
"""Sections and fields that torchtitan appends to `dump_folder`."""


def check_inner_folders(config: Any) -> None:
    """Refuse a path that would lead out of the run's folder, which the user may put anywhere.

    Raises:
        UserError: there is one.
    """
    for section, field in _INNER:
        path = getattr(getattr(config, section), field, None)
        if path is None or "://" in path:  # an address, which is no path in a folder
            continue
        if os.path.isabs(path) or os.path.normpath(path).split(os.sep)[0] == os.pardir:
            raise UserError(
                f"{section}.{field} is {path}, which leads out of the run's folder: name a place in it, or "
                "move all of it with dump_folder"
            )
