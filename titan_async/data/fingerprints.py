"""Fingerprints of files, by which a resumed run detects changed data.

A fingerprint consists of a file's size, name and a hash of its content: all of a file up to 1 MiB, and of a
longer one 16 evenly spread blocks of 64 KiB. It does not depend on the folder, and costs little for any
amount of text. It changes if a file is extended, truncated or replaced, but can miss a change within a long
file that keeps the length.
"""

import hashlib
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = [
    "changed_files",
    "fingerprint_of",
    "fingerprint_of_texts",
    "fingerprints_of_files",
    "name_of_files",
]

_BLOCK = 2**16
_BLOCKS = 16
_AT_ONCE = 16
"""Files read concurrently, because file systems of clusters have a high latency."""


def name_of_files(names: Sequence[str]) -> str:
    """A short name that identifies a list of files."""
    return f"{len(names)} files {zlib.crc32(chr(10).join(names).encode()):08x}"


def fingerprint_of(name: str, size: int, digest: str) -> str:
    """The fingerprint of data with this digest."""
    return f"{size} {digest} {name}"


def fingerprint_of_texts(name: str, texts: Sequence[str]) -> list[str]:
    """The fingerprint of texts in memory, as a list of one."""
    content = "\0".join(texts).encode()
    return [fingerprint_of(name, len(content), hashlib.blake2b(content, digest_size=8).hexdigest())]


def fingerprints_of_files(files: Sequence[Path], sizes: Sequence[int]) -> list[str]:
    """The fingerprint of each file.

    Args:
        files: The files, in order.
        sizes: In bytes, when the files were opened.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(_fingerprint, files, sizes))


def changed_files(saved: Sequence[str], now: Sequence[str]) -> list[str]:
    """Names of changed, missing and new files; of all files if only their order has changed."""
    if list(saved) == list(now):
        return []
    before, after = Counter(saved), Counter(now)
    differing = (before - after) + (after - before) or after
    return sorted({fingerprint.split(" ", 2)[2] for fingerprint in differing})


def _fingerprint(file: Path, size: int) -> str:
    digest = hashlib.blake2b(digest_size=8)
    last = max(size - _BLOCK, 0)
    starts: Sequence[int] = range(0, size, _BLOCK)
    if len(starts) > _BLOCKS:
        starts = [number * last // (_BLOCKS - 1) for number in range(_BLOCKS)]
    try:
        with file.open("rb") as opened:
            for start in starts:
                opened.seek(start)
                digest.update(opened.read(_BLOCK))
    except OSError:
        # A save must not fail because of this; if the file is needed, a resumed run reports it.
        return fingerprint_of(file.name, size, "unreadable")
    return fingerprint_of(file.name, size, digest.hexdigest())
