"""Measured rates of simulated devices with known rates, whose clocks advance with the work done."""

import json
import os
import subprocess
import types

import pytest
import torch
import torch.nn.functional as F

from titan_async.errors import UserError
from titan_async.planning import device_timing, message_timing
from titan_async.planning.device_profile import Elementwise, Link, MessageTiming
from titan_async.planning.device_timing import Sizes

SMALL = Sizes(
    products=((8, 32, 32), (64, 32, 32), (64, 128, 128), (128, 128, 128)),
    grouped=((4, 8, 32, 32),),
    heads=2,
    head_size=8,
    tokens=64,
    seq_lens=(16, 32, 64),
    elementwise=2**10,
    touched=2**16,
)
LINK = Link(latency=1e-4, bandwidth=1e9, messages=[MessageTiming(size=8, seconds=1e-4)])


class Machine:
    """Replaces `torch.nn.functional` and the clock. Its products reach 1 GFLOP/s and 200 MB/s, its attention
    500 MFLOP/s over long sequences and half of that over 40 tokens."""

    def __init__(self):
        self.now = 5.0
        self.rms_norm, self.silu, self.grouped_mm = F.rms_norm, F.silu, F.grouped_mm

    def thread_time(self):
        return self.now

    def linear(self, x, weight):
        (m, k), n = x.shape, len(weight)
        self.now += 2 * m * n * k / 1e9 + x.element_size() * (m * k + n * k + m * n) / 200e6
        return F.linear(x, weight)

    def scaled_dot_product_attention(self, q, k, v, *, attn_mask, is_causal):
        batch, heads, length, size = q.shape
        # All scores, in two products of the forward and five of the backward.
        self.now += 7 * 2 * batch * heads * length**2 * size / 500e6 * (1 + 40 / length)
        assert not is_causal and attn_mask[0, 0].equal(torch.ones(length, length).tril().bool())
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(device_timing, "F", machine)
    monkeypatch.setattr(device_timing, "time", machine)
    monkeypatch.setattr(device_timing, "SIZES", {"cpu": SMALL})
    monkeypatch.setattr(device_timing, "_profile_elementwise", lambda *_: Elementwise(
        bandwidth=1e9, forward_passes=1.0, backward_passes=1.0))  # fmt: skip
    monkeypatch.setattr(device_timing, "time_messages", lambda: LINK)
    return machine


def test_known_rates_are_recovered(machine):
    threads, lines = torch.get_num_threads(), []
    profile = device_timing.profile_device("cpu", lines.append)
    for found in (profile.float32, profile.bfloat16):
        rates = found.rates
        assert (rates.products, rates.operands) == pytest.approx((1e9, 200e6), rel=1e-4)
        assert (rates.attention, rates.attention_ramp) == pytest.approx((500e6, 40), rel=1e-4)
        assert found.product_error.worst == pytest.approx(1) and found.attention_error.worst == pytest.approx(
            1
        )
        assert [(t.m, t.groups) for t in found.products] == [(8, 1), (64, 1), (64, 1), (128, 1), (8, 4)]
        assert all(t.fitted_seconds == pytest.approx(t.seconds) for t in (*found.products, *found.attention))
    # In float32 128 x 128 x 128 is the fastest.
    seconds = 2 * 128**3 / 1e9 + 4 * 3 * 128**2 / 200e6
    assert profile.float32.fastest_product == pytest.approx(2 * 128**3 / seconds)
    assert profile.device.kind == "cpu" and profile.device.name and profile.device.memory > 2**30
    assert profile.device.processors <= os.cpu_count() and profile.link == LINK
    assert torch.get_num_threads() == threads and len(lines) == 4


def test_shapes_that_would_take_too_long_are_skipped(machine, monkeypatch):
    monkeypatch.setattr(device_timing, "_LONGEST", 1e-3)  # 128 x 128 x 128 takes 4 ms and more
    found = device_timing._profile_dtype(torch.device("cpu"), torch.bfloat16, SMALL)
    assert [t.m for t in found.products] == [8, 64, 64, 8] and [t.seq_len for t in found.attention] == [
        16,
        32,
    ]


def test_cuda_events_are_synchronized_and_converted_to_seconds(monkeypatch):
    calls = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            calls.append("record")

        def synchronize(self):
            calls.append("synchronize")

        def elapsed_time(self, end):
            assert calls[-1] == "synchronize"
            return 30.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert device_timing._elapsed(torch.device("cuda"), calls.append, 2) == pytest.approx(0.03)
    assert calls == ["record", 0, 1, "record", "synchronize"]


def test_gpu_is_described_by_its_driver(monkeypatch):
    found = types.SimpleNamespace(name="NVIDIA Some", total_memory=24 * 2**30, multi_processor_count=80)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    device = device_timing._describe(torch.device("cuda"))
    assert (device.kind, device.name, device.memory, device.processors) == (
        "cuda",
        "NVIDIA Some",
        24 * 2**30,
        80,
    )


def test_grouped_products_equal_a_loop():
    x, weights = torch.randn(12, 16, dtype=torch.bfloat16), torch.randn(3, 8, 16, dtype=torch.bfloat16)
    loop = torch.cat([x[4 * e : 4 * e + 4] @ weights[e].T for e in range(3)])
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert torch.allclose(device_timing._grouped(gpu, x.dtype, x, weights)(0), loop, atol=0.1)
    assert torch.allclose(torch.cat(device_timing._grouped(cpu, x.dtype, x, weights)(0)), loop, atol=0.1)
    # torch has no float32 kernel for GPUs.
    assert device_timing._grouped(gpu, torch.float32, x.float(), weights.float()) is None


def test_an_out_of_memory_error_is_one_sentence(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory\nmany lines")

    monkeypatch.setattr(device_timing, "_warm_up", full)
    monkeypatch.setattr(device_timing, "_describe", lambda device: types.SimpleNamespace(name="NVIDIA Some"))
    with pytest.raises(UserError, match="NVIDIA Some has too little free memory to calibrate: end other"):
        device_timing.profile_device("cuda")


def test_saved_bytes_of_a_layers_elementwise_operations(monkeypatch):
    monkeypatch.setattr(device_timing, "_REPEATS", 1)
    monkeypatch.setattr(device_timing, "_SAMPLE", 0)
    forward, backward, saved = device_timing._time_layer(tokens=6, width=12)
    assert forward > 0 and backward > 0
    # Products made four tensors of the width and two of 32. Elementwise operations add two sums, two norms,
    # two rotations, a SiLU and its product; norms save further tensors, depending on torch.
    made = 4 * 6 * (4 * 12 + 2 * 32 + 6 * 12 + 2 * 32)
    assert made < saved < made + 2 * 4 * 6 * (3 * 12)


def seconds_of_a_message(rank, group):
    return message_timing._seconds(rank, 2**10)


def test_round_trips_are_timed(pools):
    assert all(0 < seconds < 10 for seconds in pools(2).run(2, seconds_of_a_message))


class Rank:
    """Replaces one of the two processes."""

    def __init__(self, out="", err="", returncode=0):
        self.answer, self.returncode, self.killed = (out, err), returncode, False

    def communicate(self, timeout=None):
        if self.answer is None and timeout is not None:
            raise subprocess.TimeoutExpired("python", timeout)
        return self.answer

    def kill(self):
        self.killed = True


def test_latency_and_bandwidth_of_messages_are_recovered(monkeypatch):
    sizes = message_timing.SIZES
    ranks = [Rank(json.dumps([40e-6 + size / 3e9 for size in sizes])), Rank()]
    processes = iter(ranks)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: next(processes))
    link = message_timing.time_messages()
    assert (link.latency, link.bandwidth) == pytest.approx((40e-6, 3e9), rel=1e-4)
    assert [message.size for message in link.messages] == list(sizes)
    assert all(rank.killed for rank in ranks)


@pytest.mark.parametrize("reason", ["timed out after 120 seconds", "RuntimeError: no interface"])
def test_failed_messages_are_one_sentence(reason, monkeypatch):
    failed = Rank(err=f"Traceback\n{reason}\n", returncode=1)
    if reason.startswith("timed out"):
        failed.answer = None
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: failed)
    with pytest.raises(UserError, match=rf"over gloo \({reason}\): set GLOO_SOCKET_IFNAME"):
        message_timing.time_messages()


@pytest.mark.slow
def test_messages_between_real_processes_are_timed():
    link = message_timing.time_messages()
    assert 0 < link.latency < 1 and link.bandwidth > 1e6
