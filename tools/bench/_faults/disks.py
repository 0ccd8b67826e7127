"""Small file systems in memory (tmpfs) that can be filled and made read-only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Disk", "can_mount", "mounted"]


@dataclass(frozen=True)
class Disk:
    """A mounted tmpfs."""

    folder: Path

    def resize(self, megabytes: int) -> None:
        """Changes its size."""
        self._remount(f"size={megabytes}m")

    def let_write(self, may: bool) -> None:
        """Makes it writable or read-only. Fails while a file is open for writing."""
        self._remount("rw" if may else "ro")

    def fill(self) -> None:
        """Writes until no space is left."""
        with open(self.folder / "ballast", "ab", buffering=0) as file:
            size = 1 << 20
            while size:
                try:
                    file.write(bytes(size))
                except OSError:
                    size //= 2

    def _remount(self, option: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{option}", str(self.folder)], check=True)


def can_mount() -> bool:
    """Whether this process may mount disks."""
    return os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0


@contextmanager
def mounted(folder: Path, megabytes: int) -> Iterator[Disk]:
    """Creates a folder and mounts a new disk there."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
