"""Cost of a model's parts: FLOPs by hand, bytes against the same part in real memory."""

import dataclasses
from typing import Any

import pytest
import torch

from tests.support.selection import slow
from titan_async.config.device import ensure_device
from titan_async.training.prepare import adapt_to_cpu

ensure_device()

from torchtitan.components.loss import ChunkedLossWrapper  # noqa: E402
from torchtitan.config.override import apply_overrides  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402

from tests.support.recipes import tied_llama, tiny_llama  # noqa: E402
from titan_async.planning.storage_tracker import StorageTracker  # noqa: E402
from titan_async.planning.traced_parts import Part, deduplicated, trace_parts  # noqa: E402
from titan_async.recipes.debug import debug, debug_moe  # noqa: E402
from titan_async.training.pipeline.model_parts import PartMaker  # noqa: E402

B, L = 2, 64
TOKENS = B * L


def small(make: Any = debug, **changes: Any) -> Any:
    config = make()
    training = dataclasses.replace(config.training, seq_len=L)
    return dataclasses.replace(config, training=training, **changes)


@pytest.fixture(scope="module")
def dense() -> dict[str, Part]:
    return trace_parts(small())


def test_names_and_weights_are_those_of_the_model(dense: dict[str, Part]) -> None:
    config = small()
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert {w.name: w.shape for part in dense.values() for w in part.weights} == expected
    assert list(dense) == ["tok_embeddings", *(f"layers.{i}" for i in range(6)), "head"]
    assert {w.name for w in dense["head"].weights} == {"norm.weight", "lm_head.weight"}


def test_backward_does_not_need_the_logits(dense: dict[str, Part]) -> None:
    assert dense["head"].unused_bytes == 4 * TOKENS * 2048


def test_tied_weight_is_in_two_parts_and_counts_once() -> None:
    untied, tied = tiny_llama(), tied_llama()
    apart, parts = trace_parts(untied), trace_parts(tied)
    assert {w.name for w in parts["head"].weights} == {"norm.weight", "tok_embeddings.weight"}
    for name, part in parts.items():
        assert part.dense == apart[name].dense
        assert (part.forward_flops, part.active) == (apart[name].forward_flops, apart[name].active)
    with torch.device("meta"):
        model = tied.model_spec.model.build()
    whole = deduplicated(parts.values())
    assert sum(part.dense for part in whole) == sum(part.active for part in whole)
    assert sum(part.dense for part in whole) == sum(p.numel() for p in model.parameters())
    assert deduplicated(apart.values()) == list(apart.values())


def test_flops_of_a_dense_layer(dense: dict[str, Part]) -> None:
    matrices = 4 * 192 * 192 + 3 * 192 * 512
    products = 2 * TOKENS * matrices
    attention = 2 * 2 * B * 6 * L * L * 32  # of 6 heads of size 32: scores and their sums over values
    layer = dense["layers.3"]
    assert layer.weight_flops == products
    assert layer.forward_flops == products + attention / 2  # causal
    assert layer.attention_flops == attention / 2
    # The flash kernel recomputes the scores: five products in the backward, two in the forward.
    assert layer.input_flops == products + 2.5 * attention / 2
    assert layer.recompute_flops == 0
    on_cpu = trace_parts(small(), on_cpu=True)["layers.3"]
    assert on_cpu.forward_flops == products + attention


def test_flops_of_embedding_and_head(dense: dict[str, Part]) -> None:
    head = 2 * TOKENS * 192 * 2048
    assert dense["tok_embeddings"].forward_flops == 0
    assert dense["tok_embeddings"].active == 192 * 2048
    assert dense["head"].forward_flops == dense["head"].input_flops == dense["head"].weight_flops == head


def test_chunked_loss_has_the_same_flops_and_holds_one_chunk(dense: dict[str, Part]) -> None:
    whole, loss = dense["head"], small().loss
    parts = trace_parts(small(loss=ChunkedLossWrapper.Config(num_chunks=8, loss_fn=loss)))
    head, products = parts["head"], 2 * TOKENS * 192 * 2048
    assert head.forward_flops == head.input_flops == head.weight_flops == products
    assert head.passed_bytes == whole.passed_bytes
    assert [part.name for part in parts.values() if part.chunked] == ["head"]
    # All logits and their softmax; or an eighth of them and the gradient of the weights, which only a chunked
    # loss computes in its forward.
    assert whole.forward_peak > 2 * 4 * TOKENS * 2048
    assert head.forward_peak < 3 * 4 * TOKENS * 2048 / 8 + 4 * 192 * 2048 + 5 * head.message_bytes
    # The output of the last norm and its gradient, since the loss's backward is done.
    assert head.saved_bytes <= 3 * head.message_bytes + 8 * TOKENS


@pytest.mark.parametrize("on_cpu", [False, True], ids=["accelerator", "CPU"])
def test_flops_of_experts_are_those_of_chosen_experts(on_cpu: bool) -> None:
    layer = trace_parts(small(debug_moe), on_cpu=on_cpu)["layers.0"]
    attention = 2 * 128 * 128 + 2 * 128 * 64
    expert, router, shared = 3 * 128 * 128, 128 * 8, 3 * 128 * 128
    assert layer.experts == 8 * expert
    assert layer.active == attention + router + shared + 2 * expert + 2 * 128 + 2 * 32
    assert layer.weight_flops == 2 * TOKENS * (attention + router + shared + 2 * expert)
    assert layer.dispatched_bytes == 2 * layer.message_bytes == 2 * TOKENS * 128 * 4


def test_checkpointing_recomputes_and_saves_less() -> None:
    none = trace_parts(small())["layers.0"]
    full = trace_parts(small(activation_checkpoint=FullAC.Config()))["layers.0"]
    selective = trace_parts(small(activation_checkpoint=SelectiveAC.Config()))["layers.0"]
    assert none.passed_bytes == full.passed_bytes == selective.passed_bytes == none.saved_bytes
    assert full.recompute_flops == none.forward_flops and none.recompute_flops == 0
    assert 0 < selective.recompute_flops < none.forward_flops
    # A recomputed layer only saves its output; its input is the previous part's output.
    assert full.saved_bytes < 1.1 * full.message_bytes
    assert full.saved_bytes < selective.saved_bytes < none.saved_bytes
    assert full.forward_flops == none.forward_flops  # without recomputation


@pytest.mark.parametrize("make", [slow(debug, id="dense"), pytest.param(debug_moe, id="experts")])
@pytest.mark.parametrize(
    "checkpointing", [slow(None, id="all kept"), pytest.param(SelectiveAC.Config(), id="selective")]
)
def test_bytes_are_those_of_a_real_part(make: Any, checkpointing: Any) -> None:
    config = small(make, activation_checkpoint=checkpointing)
    traced = trace_parts(config, on_cpu=True)
    maker = real_maker(config)
    for name, modules in {"layers.0": ["layers.0"], "head": ["norm", "lm_head"]}.items():
        saved, peak = real_bytes(maker, modules)
        # Uneven routing needs other temporary memory, and small tensors of counts.
        assert traced[name].saved_bytes == pytest.approx(saved, rel=0.02)
        assert traced[name].first_backward_peak == pytest.approx(peak, rel=0.04)


def real_maker(config: Any) -> PartMaker:
    config = adapt_to_cpu(config)
    model_config = config.model_spec.model
    model_config.update_from_config(config=config)
    apply_overrides(config.override, config)
    with torch.device("meta"):
        model = model_config.build()
    return PartMaker(
        model=model,
        model_config=model_config,
        device=torch.device("cpu"),
        training=config.training,
        parallelism=config.parallelism,
        ac_config=config.activation_checkpoint,
        dump_folder="",
        loss_fn=config.loss.build(compile_config=config.compile),
    )


def real_bytes(maker: PartMaker, modules: list[str]) -> tuple[int, int]:
    """Bytes saved by a forward, and the peak until the end of its backward."""
    torch.manual_seed(0)
    part = maker.make(modules)
    with StorageTracker() as tracker:
        maker.materialize(part)
        with torch.no_grad():
            part.init_weights()
        inputs = maker.inputs(part)
        start = inputs.start(part)
        before = tracker.live
        output, end = inputs.forward(part, start)
        saved = tracker.live - before
        tracker.reset_peak()
        end.backward(inputs.output_gradient)
        del output
        return saved, tracker.peak - before


def test_tracing_does_not_change_the_rng_state() -> None:
    state = torch.get_rng_state()
    trace_parts(small())
    assert torch.equal(torch.get_rng_state(), state)
