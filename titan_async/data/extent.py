"""Data layer: how many documents there are, roughly and without reading them, to tell how long it takes."""

from pathlib import Path

from titan_async.data.files import find_files, read_documents
from titan_async.data.plays import play_scenes
from titan_async.data.text_source import TextSource
from titan_async.errors import UserError

__all__ = ["estimate_documents"]

_BYTES = 2**20
"""Read of a file's beginning, to count its lines."""


def estimate_documents(source: TextSource) -> int | None:
    """About as many documents as a source has in all its splits here; None where that is not known.

    Raises:
        UserError: As `open_documents`.
    """
    if source.local_path is None and source.dataset == "shakespeare":
        return len(play_scenes())
    if source.local_path is None:
        from titan_async.data.hub import files_of_split

        files = files_of_split(source)
        if not all(file.endswith(".parquet") for file in files):
            return None
        # Its files are about equally long, and each would be a request.
        return len(files) * _rows(files[0])
    counts = [_documents(file, source.text_column) for file in find_files(source.local_path)]
    return None if None in counts else sum(count for count in counts if count is not None)


def _documents(file: Path, text_column: str) -> int | None:
    size = file.stat().st_size
    if file.name.endswith(".parquet"):
        return _rows(str(file))
    if file.name.endswith(".jsonl"):
        with file.open("rb") as opened:
            beginning = opened.read(_BYTES)
        lines = beginning.count(b"\n") + (not beginning.endswith(b"\n"))
        return lines if len(beginning) == size else round(lines * size / len(beginning))
    if file.name.endswith(".txt"):
        # Cut into pieces of one length.
        first = next(read_documents(file, text_column), "")
        return max(1, round(size / max(len(first.encode()), 1)))
    return None


def _rows(file: str) -> int:
    import pyarrow
    import pyarrow.parquet

    from titan_async.data.parquet import open_file

    try:
        with open_file(file) as opened:
            return pyarrow.parquet.read_metadata(opened).num_rows
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"The data file {file} can't be read ({error}): fetch or write it again.") from error
