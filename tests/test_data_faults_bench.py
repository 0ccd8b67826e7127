"""The data faults of tools/bench/faults.py damage data as described, and cause the expected errors."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from _faults import data, inject_data, local_hub
from _faults.data import FAULTS, STREAM_FAULT, TOKEN_FAULTS, Fault, Start
from _faults.result import Attempt

from titan_async.data import (
    DocumentEncoder,
    PackedDataset,
    TextSource,
    TokenBatches,
    hub,
    open_documents,
    prepare_tokens,
)
from titan_async.data import shakespeare_tokenizer_folder as tokenizer
from titan_async.errors import UserError
from titan_async.training.trainer import AsyncTrainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "whole"
    data.write_texts(folder)
    return folder


def source(folder: Path, **fields: str) -> TextSource:
    return TextSource(dataset_path=str(folder), shuffle=False, validation_fraction=0, **fields)  # type: ignore[arg-type]


def samples(folder: Path) -> Iterator[object]:
    encoder = DocumentEncoder(tokenizer())
    return iter(PackedDataset(source(folder), lambda text: encoder([text])[0].tolist(), seq_len=128))


def inject(fault: Fault, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Injects a fault as a run does in its first steps."""
    trained: list[object] = []
    monkeypatch.setattr(AsyncTrainer, "train_step", trained.append)
    options = data._harm(fault, folder)
    del options["kind"], options["hub"]
    inject_data.install(0, **options)
    AsyncTrainer.train_step(trainer := object())  # type: ignore[arg-type]
    AsyncTrainer.train_step(trainer)  # type: ignore[arg-type]
    assert trained == [trainer, trainer]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_of_text_causes_the_expected_error(
    whole: Path, tmp_path: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(whole, folder)
    reading = samples(folder)
    next(reading)
    inject(fault, folder, monkeypatch)
    with pytest.raises(UserError) as caught:
        for _ in reading:
            pass
    assert re.match(fault.said, str(caught.value))


def test_stream_resumes_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "stream"
    data.write_stream(folder)
    monkeypatch.setattr(hub, "_load", hub._load)
    monkeypatch.setattr(datasets.IterableDataset, "__iter__", datasets.IterableDataset.__iter__)
    source = TextSource(dataset="owner/name", shuffle=False, validation_fraction=0)
    local_hub.install(str(folder))
    whole = list(open_documents(source))
    inject_data.install(1, **STREAM_FAULT.harm)
    stream, read = open_documents(source), []
    for _ in range(2):
        with pytest.raises(UserError, match=STREAM_FAULT.said):
            read.extend(stream)
        state = stream.state_dict()
        stream = open_documents(source)
        stream.load_state_dict(state)
    assert read == whole[:198]


def test_token_files_give_the_samples_of_the_text_and_the_expected_error(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tokens"
    prepare_tokens(source(whole), tokenizer(), folder, shard_tokens=6000)
    batches = iter(TokenBatches(source(folder, dataset="tokens"), seq_len=128, batch_size=1, infinite=True))
    reading = samples(whole)
    for _ in range(38 * 8):  # as many as the run reads, up to the middle of the longest document
        (inputs, labels), (others, same) = next(reading), next(batches)
        assert inputs["input"].equal(others["input"][0])
        assert labels.equal(same[0])
    batches = iter(TokenBatches(source(folder, dataset="tokens"), seq_len=128, batch_size=1, infinite=True))
    next(batches)
    inject(TOKEN_FAULTS[0], folder, monkeypatch)
    with pytest.raises(UserError) as caught:
        for _ in batches:
            pass
    assert re.match(TOKEN_FAULTS[0].said, str(caught.value))


FAULT = Fault("a file", "The data file")
ENDED = Start(2, "The data file is not there.", 3, [(4, 10.0), (5, 20.0)], began=0.0, ended=26.0)
RESUMED = Start(0, "", 3, [(4, 150.0)], began=100.0, ended=160.0)


def test_attempt_records_lost_work_and_times() -> None:
    attempt = data.judge(FAULT, ENDED, RESUMED, same=True)
    assert attempt == Attempt(True, work_lost=2, notice=6.0, resume=50.0, said="The data file is not there.")
    # A start that ends before its first step has lost no work.
    untrained = replace(ENDED, steps=[])
    assert data.judge(FAULT, untrained, RESUMED, same=True) == replace(attempt, work_lost=0, notice=None)


@pytest.mark.parametrize(
    ("start", "following", "same"),
    [
        (ENDED, RESUMED, False),
        (replace(ENDED, status=0), RESUMED, True),
        (replace(ENDED, err=""), RESUMED, True),
        (replace(ENDED, err=ENDED.err + "\nTraceback"), RESUMED, True),
        (replace(ENDED, left_over=[1]), RESUMED, True),
        (ENDED, replace(RESUMED, resumed_at=0), True),  # more than an interval is lost
        (ENDED, replace(RESUMED, resumed_at=6), True),  # a step that was never trained
    ],
)
def test_attempts_that_do_not_survive(start: Start, following: Start, same: bool) -> None:
    assert not data.judge(FAULT, start, following, same).survived
