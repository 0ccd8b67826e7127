"""The benchmark still runs, in its smallest form; its times are nobody's concern here."""

import json
import sys
from pathlib import Path

import pytest

from tests.support import forks

BENCH = Path(__file__).parents[1] / "tools" / "bench"


def run(*flags, script="schedule.py"):
    return forks.run([sys.executable, BENCH / script, *flags], timeout=600)


@pytest.mark.slow
def test_every_part_runs_and_is_recorded(tmp_path):
    path = tmp_path / "results.json"
    done = run("--quick", "--json", path)
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert list(record["parts"]) == ["sleeping", "jitter", "compute", "memory", "overhead"]
    for results in record["parts"].values():
        assert "Async2BW" in {result["schedule"] for result in results}
    runs = {result["schedule"]: result["median"] is not None for result in record["parts"]["sleeping"]}
    assert runs.pop("DualPipeV") is False  # needs as many microbatches as stages, of which it has two a rank
    assert all(runs.values())
    # Bytes are counted, so that they do not depend on the machine.
    assert all(abs(result["error"]) < 0.05 for result in record["parts"]["memory"])


def test_an_unknown_part_is_named():
    done = run("--only", "speed")
    assert done.returncode == 2
    assert "speed" in done.stderr and "sleeping" in done.stderr


def test_error_feedback_is_compared_with_the_optimizer_alone(tmp_path):
    path = tmp_path / "results.json"
    done = run("--millions", 1, "--repeats", 1, "--json", path, script="error_feedback.py")
    assert done.returncode == 0, done.stderr
    medians = json.loads(path.read_text())["parts"]["update"]
    assert len(medians) == 4 and all(median > 0 for median in medians.values())
    assert all(name in done.stdout for name in medians)


@pytest.mark.slow
def test_recording_is_compared_with_not_recording(tmp_path):
    path = tmp_path / "results.json"
    done = run("--quick", "--json", path, script="events.py")
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())["parts"]
    ours, theirs = record["spans"]
    assert ours["caller"] > 0 and theirs["caller"] > 0
    # Two forwards and backwards with their messages, and what a batch has once.
    assert [step["rank"] for step in record["steps"]] == [0, 1]
    assert all(10 < step["spans"] < 30 for step in record["steps"])


@pytest.mark.slow
def test_overlap_is_compared_with_every_schedule(tmp_path):
    path = tmp_path / "results.json"
    done = run("--quick", "--repeats", 1, "--json", path, script="overlap.py")
    assert done.returncode in (0, 1), (
        done.stderr
    )  # whether a floor is missed: times are nobody's concern here
    parts = json.loads(path.read_text())["parts"]
    cases = parts["sleeping"]["cases"]
    assert len(cases) == 24 and all(case["median"] >= 0.12 for case in cases)  # as long as they sleep
    assert [shape["stages"] for shape in parts["sleeping"]["floors"]] == [2, 4]
    assert all(shape["messages"] > 0 for shape in parts["computing"]["shares"])
