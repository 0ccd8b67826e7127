"""Runs the scripts of tools/ as a user would. tests/conftest.py makes their modules importable."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from tests.support import forks

__all__ = ["TOOLS", "measured", "module_folders", "run_tool"]

TOOLS = Path(__file__).parents[2] / "tools"


def module_folders() -> list[str]:
    """Folders for `sys.path`. The names of their modules are unique, and not those of packages."""
    return [str(TOOLS / folder) for folder in ("", "bench", "gpu", "study")]


def run_tool(script: str, *flags: object) -> CompletedProcess[str]:
    """Runs `script`, a path in tools/."""
    return forks.run([sys.executable, TOOLS / script, *flags], timeout=600)


def measured(folder: Path, script: str, *flags: object, statuses: tuple[int, ...] = (0,)) -> Any:
    """Runs a benchmark; returns the records of its parts, which it writes to `folder`."""
    path = folder / "record.json"
    done = run_tool(script, *flags, "--json", path)
    assert done.returncode in statuses, done.stderr
    record = json.loads(path.read_text())
    assert record["versions"]["torch"] and record["seconds"].keys() == record["parts"].keys()
    return record["parts"]
