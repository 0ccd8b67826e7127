"""Prints a plan as tables."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from titan_async.pipelining.actions import min_microbatches
from titan_async.planning.interruptions import NODE_SAVES, RESTART_SECONDS
from titan_async.planning.network import Network
from titan_async.planning.plan import Plan, Refused
from titan_async.planning.step_time import StepTime, receives_ahead
from titan_async.planning.verdict import in_seconds

__all__ = ["print_plan"]

_WIDTH = 118


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print a plan to stdout, or to a console."""
    console = console or Console(width=_WIDTH, highlight=False)
    for line in _headlines(plan):
        console.print(line, markup=False)
    for table in (_stages(plan), _memory(plan), _schedules(plan), _traffic(plan)):
        console.print(table)
    for line in [*_suggestion(plan), plan.verdict.sentence]:
        console.print(line, markup=False)


def _headlines(plan: Plan) -> list[str]:
    layout, cluster, time = plan.layout, plan.cluster, plan.time
    nodes = -(-layout.world_size // cluster.per_node)
    lookahead = f", lookahead {layout.lookahead}" if layout.lookahead else ""
    pairs = ", overlapped pairs" if layout.overlap else ""
    source = f"{cluster.accelerator.achievable:.0%} of the peak assumed"
    if cluster.accelerator.calibrated_on:
        source = f"calibrated on {cluster.accelerator.calibrated_on}"
    if plan.calibration.forward != 1.0 or plan.calibration.backward != 1.0:
        source += (
            f"; scaled by measured times: forward x {plan.calibration.forward:.2f}, backward x "
            f"{plan.calibration.backward:.2f}"
        )
    hours = f"{time.accelerator_hours:,.0f} {'core' if cluster.accelerator.on_cpu else 'GPU'} hours"
    return [
        f"{plan.recipe}: {_count(plan.parameters)} parameters, {_count(plan.active_parameters)} active, "
        f"{_count(layout.tokens_per_step * layout.steps)} tokens in {layout.steps:,} steps of "
        f"{layout.tokens_per_step:,}; {3 * plan.forward_flops_per_token / 1e9:.3g} GFLOPs per token",
        f"{layout.world_size} x {cluster.accelerator.name} on {nodes} node(s), {source}",
        f"{layout.degrees}; {layout.microbatches} microbatches of {layout.microbatch_size} x "
        f"{layout.seq_len}{lookahead}{pairs}",
        f"{layout.schedule}: {in_seconds(time.step_seconds)} per step, {time.tokens_per_second:,.0f} "
        f"tokens/s, MFU {time.mfu:.1%}: {time.days:.1f} days, {hours}",
        *_synchronous_start(plan),
        _interruptions(plan),
        *_receives(plan),
        *_overlap(plan),
    ]


def _synchronous_start(plan: Plan) -> list[str]:
    steps, seconds = plan.layout.synchronous_steps, plan.time.synchronous_step_seconds
    return [f"  the first {steps:,} steps are synchronous: {in_seconds(seconds)} each"] if steps else []


def _interruptions(plan: Plan) -> str:
    found = plan.interruptions
    if found is None:
        return "  days exclude saves and failures: --mtbf HOURS includes them"
    parallel = "" if found.blocking else " in parallel to training"
    return (
        f"  with a failure every {found.mtbf_hours:g} hours: {found.days:.1f} days; {found.saves:,} saves of "
        f"{in_seconds(found.save_seconds)}{parallel} ({NODE_SAVES / 1e9:g} GB/s per node), "
        f"{found.failures:.3g} failures that cost {found.lost_seconds / 60:.0f} minutes each "
        f"({RESTART_SECONDS / 60:.0f} to restart)"
    )


_WHEN = {(0, 0): "late", (1, 0): "early for activations", (1, 1): "early"}


def _receives(plan: Plan) -> list[str]:
    """The cost of messages, with other choices of early receives."""
    seconds = dict(plan.seconds_by_receives)
    if not seconds:
        return []
    network = Network(plan.cluster, plan.layout)
    edges = {network.spans_nodes(rank, rank + 1): (rank, rank + 1) for rank in range(plan.layout.pp - 1)}
    links = []
    for apart, edge in sorted(edges.items()):
        ahead = receives_ahead(network, plan.layout, edge, plan.receives)
        if ahead is not None:
            where = "between nodes" if apart else "within a node"
            blocks = f"{network.message_blocks(*edge)} of {plan.cluster.accelerator.processors} SMs"
            links.append(f"posted {_WHEN[ahead]} {where} ({blocks} while pending)")
    own = seconds.pop(plan.receives)
    others = [f"{in_seconds(s)} with {receives}" for receives, s in seconds.items() if s != own]
    lines = [f"receives: {', '.join(links)}"]
    if others:
        lines.append(f"  --pipeline.early_receives: a step takes {', '.join(others)}")
    return lines


def _overlap(plan: Plan) -> list[str]:
    """The effect of overlapped pairs."""
    if not plan.by_overlap:
        return []
    layout, network = plan.layout, Network(plan.cluster, plan.layout)
    group = network.groups.experts
    where = "within a node" if group.on_a_node == group.size else "between nodes"
    share = max(sum(cost.exchange) / (cost.forward + cost.backward) for cost in plan.costs)
    line = f"overlapped pairs: all-to-alls {where} take {share:.0%} of a microbatch's time"
    if True not in plan.by_overlap:
        least = min_microbatches(layout.pp, layout.lookahead, overlap=True)
        return [line, f"  pipeline.overlap needs at least {least} microbatches in this layout"]
    choices = [
        f"{in_seconds(entry.step_seconds)} per step and {entry.most_memory / 1e9:.1f} GB "
        f"{'with' if overlap else 'without'}{'' if entry.fits else ', which does not fit'}"
        for overlap, entry in plan.by_overlap.items()
    ]
    return [line, f"  --pipeline.overlap: {'; '.join(choices)}"]


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="right" if position else "left")
    return table


def _stages(plan: Plan) -> Table:
    table = _table(
        "Stages; milliseconds per microbatch (weights: part of the backward), and per batch",
        [
            "stage",
            "parts",
            "parameters",
            "active",
            "forward",
            "backward",
            "weights",
            "gather",
            "reduce",
            "update",
        ],
    )
    for stage, (names, cost) in enumerate(zip(plan.layout.stages, plan.costs, strict=True)):
        seconds = [
            cost.forward,
            cost.backward,
            cost.weight_gradient,
            cost.gather,
            cost.reduction,
            cost.update,
        ]
        table.add_row(
            str(stage),
            _shortened(names),
            _count(sum(part.dense + part.experts for part in plan.parts_on(stage))),
            _count(sum(part.active for part in plan.parts_on(stage))),
            *(f"{1e3 * value:.2f}" for value in seconds),
        )
    return table


def _shortened(names: Sequence[str]) -> str:
    """ "layers.0", "layers.1", "layers.2", "head" -> "layers 0-2, head"."""
    numbers = [int(name.partition(".")[2]) for name in names if name.startswith("layers.")]
    parts = [name for name in names if name == "tok_embeddings"]
    if numbers:
        span = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
        parts.append(f"layers {span}")
    return ", ".join([*parts, *(name for name in names if name == "head")]).replace("tok_", "")


def _memory(plan: Plan) -> Table:
    ranks = _shown_ranks([memory.total for memory in plan.memory])
    kinds = dict.fromkeys(kind for memory in plan.memory for kind in memory.items)
    table = _table(
        f"Peak memory per rank in GB, of {plan.usable_memory / 1e9:.1f} usable",
        ["item", *(f"rank {rank}" for rank in ranks)],
    )
    for kind in kinds:
        table.add_row(kind, *(f"{plan.memory[rank].items.get(kind, 0) / 1e9:.2f}" for rank in ranks))
    table.add_section()
    table.add_row("total", *(f"{plan.memory[rank].total / 1e9:.2f}" for rank in ranks))
    table.add_row("fits", *("yes" if plan.fits[rank] else "NO" for rank in ranks))
    return table


def _shown_ranks(totals: Sequence[int], most: int = 8) -> list[int]:
    """All ranks; for a long pipeline, evenly spaced ones and the one with the highest peak."""
    if len(totals) <= most:
        return list(range(len(totals)))
    even = {round(index * (len(totals) - 1) / (most - 2)) for index in range(most - 1)}
    return sorted(even | {max(range(len(totals)), key=totals.__getitem__)})


def _schedules(plan: Plan) -> Table:
    table = _table(
        "Schedules",
        ["schedule", "step", "tokens/s", "relative", "MFU", "utilization", "bubble", "days", "GPU hours"],
    )
    for entry in plan.schedules:
        if isinstance(entry, Refused):
            table.add_row(entry.schedule, "-", "-", "-", "-", "-", "-", "-", "-")
        else:
            table.add_row(
                entry.schedule,
                in_seconds(entry.step_seconds),
                f"{entry.tokens_per_second:,.0f}",
                f"{entry.tokens_per_second / plan.time.tokens_per_second:.2f}",
                f"{entry.mfu:.1%}",
                f"{entry.utilization:.1%}",
                f"{entry.bubble:.1%}",
                f"{entry.days:.1f}",
                f"{entry.accelerator_hours:,.0f}",
            )
    table.caption = "\n".join(
        f"{entry.schedule}: {entry.reason}" for entry in plan.schedules if isinstance(entry, Refused)
    )
    table.caption_justify = "left"
    return table


def _traffic(plan: Plan) -> Table:
    ran = [entry for entry in plan.schedules if isinstance(entry, StepTime)]
    table = _table("GB sent per step by a rank (by all ranks)", ["item", *(e.schedule for e in ran)])
    for kind in ran[0].sent_bytes:
        if any(entry.sent_bytes[kind] for entry in ran):
            cells = [f"{e.sent_by_a_rank[kind] / 1e9:.2f} ({e.sent_bytes[kind] / 1e9:,.1f})" for e in ran]
            table.add_row(kind, *cells)
    return table


def _suggestion(plan: Plan) -> list[str]:
    if plan.suggestion is None:
        return []
    lines = [
        f"A layout that fits and is predicted to be {plan.suggestion.gain:.0%} faster "
        f"({in_seconds(plan.suggestion.time.step_seconds)} per step, {plan.suggestion.time.days:.1f} days):"
    ]
    changes = plan.suggestion.changes.items()
    return lines + [f"  {_flag(key, new)}   # instead of {old}" for key, (old, new) in changes]


def _flag(key: str, value: int | bool) -> str:
    """The command-line flag of a field."""
    if not isinstance(value, bool):
        return f"--{key} {value}"
    section, _, name = key.rpartition(".")
    return f"--{key}" if value else f"--{section}.no-{name}"


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g}"
