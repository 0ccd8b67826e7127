"""Warnings at the start of a run about a configuration that may not train as expected."""

from pathlib import Path

import pytest

from tests.support.training import RECIPE, ROOT
from titan_async.config.recipe_file import resolve
from titan_async.training.preflight.check import build_on_meta
from titan_async.training.preflight.notes import start_notes

ONE_STAGE = ("--parallelism.pipeline_parallel_degree", "1")
SYNCHRONOUS = ("--parallelism.pipeline_parallel_schedule", "1F1B")
ADAMW = ("--optimizer.name", "adamw")
WITHOUT = ("--optimizer.error_feedback.no-enable",)

GROUP = """[[optimizer.param_groups]]
pattern = '{}'
optimizer_name = "{}"
optimizer_kwargs = {{lr = 1e-3}}
"""


def notes(*flags: str, recipe: Path = RECIPE, was_delayed: bool | None = None) -> list[str]:
    config = resolve([str(recipe), *flags])
    names = [name for name, _ in build_on_meta(config).named_parameters()]
    return start_notes(config, names, was_delayed=was_delayed)


@pytest.mark.parametrize("path", sorted((ROOT / "toml_configs").glob("*.toml")), ids=lambda path: path.stem)
def test_the_recipe_files_need_no_note(path: Path) -> None:
    assert notes(recipe=path) == []


def test_one_stage_has_no_delay() -> None:
    [note] = notes(*ONE_STAGE)
    assert note.startswith("one stage: no delay, no feedback (Async2BW needs ")
    assert notes(*ONE_STAGE, *SYNCHRONOUS) == []


@pytest.mark.parametrize(
    ("flags", "was_delayed", "part"),
    [
        ((), False, "the checkpoint's run had no delay, this one has one"),
        (SYNCHRONOUS, True, "the checkpoint's run had a delay, this one has none"),
        ((*SYNCHRONOUS, *ONE_STAGE), True, "the checkpoint's run had a delay, this one has none"),
        ((), True, None),
        (SYNCHRONOUS, False, None),
    ],
)
def test_a_run_that_resumes_with_another_delay(
    flags: tuple[str, ...], was_delayed: bool, part: str | None
) -> None:
    found = notes(*flags, was_delayed=was_delayed)
    assert len(found) == (part is not None)
    assert all(part in note for note in found if part)


def test_two_stages_that_resume_on_one() -> None:
    first, second = notes(*ONE_STAGE, was_delayed=True)
    assert first.startswith("one stage: no delay, no feedback")
    assert second.startswith("the checkpoint's run had a delay, this one has none")


@pytest.mark.parametrize("off", [WITHOUT, ("--optimizer.error_feedback.strength", "0")])
def test_adamw_without_feedback(off: tuple[str, ...]) -> None:
    [note] = notes(*ADAMW, *off)
    assert note.startswith("AdamW without error feedback trains poorly under a delay")
    assert 'set optimizer.name to "muon", or turn on optimizer.error_feedback' in note
    assert notes(*ADAMW) == notes(*off) == notes("--optimizer.name", "lion", *off) == []
    assert notes(*ADAMW, *off, *SYNCHRONOUS) == notes(*ADAMW, *off, *SYNCHRONOUS, *ONE_STAGE) == []


@pytest.mark.parametrize(
    ("groups", "number"),
    [
        ([(r"^layers.*\.w[qkvo123]?", "Muon"), (".*", "AdamW")], 0),
        ([(r"^layers.*\.w2", "AdamW"), (r"^layers.*\.w[qkvo123]?", "Muon"), (".*", "AdamW")], 1),
        ([("^layers.0", "Adam"), (".*", "SGD")], 1),
    ],
)
def test_groups_are_checked_one_by_one(groups: list[tuple[str, str]], number: int, tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('include = "debug_cpu.toml"\n' + "".join(GROUP.format(*group) for group in groups))
    assert len(notes(*WITHOUT, recipe=file)) == number


@pytest.mark.parametrize(
    ("flag", "value", "beyond"),
    [("--pipeline.synchronous_steps", "20", "21"), ("--pipeline.synchronous_ratio", "1", None)],
)
def test_a_synchronous_start_that_changes_nothing_or_all(flag: str, value: str, beyond: str | None) -> None:
    flags = ("--training.steps", "20", flag)
    assert notes(*flags, value) == []
    if beyond is not None:
        [note] = notes(*flags, beyond)
        assert (
            note == f"pipeline.synchronous_steps is {beyond}, but the run has 20 steps: all are synchronous"
        )
    [note] = notes(*flags, value, *SYNCHRONOUS)
    assert note == f"{flag[2:]} has no effect: under 1F1B every step is synchronous"
    [note] = notes(*flags, value, *ONE_STAGE)
    assert note.startswith("one stage: no delay")
    assert notes(*flags, "0", *SYNCHRONOUS) == []


def test_a_warm_up_longer_than_the_run() -> None:
    flags = ("--training.steps", "20", "--lr_scheduler.warmup_steps")
    [note] = notes(*flags, "21")
    assert note == "lr_scheduler.warmup_steps is 21, but the schedule has 20 steps: all are warm-up"
    assert notes(*flags, "20") == notes(*flags, "21", "--lr_scheduler.total_steps", "21") == []
