"""Data layer: fingerprints of files, by which a run that resumes sees whether its data have changed.

A fingerprint is made of a file's size, name and content: of all of a file up to 1 MiB, and of a longer one in
16 blocks of 64 KiB that are spread evenly from its beginning to its end. So it does not depend on the folder,
costs little however much text there is, and changes with what was appended, cut off or moved. It can miss a
change inside a long file that keeps the length.
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
"""Files that are read at the same time, since file systems of clusters take their time to answer."""


def name_of_files(names: Sequence[str]) -> str:
    """A short name that tells these files from others."""
    return f"{len(names)} files {zlib.crc32(chr(10).join(names).encode()):08x}"


def fingerprint_of(name: str, size: int, digest: str) -> str:
    """The fingerprint of data whose content has this digest."""
    return f"{size} {digest} {name}"


def fingerprint_of_texts(name: str, texts: Sequence[str]) -> list[str]:
    """The fingerprint of texts in memory, in a list."""
    content = "\0".join(texts).encode()
    return [fingerprint_of(name, len(content), hashlib.blake2b(content, digest_size=8).hexdigest())]


def fingerprints_of_files(files: Sequence[Path], sizes: Sequence[int]) -> list[str]:
    """The fingerprint of each file.

    Args:
        files: In the order in which they count.
        sizes: Of the files in bytes, when they were opened.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(_fingerprint, files, sizes))


def changed_files(saved: Sequence[str], now: Sequence[str]) -> list[str]:
    """The names of files that differ, are gone or are new; of all, if only their order differs."""
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
        # A checkpoint is worth saving all the same; if the file is needed, a run that resumes reports it.
        return fingerprint_of(file.name, size, "unreadable")
    return fingerprint_of(file.name, size, digest.hexdigest())
