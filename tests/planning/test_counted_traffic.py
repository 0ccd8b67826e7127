"""Planned FSDP traffic against the collectives of training runs, byte by byte, and planned memory traffic of
error feedback against its operations."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.planning import ROUND
from tests.support.processes import Pools
from tests.support.selection import slow
from tests.support.traffic import bytes_put_together
from tests.support.training import ROOT
from titan_async.config.device import ensure_device
from titan_async.optim.elementwise import copy_unless_
from titan_async.optim.feedback_history import correct_gradients_, correct_updates_, negated_weights

ensure_device()

from titan_async.config.recipe_file import resolve  # noqa: E402
from titan_async.planning.layout import layout_of  # noqa: E402
from titan_async.planning.optimizer_cost import _feedback_bytes  # noqa: E402
from titan_async.planning.step_time import stage_costs  # noqa: E402
from titan_async.planning.traced_parts import trace_parts  # noqa: E402

P = "--parallelism."
ONE = (P + "pipeline_parallel_degree", 1)
SHARDS = (P + "data_parallel_shard_degree", 2)
RESHARD = P + "fsdp_reshard_after_forward"
LAYERS = P + "pipeline_parallel_layers_per_stage"
EIGHT_STAGES = (P + "pipeline_parallel_schedule", "Interleaved1F1B", LAYERS, 1)
SYNCHRONOUS = (P + "pipeline_parallel_schedule", "1F1B", *SHARDS)


@pytest.mark.parametrize(
    ("recipe", "ranks", "batch", "flags"),
    [
        pytest.param("small", 2, 16, (*ONE, *SHARDS, RESHARD, "default"), id="default"),
        pytest.param("small", 2, 16, (*ONE, *SHARDS, RESHARD, "never"), id="never"),
        slow("small", 2, 16, (*ONE, *SHARDS, RESHARD, "always"), id="always"),
        slow("small", 2, 16, (*ONE, P + "data_parallel_replicate_degree", 2, *SHARDS[:1], 1), id="replicas"),
        pytest.param("debug_in_chunks", 2, 16, (*ONE, *SHARDS), id="a loss in chunks"),
        slow("debug_in_chunks", 4, 8, SYNCHRONOUS, id="a loss in chunks on two stages"),
        slow("small", 4, 16, SYNCHRONOUS, id="two passes of two stages"),
        slow("small", 4, 8, SHARDS, id="Async2BW"),
        slow("debug_cpu", 4, 8, (*EIGHT_STAGES, *SHARDS), id="four stages per rank"),
    ],
)
def test_fsdp_sends_the_planned_bytes(
    pools: Pools, tmp_path: Path, recipe: str, ranks: int, batch: int, flags: tuple[object, ...]
) -> None:
    """Two microbatches per rank, or four in two passes. A gather or reduction of n bytes over two ranks sends
    n / 2 from each rank, an all-reduce n."""
    argv = [str(ROOT / "toml_configs" / "debug_cpu.toml")]
    if recipe != "debug_cpu":
        argv = [str(ROOT / "tests" / "support" / f"{recipe}.toml"), "--module", "tests.support.recipes"]
    argv += [*map(str, flags), "--dump_folder", str(tmp_path), "--training.steps", "2"]
    argv += ["--checkpoint.no-enable", "--validator.no-enable", "--training.seq_len", "64"]
    argv += ["--training.local_batch_size", "4", "--training.global_batch_size", str(batch)]
    counted = pools(ranks).run(ranks, bytes_put_together, argv, timeout=250)
    config = resolve(argv)
    layout = layout_of(config, ranks)
    assert layout.microbatches == (batch // 4 if layout.passes > 1 and layout.pp > 1 else 2)
    costs = stage_costs(config, layout, trace_parts(config, on_cpu=True), ROUND)
    for rank in range(layout.pp):
        found, sent = counted[rank * ranks // layout.pp], [costs[s].sent for s in layout.stages_of(rank)]
        assert sum(each["weights"] for each in sent) == found.get("all_gather_single", 0) / 2
        gradients = found.get("reduce_scatter_single", 0) / 2 + found.get("all_reduce", 0)
        assert sum(each["gradients"] for each in sent) == gradients > 0


class Moved(TorchDispatchMode):
    """Counts the bytes that operators read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        copies, given = func in (torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default), []
        for index, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name, args[index] if index < len(args) else None)
            of_argument = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            size = sum(leaf.nbytes for leaf in of_argument)
            written = argument.alias_info is not None and argument.alias_info.is_write
            replaced = argument.is_out or (copies and index == 0)
            self.bytes += size * (written + (not replaced))
            given += [leaf.data_ptr() for leaf in of_argument]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.bytes += sum(leaf.nbytes for leaf in made if leaf.data_ptr() not in given)
        return result


def correct_an_update(weight: Tensor, history: Tensor, skip: Tensor) -> None:
    before = negated_weights([weight])
    correct_updates_([weight], before, [history], [True], 1.0, skip)


def correct_a_gradient(grad: Tensor, history: Tensor, skip: Tensor) -> None:
    copy = grad.clone()
    correct_gradients_([copy], [grad], [history], [True], 1.0)
    copy_unless_(skip, history, grad)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize(
    ("level", "correct"), [("update", correct_an_update), ("gradient", correct_a_gradient)]
)
def test_feedback_moves_the_planned_bytes(
    level: str, correct: Callable[[Tensor, Tensor, Tensor], None], dtype: str
) -> None:
    """In a run that skips updates on the device."""
    flags = ["--optimizer.error_feedback.level", level, "--optimizer.error_feedback.dtype", dtype]
    config = resolve([str(ROOT / "toml_configs" / "debug_cpu.toml"), *flags])
    size, skip = 2**12, torch.tensor(False)  # one tile
    history = torch.zeros(size, dtype=torch.float32 if dtype == "auto" else torch.bfloat16)
    weight = torch.ones(size)
    with Moved() as moved:
        correct(weight, history, skip)
    assert round(moved.bytes / size) == _feedback_bytes(config, "AdamW") == _feedback_bytes(config, "Muon")


def test_compiled_feedback_moves_only_its_history() -> None:
    """Within AdamW's own pass; for other optimizers feedback is not compiled."""
    flags = ["--optimizer.error_feedback.compile"]
    plain, compiled = (resolve([str(ROOT / "toml_configs" / "debug_cpu.toml"), *f]) for f in ([], flags))
    assert _feedback_bytes(compiled, "AdamW") == 4 + 4
    assert _feedback_bytes(compiled, "Muon") == _feedback_bytes(plain, "Muon") > 8
