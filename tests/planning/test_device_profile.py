"""Calibration files, and the clusters that plans derive from them."""

import dataclasses
import json

import pytest

from tests.support.calibrations import CORES, H100, make_profile
from titan_async.errors import UserError
from titan_async.planning.device_profile import calibrated_cluster, read_profile, write_profile
from titan_async.planning.hardware import ACHIEVABLE_BANDWIDTH, CLUSTERS


@pytest.mark.parametrize("device", [H100, CORES])
def test_profile_round_trips_through_a_file(device, tmp_path):
    profile, file = make_profile(device), tmp_path / "new" / "device.json"
    write_profile(file, profile)
    assert read_profile(file) == profile
    assert json.loads(file.read_text())["device"]["name"] == device.name


def broken(change):
    record = dataclasses.asdict(make_profile(CORES))
    change(record)
    return json.dumps(record)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file; titan-async calibrate --out"),
        ("{", "cannot be read"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "is not a calibration file: give a file written by titan-async calibrate"),
        ('{"stages": []}', "is not a calibration file"),
        (
            broken(lambda r: r.update(version=2)),
            "version 2, but this program reads version 1: repeat titan-async calibrate",
        ),
        (broken(lambda r: r.pop("float32")), "damaged at float32 (Field required): repeat"),
        (broken(lambda r: r["float32"]["rates"].pop("products")), "damaged at float32.rates.products"),
        (
            broken(lambda r: r["float32"]["rates"].update(products="1e12")),
            "damaged at float32.rates.products",
        ),
        (broken(lambda r: r["float32"]["rates"].update(products=0)), "float32.rates.products (it is 0"),
        (
            broken(lambda r: r["float32"]["rates"].update(products=-1.0)),
            "float32.rates.products (it is -1.0)",
        ),
        (broken(lambda r: r["bfloat16"]["rates"].update(operands=float("nan"))), "bfloat16.rates.operands"),
        (broken(lambda r: r["elementwise"].update(bandwidth=1e300)), "elementwise.bandwidth (it is 1e+300)"),
        (broken(lambda r: r["link"]["messages"][0].update(seconds=0.0)), "link.messages.0.seconds"),
        (broken(lambda r: r["device"].update(processors=0)), "device.processors (it is 0)"),
        (broken(lambda r: r["device"].update(kind="tpu")), "damaged at device.kind"),
        (broken(lambda r: r.update(link=None)), "damaged at link (missing for a CPU)"),
        (broken(lambda r: r.update(more=1)), "damaged at more"),
    ],
)
def test_invalid_files_are_one_sentence(content, words, tmp_path):
    file = tmp_path / "device.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError) as error:
        read_profile(file)
    assert words in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)


def test_gpu_has_measured_rates_and_the_network_of_its_kind():
    cluster = calibrated_cluster(make_profile(H100), None, "h100.json")
    sheet = CLUSTERS["h100-80gb"]
    assert dataclasses.replace(cluster, accelerator=sheet.accelerator) == sheet
    gpu = cluster.accelerator
    assert (gpu.name, gpu.matrix_peak, gpu.memory) == (
        sheet.accelerator.name,
        sheet.accelerator.matrix_peak,
        sheet.accelerator.memory,
    )
    assert gpu.calibrated_on == "NVIDIA H100 80GB HBM3" and gpu.moved_bandwidth == 2e12
    # 2 n^3 operations at 100 TFLOP/s and 6 n^2 bytes at 1 TB/s.
    n = 1024
    seconds = 2 * n**3 / gpu.peak("bfloat16") / gpu.product_share("bfloat16", n, n, n)
    assert seconds == pytest.approx(2 * n**3 / 100e12 + 6 * n * n / 1e12)
    seconds = 2 * n**3 / gpu.peak("float32") / gpu.product_share("float32", n, n, n)
    assert seconds == pytest.approx(2 * n**3 / 50e12 + 12 * n * n / 1e12)
    assert gpu.product_share("float16", n, n, n) == gpu.product_share("bfloat16", n, n, n)
    assert gpu.attention_share(300, "float32") == pytest.approx(20e12 / gpu.float32_peak)
    # Other values are those of the data sheet.
    assert gpu.forward_passes == sheet.accelerator.forward_passes and not gpu.on_cpu


def test_unknown_gpu_needs_a_network():
    # The PCI Express model has a similar name and another peak.
    other = dataclasses.replace(H100, name="NVIDIA H100 PCIe", processors=114)
    with pytest.raises(UserError, match="measured on NVIDIA H100 PCIe, whose network is unknown: set --gpu"):
        calibrated_cluster(make_profile(other), None, "other.json")
    cluster = calibrated_cluster(make_profile(other), "L40S-48gb", "other.json")
    assert cluster.link_bandwidth == CLUSTERS["l40s-48gb"].link_bandwidth
    gpu = cluster.accelerator
    # MFU is then relative to the fastest product.
    assert (gpu.name, gpu.matrix_peak, gpu.float32_peak) == ("NVIDIA H100 PCIe", 80e12, 40e12)
    assert (gpu.memory, gpu.processors, gpu.watts) == (85_000_000_000, 114, 0)
    smaller = dataclasses.replace(H100, memory=40_000_000_000)  # a MIG instance
    with pytest.raises(UserError, match="network is unknown"):
        calibrated_cluster(make_profile(smaller), None, "slice.json")


def test_calibration_must_match_the_gpu_flag():
    assert calibrated_cluster(make_profile(H100), "H100-80gb", "h100.json").accelerator.calibrated_on
    with pytest.raises(UserError, match="which is h100-80gb and not a100-80gb: omit --gpu"):
        calibrated_cluster(make_profile(H100), "a100-80gb", "h100.json")
    with pytest.raises(UserError, match="on a CPU, which does not have the network of --gpu h100-80gb"):
        calibrated_cluster(make_profile(CORES), "h100-80gb", "cpu.json")


def test_cpu_is_a_node_whose_ranks_are_cores():
    cluster = calibrated_cluster(make_profile(CORES), None, "cpu.json")
    core = cluster.accelerator
    assert cluster.per_node == 2 and core.on_cpu and core.memory == 8_000_000_000
    assert cluster.link_bandwidth * ACHIEVABLE_BANDWIDTH == pytest.approx(2e9)
    assert cluster.link_latency == 1e-4 and cluster.link_blocks == cluster.collective_blocks == 0
    assert (core.forward_passes, core.backward_passes) == (2.0, 5.0)
