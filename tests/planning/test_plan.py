"""`titan-async plan`: every recipe file, the JSON, and user errors."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.calibrations import CORES, H100, make_profile
from tests.support.selection import slow
from titan_async.cli import main
from titan_async.config.recipe_file import resolve
from titan_async.planning import measured_times, plan
from titan_async.planning.config_variants import on_own_ranks
from titan_async.planning.device_profile import write_profile
from titan_async.planning.hardware import cluster_of

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.name for path in (ROOT / "toml_configs").glob("*.toml"))
RECIPE = "debug_cpu.toml"
LARGE = ("dense_360m", "dense_1b", "moe_2b", "moe_10b_200b", "smollm2")
"""Larger variants of other recipes, which take long to trace."""


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(autouse=True)
def _traced_once(monkeypatch, request):
    """Traces each model once: tracing takes seconds, and twins have the same parts."""
    known = request.config.stash.setdefault(_TRACED, {})
    trace = plan.trace_parts

    def once(config, *, on_cpu=False):
        spec, training, parallelism = config.model_spec, config.training, config.parallelism
        size = (training.local_batch_size, parallelism.pipeline_parallel_microbatch_size)
        key = spec.flavor, training.seq_len, size[parallelism.pipeline_parallel_degree > 1], on_cpu
        if key not in known:
            known[key] = trace(config, on_cpu=on_cpu)
        return known[key]

    monkeypatch.setattr(plan, "trace_parts", once)
    monkeypatch.setattr(measured_times, "trace_parts", once)


_SECONDS = ("forward", "input_gradient", "weight_gradient", "gather", "reduction", "update")
_TRACED = pytest.StashKey()


@pytest.fixture
def run(capsys):
    def run_it(*argv):
        status = main.main(["plan", *argv])
        return status, *capsys.readouterr()

    return run_it


def error_of(run, *argv):
    status, out, err = run(*argv)
    assert (status, out) == (2, "")
    assert err.endswith("\n") and err.count("\n") == 1 and "Traceback" not in err
    return err


@pytest.mark.parametrize("name", [slow(name) if name.startswith(LARGE) else name for name in RECIPES])
def test_every_recipe_file_has_a_plan(run, name):
    status, out, err = run(f"toml_configs/{name}", "--json", "--no-suggest")
    assert (status, err) == (0, "")
    record = json.loads(out)
    assert record["schedules"][0]["schedule"] == record["layout"]["schedule"]
    assert all(entry["fits"] for entry in record["memory"])
    for entry in record["schedules"]:
        if "reason" not in entry:
            assert 0 < entry["mfu"] < entry["utilization"] <= 1
            assert entry["bubble"] + entry["utilization"] <= 1 + 1e-9
    model = resolve([f"toml_configs/{name}"]).model_spec.model
    twice = model.enable_weight_tying and len(record["stages"]) > 1
    apart = sum(stage["parameters"] for stage in record["stages"])
    assert apart - record["model"]["parameters"] == twice * model.vocab_size * model.dim


@pytest.mark.parametrize(
    "name", ["dense_135m", *(slow(name) for name in ("dense_360m", "dense_1b", "moe_2b", "moe_10b_200b"))]
)
def test_no_pipeline_is_faster_than_a_recipes(name):
    planner = plan.Planner(cluster_of("h100-80gb"))
    config = on_own_ranks(resolve([f"toml_configs/{name}.toml"]), planner.cluster.per_node)
    own = planner.time(config)
    searcher = dataclasses.replace(planner.searcher, fits=lambda *run: run[1].pp > 1 and planner._fits(*run))
    found = searcher.suggest(config, own)
    if found is not None:  # with parts scaled from another microbatch size: trace, and search again
        planner.parts_of(found.config)
        found = searcher.suggest(config, own)
    assert found is None, found.changes


def test_tied_model_has_a_plan_under_async2bw_only(run, tmp_path):
    (tmp_path / "x.toml").write_text('recipe = "tied_llama"\n')
    status, out, err = run(f"{tmp_path}/x.toml", "--module", "tests.support.recipes", "--json")
    assert (status, err) == (0, "")
    record = json.loads(out)
    own, *others = record["schedules"]
    assert own["schedule"] == "Async2BW" and own["step_seconds"] > 0
    assert others and all("embedding and head are tied" in entry["reason"] for entry in others)
    stages, tied = [stage["parameters"] for stage in record["stages"]], 2048 * 32
    assert sum(stages) - record["model"]["parameters"] == tied
    assert record["verdict"]["synchronous"]["pp"] == 1
    alone = json.loads(
        run(f"{tmp_path}/x.toml", "--module", "tests.support.recipes", "--json", "--no-suggest")[1]
    )
    assert alone["verdict"]["outcome"] == "only Async2BW" and alone["verdict"]["synchronous"] is None


def test_plan_simulates_each_layout_once(run, monkeypatch):
    """Its own layout, the compared schedules, and the other choice of overlap."""
    layouts, step_time = [], plan.step_time

    def counted(config, layout, *args, **kwargs):
        layouts.append(layout)
        return step_time(config, layout, *args, **kwargs)

    monkeypatch.setattr(plan, "step_time", counted)
    flags = ["--nodes", "1", "--parallelism.expert_parallel_degree", "2", "--no-suggest", "--json"]
    _, out, _ = run("toml_configs/debug_moe_cpu.toml", *flags)
    assert set(json.loads(out)["overlap"]) == {"false", "true"}
    assert {(layout.schedule, layout.overlap) for layout in layouts} >= {
        ("Async2BW", False),
        ("Async2BW", True),
        ("1F1B", False),
    }
    assert len(layouts) == len(set(layouts))


def test_json_has_all_figures(run):
    _, out, _ = run(f"toml_configs/{RECIPE}", "--json")
    record = json.loads(out)
    keys = (
        "recipe model hardware layout stages memory usable_memory schedules receives overlap suggestion "
        "verdict interruptions"
    )
    assert list(record) == keys.split()
    assert record["model"]["tokens"] == 300 * record["model"]["tokens_per_step"]
    # A shard degree of -1 fills one node, as in training: two stages of four.
    assert record["layout"]["world_size"] == 8
    assert record["model"]["tokens_per_step"] == 4 * 8 * 256
    assert [stage["parts"][0] for stage in record["stages"]] == ["tok_embeddings", "layers.3"]
    seconds = record["stages"][0]["seconds"]
    assert list(seconds) == list(_SECONDS)
    assert all(isinstance(value, float) for value in seconds.values())
    for entry in record["memory"]:
        assert sum(entry["items"].values()) == entry["total"]
    own = record["schedules"][0]
    assert own["step_seconds"] * own["tokens_per_second"] == pytest.approx(4 * 8 * 256)
    assert record["overlap"] == {}
    assert record["receives"]["early"] == "auto"
    assert record["receives"]["step_seconds"]["auto"] == own["step_seconds"]
    assert all(entry["items"]["NCCL's buffers"] > 0 for entry in record["memory"])
    names = [entry["schedule"] for entry in record["schedules"]]
    assert names == ["Async2BW", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]


def test_plan_is_printed_as_tables_and_written_to_a_file(run, tmp_path):
    file = tmp_path / "plan.json"
    status, out, _ = run(f"toml_configs/{RECIPE}", "--gpu", "a100-40gb", "--json", str(file), "--no-suggest")
    assert status == 0 and json.loads(file.read_text())["hardware"]["accelerator"]["name"] in out
    for words in (
        "tokens/s",
        "Stages",
        "Peak memory per rank in GB",
        "Schedules",
        "ZBVZeroBubble",
        "activations",
        "receives: posted late within a node (4 of 108 SMs while pending)",
        "--pipeline.early_receives: a step takes",
        "NCCL's buffers",
    ):
        assert words in out


def test_plan_ends_in_its_verdict(run, tmp_path):
    file = tmp_path / "plan.json"
    _, out, _ = run(f"toml_configs/{RECIPE}", "--json", str(file), "--no-suggest")
    record = json.loads(file.read_text())
    verdict, schedules = record["verdict"], record["schedules"]
    assert " ".join(out.split()).endswith(verdict["sentence"])  # rich wraps lines
    assert verdict["asynchronous"]["step_seconds"] == schedules[0]["step_seconds"]
    best = min(entry["step_seconds"] for entry in schedules[1:])
    assert verdict["synchronous"]["step_seconds"] == best
    assert verdict["gain"] == pytest.approx(best / schedules[0]["step_seconds"] - 1)
    assert verdict["second_version"] == record["memory"][0]["items"]["second version"] > 0
    assert not verdict["searched"] and verdict["outcome"] == "pays"
    searched = json.loads(run(f"toml_configs/{RECIPE}", "--json")[1])
    assert searched["verdict"]["searched"] and searched["verdict"]["synchronous"]["pp"] == 1
    suggested = searched["suggestion"]["time"]["step_seconds"]
    assert searched["verdict"]["synchronous"]["step_seconds"] == suggested


def test_nodes_change_the_shards_and_not_the_batch(run):
    flags = ("--training.global_batch_size", "64", "--json", "--no-suggest", "--nodes")
    plans = [json.loads(run(f"toml_configs/{RECIPE}", *flags, nodes)[1]) for nodes in ("1", "2")]
    assert [p["layout"]["world_size"] for p in plans] == [8, 16]
    assert [p["layout"]["dp_shard"] for p in plans] == [4, 8]
    assert plans[0]["model"]["tokens_per_step"] == plans[1]["model"]["tokens_per_step"] == 64 * 256


def test_failures_add_days(run):
    flags = (f"toml_configs/{RECIPE}", "--no-suggest", "--training.steps", "300000")
    _, out, _ = run(*flags)
    assert "days exclude saves and failures: --mtbf HOURS includes them" in out
    out = " ".join(run(*flags, "--mtbf", "12")[1].split())  # rich wraps lines
    assert "with a failure every 12 hours" in out and "3,000 saves of" in out and "10 to restart" in out
    record = json.loads(run(*flags, "--mtbf", "12", "--json")[1])
    found, items = record["interruptions"], [entry["items"] for entry in record["memory"]]
    assert found["days"] > record["schedules"][0]["days"]
    # Two stages of four shards on one node save both versions of the first stage's weights, and all state.
    state = ("weights", "momentum", "AdamW moments", "error feedback")
    written = 4 * (sum(of[name] for of in items for name in state) + items[0]["weights"])
    assert found["save_seconds"] == pytest.approx(written / 2e9)


def test_synchronous_start_adds_days(run):
    def plan_of(*flags):
        command = (f"toml_configs/{RECIPE}", "--no-suggest", "--mtbf", "1e9", "--json")
        record = json.loads(run(*command, *flags)[1])
        return *record["schedules"][:2], record["interruptions"]["days"]

    own, other, days = plan_of("--pipeline.synchronous_ratio", "0.25")
    before, same, days_before = plan_of()
    assert own["synchronous_step_seconds"] > own["step_seconds"] == before["step_seconds"]
    more = 75 * (own["synchronous_step_seconds"] - own["step_seconds"]) / 86_400
    assert own["days"] - before["days"] == pytest.approx(more)
    assert days - days_before == pytest.approx(more)
    assert other == same and other["schedule"] == "1F1B"
    flags = ("--no-suggest", "--pipeline.synchronous_steps", "75")
    out = run(f"toml_configs/{RECIPE}", *flags)[1]
    assert f"the first 75 steps are synchronous: {1e3 * own['synchronous_step_seconds']:.2f} ms each" in out
    assert "are synchronous" not in run(f"toml_configs/{RECIPE}", *flags, "--schedule", "1F1B")[1]


def test_flags_override_the_file(run):
    _, out, _ = run(
        f"toml_configs/{RECIPE}", "--schedule=1F1B", "--achievable", "0.25", "--json", "--no-suggest"
    )
    record = json.loads(out)
    assert record["layout"]["schedule"] == "1F1B"
    assert record["hardware"]["accelerator"]["achievable"] == 0.25
    _, out, _ = run(f"toml_configs/{RECIPE}", "--schedule", "1F1B", "--json", "--no-suggest")
    once = json.loads(out)["stages"][1]["seconds"]["forward"]
    # Products take more than twice as long, memory traffic as long as before.
    assert 1.3 * once < record["stages"][1]["seconds"]["forward"] < 0.63 / 0.25 * once


def test_measured_times_scale_the_plan(run, tmp_path):
    _, out, _ = run(f"toml_configs/{RECIPE}", "--json", "--no-suggest")
    assumed = json.loads(out)
    stages = [
        {
            "stage": stage["stage"],
            "parts": stage["parts"],
            "forward": 3 * stage["seconds"]["forward"],
            "backward": 5 * (stage["seconds"]["input_gradient"] + stage["seconds"]["weight_gradient"]),
        }
        for stage in assumed["stages"]
    ]
    numbers = {key: assumed["layout"][key] for key in measured_times._LAYOUT_FIELDS}
    (tmp_path / "measured.json").write_text(json.dumps({**numbers, "schedule": "Async2BW", "stages": stages}))
    _, out, _ = run(f"toml_configs/{RECIPE}", "--json", "--no-suggest", "--measured", str(tmp_path))
    calibrated = json.loads(out)
    assert calibrated["hardware"]["calibration"] == {
        "forward": pytest.approx(3),
        "backward": pytest.approx(5),
    }
    for before, after in zip(assumed["stages"], calibrated["stages"], strict=True):
        assert after["seconds"]["forward"] == pytest.approx(3 * before["seconds"]["forward"])
        assert after["seconds"]["update"] == pytest.approx(before["seconds"]["update"])
    del stages[1]
    (tmp_path / "measured.json").write_text(json.dumps({**numbers, "schedule": "Async2BW", "stages": stages}))
    assert "another model" in error_of(run, f"toml_configs/{RECIPE}", "--measured", str(tmp_path))
    (tmp_path / "measured.json").write_text("{}")
    assert "repeat the run" in error_of(run, f"toml_configs/{RECIPE}", "--measured", str(tmp_path))


def calibrated(run, tmp_path, device, *flags, faster=1.0):
    file = tmp_path / f"{faster}.json"
    write_profile(file, make_profile(device, faster=faster))
    status, out, err = run(
        f"toml_configs/{RECIPE}", "--calibration", str(file), "--json", "--no-suggest", *flags
    )
    assert (status, err) == (0, "")
    return json.loads(out)


def test_twice_the_rates_take_half_the_time(run, tmp_path):
    once, twice = (calibrated(run, tmp_path, H100, faster=faster) for faster in (1.0, 2.0))
    for slow_stage, fast_stage in zip(once["stages"], twice["stages"], strict=True):
        for kind in ("forward", "input_gradient", "weight_gradient", "update"):
            assert slow_stage["seconds"][kind] == pytest.approx(2 * fast_stage["seconds"][kind])
    hardware = once["hardware"]
    assert hardware["accelerator"]["calibrated_on"] == H100.name
    assert hardware["accelerator"]["measured"]["float32"]["products"] == 50e12
    assert hardware["link_bandwidth"] == 450e9


def test_plan_for_cpu_cores(run, tmp_path):
    """It counts all of attention's scores and no NCCL; a shard degree of -1 is 1."""
    record = calibrated(run, tmp_path, CORES)
    assert record["layout"]["world_size"] == 2 and record["hardware"]["nodes"] == 1
    assert not any("NCCL's buffers" in entry["items"] for entry in record["memory"])
    assert record["memory"][0]["items"]["attention masks"] > 0
    assert record["receives"]["step_seconds"] == {}  # messages occupy no processors
    on_gpu = calibrated(run, tmp_path, H100)
    flops = [each["model"]["forward_flops_per_token"] for each in (record, on_gpu)]
    assert flops[0] > 1.02 * flops[1]  # GPUs compute half of the scores
    alone = calibrated(run, tmp_path, CORES, "--parallelism.pipeline_parallel_degree", "1")
    assert alone["layout"]["world_size"] == 1


def test_calibration_and_measured_times_combine(run, tmp_path):
    record = calibrated(run, tmp_path, H100)
    stages = [
        {"stage": s["stage"], "parts": s["parts"], "forward": 2 * s["seconds"]["forward"], "backward": 1.0}
        for s in record["stages"]
    ]
    numbers = {key: record["layout"][key] for key in measured_times._LAYOUT_FIELDS}
    (tmp_path / "measured.json").write_text(json.dumps({**numbers, "schedule": "1F1B", "stages": stages}))
    both = calibrated(run, tmp_path, H100, "--measured", str(tmp_path))
    assert both["hardware"]["calibration"]["forward"] == pytest.approx(2)
    _, out, _ = run(f"toml_configs/{RECIPE}", "--calibration", str(tmp_path / "1.0.json"), "--no-suggest")
    assert "8 x H100 SXM 80 GB on 1 node(s), calibrated on NVIDIA H100 80GB HBM3\n" in out
    assert "assumed" not in out and "GPU hours" in out


@pytest.mark.parametrize(
    ("device", "flags", "words"),
    [
        (
            H100,
            ("--achievable", "0.5"),
            "--achievable and --calibration both set the rate of matrix products",
        ),
        (H100, ("--gpu", "a100-80gb"), "which is h100-80gb and not a100-80gb"),
        (H100, ("--gpu", "h100"), "did you mean h100-80gb?"),
        (CORES, ("--gpu", "h100-80gb"), "measured on a CPU"),
        (
            CORES,
            ("--nodes", "2"),
            "the plan is for 4 ranks, but the calibration is of a machine with 2 cores",
        ),
    ],
)
def test_calibrations_that_do_not_match_are_rejected(run, tmp_path, device, flags, words):
    file = tmp_path / "device.json"
    write_profile(file, make_profile(device))
    argv = ("--calibration", str(file), "--no-suggest", *flags)
    assert words in error_of(run, f"toml_configs/{RECIPE}", *argv)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "titan-async plan takes RECIPE.toml, not nothing"),
        (("toml_configs/nothing.toml",), "toml_configs/nothing.toml: no such file"),
        ((f"toml_configs/{RECIPE}", "--gpu", "h100"), "did you mean h100-80gb?"),
        ((f"toml_configs/{RECIPE}", "--gpu"), "--gpu: expected one argument"),
        (
            (f"toml_configs/{RECIPE}", "--nodes", "two"),
            "--nodes: must be an integer from 1 to 10000, not two",
        ),
        ((f"toml_configs/{RECIPE}", "--achievable", "50"), "--achievable: must be a fraction"),
        (
            (f"toml_configs/{RECIPE}", "--mtbf", "never"),
            "--mtbf: must be a number of hours above 0, not never",
        ),
        ((f"toml_configs/{RECIPE}", "--mtbf", "0"), "--mtbf: must be a number of hours above 0, not 0"),
        ((f"toml_configs/{RECIPE}", "--node", "2"), "unknown flag --node; did you mean --nodes?"),
        ((f"toml_configs/{RECIPE}", "--schedule", "1F2B"), "did you mean 1F1B?"),
        ((f"toml_configs/{RECIPE}", "--measured", "nowhere"), "contains no measured.json"),
        ((f"toml_configs/{RECIPE}", "--training.stepz", "3"), "did you mean --training.steps"),
        (
            (f"toml_configs/{RECIPE}", "--parallelism.pipeline_parallel_degree", "8"),
            "Async2BW needs at least as many microbatches (4",
        ),
        (
            (f"toml_configs/{RECIPE}", "--parallelism.pipeline_parallel_degree", "3", "--nodes", "1"),
            "--nodes 1 makes 8 ranks",
        ),
        (
            (f"toml_configs/{RECIPE}", "--parallelism.context_parallel_degree", "2"),
            "context_parallel_degree is 2, but plans do not model",
        ),
        ((f"toml_configs/{RECIPE}", "--json", "/dev/null/plan.json", "--no-suggest"), "cannot write"),
    ],
)
def test_errors_are_one_line_with_the_fix(capsys, argv, words):
    status = main.main(["plan", *argv])
    err = capsys.readouterr().err
    assert status == 2 and words in err and err.count("\n") == 1 and "Traceback" not in err


def test_help_needs_no_torch():
    program = (
        "import sys; from titan_async.cli.main import main; status = main(['plan', '--help'])\n"
        "sys.exit(status or ('torch' in sys.modules) or ('rich' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("usage: titan-async plan")
