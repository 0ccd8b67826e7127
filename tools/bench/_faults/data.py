"""Data files that are truncated or deleted while a run reads them, invalid lines, very long documents.

One run reads files of all kinds in order. A fault ends it, the file is restored, and the same command resumes
up to the next fault; the final state must be bitwise equal to that of a run without faults. Token files of
the same documents, which are read by other code, must give the same run.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from _faults.result import Attempt, Result, summarize
from _faults.runs import is_same, saved_state, start, train_undisturbed
from _faults.watched import Watched
from titan_async.data import TextSource, prepare_tokens, shakespeare_tokenizer_folder
from titan_async.data.shakespeare import play_scenes
from titan_async.training.checkpoint.folders import complete_steps

__all__ = ["measure"]

STEPS, INTERVAL = 38, 3
DATA = "data"
"""Folder of the data in the folder of a run."""
FLAGS = (
    "--training.steps", STEPS, "--training.seq_len", 128, "--checkpoint.interval", INTERVAL,
    "--checkpoint.keep_latest_k", 0, "--lr_scheduler.warmup_steps", 3,
    "--dataloader.no-shuffle", "--dataloader.validation_fraction", 0, "--dataloader.accept_changed_data",
)  # fmt: skip
TEXT, LINES, COMPRESSED, TABLE, LONG = "0.txt", "1.jsonl", "2.jsonl.gz", "3.parquet", "4.jsonl"
"""Each is read in a few steps, except the last one, a single document of a megabyte."""

_CHANGED = (
    r"The data file \S*{file} has changed while it was in use, from \d+ to \d+ bytes: put it back as it was"
)


@dataclass(frozen=True)
class Fault:
    """A fault in the data of one start of the run."""

    name: str
    said: str
    """A regular expression that matches the beginning of the error message."""
    harm: dict[str, Any] = field(default_factory=dict)
    """Arguments of `inject_data.install`."""
    file: str = ""
    wrong: bytes = b""
    """Replaces a part of the third line of `file` before the start."""


FAULTS = (
    Fault("a text file is truncated while it is read", _CHANGED.format(file=TEXT),
          {"after": 1, "cut": TEXT}),
    Fault("a JSON lines file is deleted", rf"The data file \S*{LINES} can't be read \(No such file or dir",
          {"after": 1, "unlink": LINES}),
    Fault("a line is not valid JSON",
          rf"Line 3 of \S*{LINES} is not valid JSON \(.*\): \w+ or remove that line",
          file=LINES, wrong=b'"}}'),
    Fault("bytes that are not UTF-8", rf"Line 3 of \S*{LINES} is not UTF-8 text \(.*\): convert it to UTF-8",
          file=LINES, wrong=b"caf\xe9"),
    Fault("a compressed file is truncated", _CHANGED.format(file=COMPRESSED),
          {"after": 1, "cut": COMPRESSED}),
    Fault("a parquet file is truncated", _CHANGED.format(file=TABLE), {"after": 1, "cut": TABLE}),
)  # fmt: skip

TOKEN_FAULTS = (
    Fault("a memory-mapped token file is truncated",
          r"The token file \S*\.safetensors has \d+ bytes instead of \d+: copy",
          {"after": 1, "cut": "tokens-00001.safetensors"}),
    Fault("a loader's process is killed", r"A data loader worker has died \(.*\), perhaps for lack of",
          {"after": 1, "kill_loader": True}),
)  # fmt: skip

STREAM_FAULT = Fault(
    "a stream that breaks off at every 100th document",
    r"The dataset \S+ could not be read to its end: the connection was lost \(.*\); start again",
    {"break_at": 100},
)
STREAM_ENDS = 2
"""Starts that fail before the one that reaches the last step."""


def measure(scratch: Path, *, quick: bool) -> Iterator[Result]:
    """See `faults.py`."""
    write_texts(scratch / "whole")
    expected = train_undisturbed(
        scratch / "undisturbed", STEPS, *FLAGS, "--dataloader.dataset_path", scratch / "whole"
    )

    faults = FAULTS[:2] if quick else FAULTS
    flags = ("--dataloader.dataset_path", DATA)
    attempts = _chain(scratch / "text", scratch / "whole", faults, flags, expected)
    yield from _rows(faults, attempts)

    tokens = scratch / "tokens"
    source = TextSource(dataset_path=str(scratch / "whole"), shuffle=False, validation_fraction=0)
    prepare_tokens(source, shakespeare_tokenizer_folder(), tokens, shard_tokens=6000)
    flags = (*flags, "--dataloader.dataset", "tokens", "--dataloader.num_workers", 1)
    attempts = _chain(scratch / "chain", tokens, TOKEN_FAULTS, flags, expected)
    yield from _rows(TOKEN_FAULTS, attempts)
    # The final states are equal only if both readers packed the long document in the same way.
    equal = all(attempt.survived for attempt in attempts)
    said = f"the same {STEPS} steps from text and from token files"
    yield summarize("data", "documents of 1 MB, and empty ones", [Attempt(equal, said=said)])

    write_stream(stream := scratch / "stream")
    flags = ("--dataloader.dataset", "owner/name")
    hub = {"kind": "data", "hub": str(stream)}
    expected = train_undisturbed(scratch / "undisturbed-stream", STEPS, *FLAGS, *flags, fault=hub)
    attempts = _chain(scratch / "streamed", stream, (STREAM_FAULT,) * STREAM_ENDS, flags, expected)
    yield summarize("data", STREAM_FAULT.name, attempts)


def _rows(faults: Sequence[Fault], attempts: Sequence[Attempt]) -> Iterator[Result]:
    for fault, attempt in zip(faults, attempts, strict=True):
        yield summarize("data", fault.name, [attempt])


def write_stream(folder: Path) -> None:
    """Writes lines that `datasets` streams; a run reads a hundred in about ten steps."""
    folder.mkdir()
    text = "\n\n".join(play_scenes())
    documents = [text[begin : begin + 300] for begin in range(0, 300 * 1000, 300)]
    (folder / "train.jsonl").write_bytes(_lines(documents))


def _lines(texts: Sequence[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def write_texts(folder: Path) -> None:
    """Writes a file of each kind, with some empty documents."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir()
    text = "\n\n".join(play_scenes())
    (folder / TEXT).write_text(text[:54_000])
    rest, documents = text[54_000:], 12

    def take(count: int, length: int) -> list[str]:
        nonlocal rest
        taken, rest = rest[: count * length], rest[count * length :]
        return [taken[begin : begin + length] for begin in range(0, len(taken), length)] + ["", " \n"]

    (folder / LINES).write_bytes(_lines(take(documents, 700)))
    (folder / COMPRESSED).write_bytes(gzip.compress(_lines(take(documents, 700))))
    pyarrow.parquet.write_table(pyarrow.table({"text": [*take(documents, 700), None]}), folder / TABLE)
    (folder / LONG).write_bytes(_lines(take(1, 2**20)))


@dataclass(frozen=True)
class Start:
    """One start of the run."""

    status: int
    err: str
    resumed_at: int
    """The step of the checkpoint."""
    steps: list[tuple[int, float]]
    """Its steps, each with the time of its log line."""
    began: float
    """In seconds since the epoch, like all times."""
    ended: float
    left_over: list[int] = field(default_factory=list)
    """Processes that were still alive after its end."""

    @property
    def last(self) -> int:
        return self.steps[-1][0] if self.steps else self.resumed_at


def judge(fault: Fault, start: Start, following: Start, same: bool) -> Attempt:
    """Judge how a run handled a fault.

    Args:
        fault: the injected fault.
        start: the start that it ended.
        following: the next start of the same run.
        same: whether the run reached the state of a run without faults.
    """
    reported = start.status == 2 and "\n" not in start.err and re.match(fault.said, start.err) is not None
    lost = start.last - following.resumed_at
    return Attempt(
        survived=reported and same and not start.left_over and 0 <= lost <= INTERVAL,
        work_lost=lost,
        notice=start.ended - start.steps[-1][1] if start.steps else None,
        resume=following.steps[0][1] - following.began if following.steps else None,
        said=start.err,
    )


def _chain(
    folder: Path, whole: Path, faults: Sequence[Fault], flags: tuple[object, ...],
    expected: dict[str, torch.Tensor],
) -> list[Attempt]:  # fmt: skip
    """Starts the same run once for each fault, and once more without one.

    Args:
        folder: of the run.
        whole: the data without faults.
        faults: in the order in which they end the run.
        flags: select the folder `DATA`, or a dataset of the hub that it replaces.
        expected: the expected final state.
    """
    folder.mkdir()
    data = folder / DATA
    starts = []
    for fault in (*faults, None):
        shutil.rmtree(data, ignore_errors=True)
        shutil.copytree(whole, data)
        began = time.time()
        run = Watched(start(folder, *FLAGS, *flags, fault=_harm(fault, data)))
        status, ended = run.wait(900), time.time()
        resumed = (re.search(r"resumed at step (\d+)$", line.text) for line in run.out)
        starts.append(
            Start(
                status,
                "\n".join(
                    line.text
                    for line in run.err
                    if not line.text.startswith("WARNING ")  # about empty documents
                ).replace(f"{DATA}{os.sep}", ""),
                next((int(found[1]) for found in resumed if found), 0),
                run.steps(),
                began,
                ended,
                _left_over(run.process.pid),
            )
        )
    same = starts[-1].status == 0 and complete_steps(folder / "run" / "checkpoint")[-1] == STEPS
    same = same and is_same(saved_state(folder, STEPS), expected)
    return [
        judge(fault, ended_start, following, same)
        for fault, ended_start, following in zip(faults, starts[:-1], starts[1:], strict=True)
    ]


def _harm(fault: Fault | None, data: Path) -> dict[str, Any]:
    """Changes the data before the start; returns the options of the fault that is injected later."""
    options: dict[str, Any] = {"kind": "data", "hub": str(data)}
    if fault is None:
        return options
    if fault.wrong:
        lines = (data / fault.file).read_bytes().splitlines(keepends=True)
        lines[2] = lines[2][:20] + fault.wrong + lines[2][20 + len(fault.wrong) :]
        (data / fault.file).write_bytes(b"".join(lines))
    paths = {key: str(data / fault.harm[key]) for key in ("cut", "unlink") if key in fault.harm}
    return options | fault.harm | paths


def _left_over(session: int) -> list[int]:
    """Processes of a run's session that are still alive."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found
