"""The benchmarks run in their smallest form; their times are not tested."""

import pytest

from tests.support.tools import measured, run_tool


@pytest.mark.slow
def test_every_part_runs_and_is_recorded(tmp_path):
    parts = measured(tmp_path, "bench/schedule.py", "--quick")
    assert list(parts) == ["sleeping", "jitter", "compute", "memory", "overhead"]
    for results in parts.values():
        assert "Async2BW" in {result["schedule"] for result in results}
    runs = {result["schedule"]: result["median"] is not None for result in parts["sleeping"]}
    assert runs.pop("DualPipeV") is False  # needs as many microbatches as stages, and has two stages per rank
    assert all(runs.values())
    # Numbers of bytes do not depend on the machine.
    assert all(abs(result["error"]) < 0.05 for result in parts["memory"])


@pytest.mark.parametrize(("script", "part"), [("schedule.py", "sleeping"), ("muon.py", "aspects")])
def test_an_unknown_part_is_named(script, part):
    done = run_tool(f"bench/{script}", "--only", "speed")
    assert done.returncode == 2
    assert "speed" in done.stderr and part in done.stderr


def test_error_feedback_is_compared_with_the_optimizer_alone(tmp_path):
    parts = measured(tmp_path, "bench/error_feedback.py", "--millions", 1, "--repeats", 1)
    medians = parts["update"]
    assert len(medians) == 4 and all(median > 0 for median in medians.values())


@pytest.mark.slow
def test_recording_is_compared_with_not_recording(tmp_path):
    parts = measured(tmp_path, "bench/events.py", "--quick")
    ours, theirs = parts["spans"]
    assert ours["caller"] > 0 and theirs["caller"] > 0
    # Two forwards and backwards with their messages, and the spans of a batch.
    assert [step["rank"] for step in parts["steps"]] == [0, 1]
    assert all(10 < step["spans"] < 30 for step in parts["steps"])


@pytest.mark.slow
def test_overlap_is_compared_with_every_schedule(tmp_path):
    # Status 1: a floor is missed, which depends on the machine.
    parts = measured(tmp_path, "bench/overlap.py", "--quick", "--repeats", 1, "--stages", 2, statuses=(0, 1))
    cases = parts["sleeping"]["cases"]
    assert len(cases) == 12 and all(case["median"] >= 0.12 for case in cases)  # as long as they sleep
    assert [shape["stages"] for shape in parts["sleeping"]["floors"]] == [2]
    assert all(shape["messages"] > 0 for shape in parts["computing"]["shares"])


@pytest.mark.slow
def test_plans_are_compared_with_measured_steps(tmp_path):
    parts = measured(tmp_path, "bench/planner.py", "--quick", "--only", "time")
    errors = {step["schedule"]: step["error"] for step in parts["time"]["steps"]}
    assert errors.pop("DualPipeV") is None
    assert {"1F1B", "ZBVZeroBubble", "Async2BW"} < errors.keys() and None not in errors.values()


def test_every_loader_is_measured(tmp_path):
    flags = ("--repeats", 1, "--millions", 1, "--documents", 300)
    results = measured(tmp_path, "bench/data.py", *flags)["loaders"]
    assert [result["loader"] for result in results] == 2 * [
        "ours, token files",
        "ours, text",
        "torchtitan, text",
    ]
    assert all(median > 0 for result in results for median in result["medians"])
