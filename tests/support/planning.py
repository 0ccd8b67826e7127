"""Parts, layouts and hardware with round numbers, whose plans can be computed by hand."""

import dataclasses

from titan_async.planning.hardware import Accelerator, Cluster
from titan_async.planning.layout import Layout
from titan_async.planning.traced_parts import Part, Weight
from titan_async.recipes.debug import debug

ROUND = Cluster(
    accelerator=Accelerator(
        name="round",
        memory=100 * 10**9,
        matrix_peak=200e12,
        float32_peak=100e12,
        memory_bandwidth=1e18,
        achievable=0.5,
        attention=0.25,
        watts=800,
        processors=100,
    ),
    per_node=8,
    link_bandwidth=100e9,
    link_latency=0.0,
    network_bandwidth=10e9,
    network_latency=0.0,
    link_blocks=0,
    network_blocks=0,
    collective_blocks=0,
)
"""100 TFLOP/s achieved; memory of practically infinite bandwidth; no latency; 80 and 8 GB/s achieved, by
messages that need no multiprocessors."""

FREE = dataclasses.replace(ROUND, link_bandwidth=1e30, network_bandwidth=1e30)


def make_part(name, *, tflops=1.0, shape=(64, 64), expert=False, **others):
    """A part with one weight, with `tflops` for its forward and for each half of its backward."""
    values = {field.name: 0 for field in dataclasses.fields(Part)}
    values |= {
        "name": name,
        "weights": (Weight(f"{name}.weight", shape, expert=expert, unit=name),),
        "active": 0,
        "forward_flops": tflops * 1e12,
        "input_flops": tflops * 1e12,
        "weight_flops": tflops * 1e12,
    }
    return Part(**(values | others))


def make_parts(layers, **others):
    """An embedding and a head without cost, and layers of equal cost."""
    names = [f"layers.{i}" for i in range(layers)]
    return {
        "tok_embeddings": make_part("tok_embeddings", tflops=0.0),
        **{name: make_part(name, **others) for name in names},
        "head": make_part("head", tflops=0.0),
    }


def make_layout(layers, **changes):
    """One layer per stage under 1F1B, with embedding and head on the first and the last stage."""
    values = {
        "schedule": "1F1B",
        "pp": layers,
        "dp_replicate": 1,
        "dp_shard": 1,
        "tp": 1,
        "ep": 1,
        "microbatch_size": 1,
        "microbatches": layers,
        "passes": 1,
        "seq_len": 1024,
        "lookahead": 0,
        "steps": 10,
    } | changes
    names = [f"layers.{i}" for i in range(layers)]
    each = max(layers // values.pop("stages_of", values["pp"]), 1)
    stages = [names[i : i + each] for i in range(0, layers, each)]
    stages[0].insert(0, "tok_embeddings")
    stages[-1].append("head")
    return Layout(**values, stages=tuple(map(tuple, stages)))


def config_of(pp, shards, *, sequences=32, microbatch=2, schedule="Async2BW"):
    """The laptop recipe in another layout."""
    config = debug()
    parallelism = dataclasses.replace(
        config.parallelism,
        pipeline_parallel_degree=pp,
        data_parallel_shard_degree=shards,
        pipeline_parallel_schedule=schedule,
        pipeline_parallel_microbatch_size=microbatch,
    )
    training = dataclasses.replace(
        config.training, local_batch_size=sequences // shards, global_batch_size=sequences
    )
    return dataclasses.replace(config, parallelism=parallelism, training=training)


HEAVY = (65_536, 1024)


def heavy(config):
    """Six layers of 67 M weights each, which are expensive to gather and cheap to orthogonalize."""
    return make_parts(6, tflops=config.parallelism.pipeline_parallel_microbatch_size / 2, shape=HEAVY)


def light(config):
    """Six layers with costs proportional to the microbatch, and small weights."""
    return make_parts(6, tflops=config.parallelism.pipeline_parallel_microbatch_size / 2)
