"""Event files are read as written, also while they are written and after the ring is full."""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.support.events import write_run
from titan_async.errors import UserError
from titan_async.monitor.events import (
    BURST,
    CAPACITY,
    HEADER_BYTES,
    RECORD,
    STATE,
    SUMMARY,
    EventWriter,
    RankReader,
    ring_path,
    summary_path,
    utilization_of,
)
from titan_async.monitor.journal import Journal, JournalReader, journal_path
from titan_async.monitor.run_folder import RunInfo, events_folder, read_info, runs_in, write_info
from titan_async.pipelining.recording import Kind

NOTHING = np.zeros(1, RECORD)


def numbered(first: int, count: int) -> np.ndarray:
    records = np.zeros(count, RECORD)
    records["start"] = np.arange(first, first + count)
    return records


def fill(writer: EventWriter, first: int, count: int) -> None:
    for begin in range(first, first + count, BURST):
        writer.write(numbered(begin, min(BURST, first + count - begin)))
        writer.write_state(NOTHING, (0, 0, 0))


def test_the_layout_is_the_documented_one(tmp_path: Path) -> None:
    """The bytes that another program would read."""
    assert (RECORD.itemsize, HEADER_BYTES, CAPACITY) == (32, 4096, 65536)
    writer = EventWriter(tmp_path, 7)
    record = np.array([(10, 20, 3, 1, 2, 5, Kind.BACKWARD, 1)], RECORD)
    writer.write(record)
    writer.write_state(np.array([(30, 0, 4, -1, -1, 5, Kind.RECEIVE, 1)], RECORD), (100, 200, 300))
    writer.close()
    data = (tmp_path / "rank-00007.ring").read_bytes()
    little = lambda at, size: int.from_bytes(data[at : at + size], "little", signed=True)  # noqa: E731
    at = HEADER_BYTES
    assert [little(at, 8), little(at + 8, 8)] == [10, 20]
    assert [little(at + 16, 4), little(at + 20, 4), little(at + 24, 4)] == [3, 1, 2]
    assert [little(at + 28, 2), data[at + 30], data[at + 31]] == [5, 3, 1]
    assert [little(offset, 8) for offset in (0, 8, 24, 32, 40, 48)] == [1, 1, 0, 100, 200, 300]
    assert little(56, 8) == 30 and data[56 + 30] == 6
    assert little(88, 8) == 1


def test_a_reader_gets_each_record_once(tmp_path: Path) -> None:
    writer, reader = EventWriter(tmp_path, 0), RankReader(tmp_path, 0)
    assert len(reader.new_records()) == 0 and reader.state() is None
    seen = []
    for first in range(0, 3 * CAPACITY, 5000):  # wraps around three times, at different offsets
        fill(writer, first, 5000)
        seen.append(reader.new_records()["start"])
    written = len(range(0, 3 * CAPACITY, 5000)) * 5000
    assert np.array_equal(np.concatenate(seen), np.arange(written))
    assert len(reader.new_records()) == 0
    assert reader.state().count == written


def test_a_late_reader_gets_the_latest_in_order(tmp_path: Path) -> None:
    writer, reader = EventWriter(tmp_path, 0), RankReader(tmp_path, 0)
    fill(writer, 0, 2 * CAPACITY + 123)
    starts = reader.new_records()["start"]
    assert np.array_equal(starts, np.arange(2 * CAPACITY + 123 - (CAPACITY - BURST), 2 * CAPACITY + 123))
    fill(writer, 2 * CAPACITY + 123, 3 * CAPACITY)  # laps the reader
    assert reader.new_records()["start"][-1] == 5 * CAPACITY + 122


def test_records_overwritten_during_a_read_are_omitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from titan_async.monitor import events

    writer, reader = EventWriter(tmp_path, 0), RankReader(tmp_path, 0)
    fill(writer, 0, CAPACITY)
    read_ring = events._read_ring

    def slowly(*args):
        # The writer continues during the read, and is in the middle of a burst at its end.
        fill(writer, CAPACITY, 10_000)
        writer.write(numbered(CAPACITY + 10_000, BURST))
        return read_ring(*args)

    monkeypatch.setattr(events, "_read_ring", slowly)
    starts = reader.new_records()["start"]
    assert len(starts) == CAPACITY - 10_000 - BURST
    assert np.array_equal(starts, np.arange(CAPACITY - len(starts), CAPACITY))


def test_incomplete_header_is_skipped(tmp_path: Path) -> None:
    writer, reader = EventWriter(tmp_path, 0), RankReader(tmp_path, 0)
    fill(writer, 0, 10)
    data = bytearray(ring_path(tmp_path, 0).read_bytes())
    data[0] += 1  # the serial at its start differs from that at its end
    ring_path(tmp_path, 0).write_bytes(data)
    assert reader.state() is None and len(reader.new_records()) == 0
    os.truncate(ring_path(tmp_path, 0), STATE.itemsize - 1)
    assert reader.state() is None


def test_incomplete_summaries_are_skipped(tmp_path: Path) -> None:
    writer, reader = EventWriter(tmp_path, 0), RankReader(tmp_path, 0)
    assert len(reader.summaries()) == 0
    row = np.zeros(2, SUMMARY)
    row["first_step"], row["stage"] = 5, [0, 4]
    writer.write_summary(row)
    with open(summary_path(tmp_path, 0), "ab") as file:
        file.write(b"half of one")
    assert np.array_equal(reader.summaries(), row)


@pytest.mark.parametrize(("form", "kinds"), [(1, 16), (2, 17)])
def test_older_formats_have_fewer_kinds(tmp_path: Path, form: int, kinds: int) -> None:
    """Format 2 has no overlapped pairs, format 1 also no garbage collection."""
    folder = write_run(tmp_path, stages=2, microbatches=4)
    path = folder / "run.json"
    written = json.loads(path.read_text())
    assert written.pop("overlap") is False
    path.write_text(json.dumps(written | {"format": form}))
    wanted = []
    for rank in range(2):
        rows = [(2 * i + 1, 2 * i + 2, 10 * i, 10 * i + 9, rank, *range(i, i + kinds)) for i in range(3)]
        wanted += [(*row, *[0] * (18 - kinds)) for row in rows]
        summary_path(folder, rank).write_bytes(b"".join(struct.pack(f"<iiqqH{kinds}f", *row) for row in rows))
    found = [row for rank in range(2) for row in RankReader(folder, rank).summaries()]
    assert [(*(int(row[name]) for name in SUMMARY.names[:5]), *row["seconds"]) for row in found] == wanted
    info = read_info(folder)
    assert (info.stages, info.overlap) == (2, False)
    path.write_text(json.dumps(written | {"format": form, "overlap": 1}))
    with pytest.raises(UserError, match="1 is not of type bool"):
        read_info(folder)


def test_utilization_excludes_time_outside_of_steps() -> None:
    rows = np.zeros(3, SUMMARY)
    rows["stage"] = [0, 4, 0]
    rows["seconds"][0, Kind.FORWARD], rows["seconds"][0, Kind.BACKWARD] = 1, 2
    rows["seconds"][0, Kind.IDLE], rows["seconds"][0, Kind.VALIDATE] = 3, 100
    rows["seconds"][1, Kind.BACKWARD_WEIGHT], rows["seconds"][1, Kind.BACKWARD_INPUT] = 2, 1
    rows["seconds"][2, Kind.OPTIMIZER], rows["seconds"][2, Kind.SAVE] = 1, 50
    rows["seconds"][0, Kind.GARBAGE_COLLECTION] = 10
    assert utilization_of(rows) == pytest.approx({0: 0.3, 4: 0.3})
    assert utilization_of(rows[:0]) == {}


def test_the_journal(tmp_path: Path) -> None:
    journal, reader = Journal(tmp_path), JournalReader(tmp_path)
    journal.write("step", step=3, loss=float("nan"), skipped=0)
    journal.write("log", text="a line\nand another")
    first, second = reader.new_entries()
    assert (first["kind"], first["step"], first["loss"], first["skipped"]) == ("step", 3, None, 0)
    assert second["text"] == "a line\nand another"
    with open(journal_path(tmp_path), "a") as file:
        file.write('{"time": 1, "kind": "end"')
    assert reader.new_entries() == []
    with open(journal_path(tmp_path), "a") as file:
        file.write(', "reason": "finished"}\nno entry\n[1]\n')
    assert reader.new_entries() == [{"time": 1, "kind": "end", "reason": "finished"}]


def test_runs_of_a_folder(tmp_path: Path) -> None:
    assert runs_in(tmp_path) == []
    info = RunInfo(
        run_id="20260102-000000-aaaa", model="m", started=1.5, host="h", pid=1, first_step=0, steps=9,
        log_every=1, schedule="1F1B", microbatches=4, lookahead=0, overlap=False, stages=4,
        ranks=((0, 2), (1, 3)), tokens_per_step=7, device="cpu", versions={"torch": "2"},
    )  # fmt: skip
    for run_id in ("20260102-000000-aaaa", "20260101-000000-bbbb"):
        folder = events_folder(tmp_path, run_id)
        folder.mkdir(parents=True)
        write_info(folder, info)
    assert [folder.name for folder in runs_in(tmp_path)] == ["20260101-000000-bbbb", "20260102-000000-aaaa"]
    assert read_info(runs_in(tmp_path)[-1]) == info
    assert {path.name for path in folder.iterdir()} == {"run.json"}
    (folder / "run.json").write_text('{"format": 4}')
    with pytest.raises(UserError, match="its format is 4, but this version reads 1 to 3"):
        read_info(folder)
    with pytest.raises(UserError, match="has no run.json"):
        read_info(tmp_path)
