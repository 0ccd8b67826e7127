"""The comparison of Muon implementations runs and counts correctly; its times are not tested."""

import pytest
import torch
import torch.distributed as dist
from _muon_accuracy import STANDARD, Exact
from _muon_traffic import TrafficCounter
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard

from tests.support.tools import measured


@pytest.mark.slow
def test_ours_runs_in_every_layout_and_is_recorded(tmp_path):
    parts = measured(tmp_path, "bench/muon.py", "--quick", "--only", "notes,moe", "--ranks", "2")
    results = {(r["case"]["workload"], r["name"]): r for part in parts.values() for r in part["results"]}
    for workload in ("notes", "moe"):
        for name in ("ours", "ours, error feedback", "ours in ErrorFeedback"):
            result = results[workload, name]
            assert result["refusal"] is None and result["median"] > 0 and not result["is_wrong"]
    # Four matrices (16, 16) and two (16, 64) in bfloat16: of each, its owner has half, gets the other half,
    # and sends it back. The rest is a flag whether all gradients are finite.
    numbers, sent = 4 * 256 + 2 * 1024, results["notes", "ours"]["sent"]
    assert 0 <= sent - 2 * (numbers / 2) * 2 / 2 < 100
    # The momentum in float32, half of it on each rank, a few numbers, and at most the buffers of the last
    # transfer, which its thread may not have released yet.
    assert 0 <= results["notes", "ours"]["kept"] - numbers * 4 / 2 < 100 + numbers * 2
    assert "2D" in results["moe", "torch.optim.Muon"]["refusal"]


def test_the_gpu_script_runs_without_a_gpu(tmp_path):
    flags = ("--quick", "--only", "360M", "--device", "cpu", "--repeats", 1)
    rows = measured(tmp_path, "bench/muon_cuda.py", *flags)["360M"]["results"]
    ours = next(row for row in rows if row["name"] == "ours, bfloat16")
    assert len(ours["seconds"]) == 1 and ours["error"] < 0.1


def test_the_reference_is_the_polar_factor():
    for shape in [(5, 9), (9, 5), (6, 6)]:
        matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
        torch.testing.assert_close(Exact(matrix).polar, u @ vh)
        x = matrix / matrix.norm()
        for a, b, c in STANDARD:
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        torch.testing.assert_close(Exact(matrix).iterated(STANDARD), x)


def count(rank, group):
    """Bytes counted in one collective of each kind, with 6 x 4 numbers of 4 bytes on each of two ranks."""
    mine = torch.full((6, 4), float(rank))
    sharded = DTensor.from_local(mine, DeviceMesh.from_group(group, "cpu"), [Shard(0)])
    received = torch.empty(4 if rank == 0 else 8, 4)
    collectives = {
        # Rank 0 keeps 2 of its 6 rows and rank 1 keeps 4 of its 6.
        "all_to_all": lambda: dist.all_to_all_single(
            received, mine, [2, 2] if rank == 0 else [4, 4], [2, 4], group=group
        ),
        "all_gather": lambda: dist.all_gather_into_tensor(torch.empty(12, 4), mine, group=group),
        "all_reduce": lambda: dist.all_reduce(mine, group=group),
        "full_tensor": lambda: sharded.full_tensor(),
        "redistribute": lambda: sharded.redistribute(placements=[Replicate()]).to_local() + 1,
        "product": lambda: sharded @ sharded.T,
    }
    found = {}
    for name, collective in collectives.items():
        with TrafficCounter() as counter:
            collective()
        found[name] = counter.sent
    return found


@pytest.mark.timeout(120)
def test_sent_bytes_are_counted(pools):
    first, second = pools(2).run(2, count)
    row, whole = 4 * 4, 6 * 4 * 4
    assert (first.pop("all_to_all"), second.pop("all_to_all")) == (4 * row, 2 * row)
    # Half of the output of an all-gather, and twice half of the input of an all-reduce, are as many bytes.
    for found in (first, second):
        assert set(found.values()) == {whole} and len(found) == 5
