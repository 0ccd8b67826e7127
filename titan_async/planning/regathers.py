"""What a rank of four pipeline stages or more gathers again, and waits for.

Of a rank's stages torch's schedules keep the weights of the three that are computed next, and start the
gather of a stage when it becomes one of them. Gathers follow one another beside the computation; a stage
waits for its own. What the rank waits for other ranks meanwhile is left out, so that this is the most that
is waited.
"""

import dataclasses
from collections.abc import Sequence

from titan_async.pipelining._order_internals import torch_order
from titan_async.pipelining.programs import stages_of_ranks
from titan_async.pipelining.simulation import Kind
from titan_async.planning.layout import Layout
from titan_async.planning.stage_cost import StageCost

__all__ = ["KEPT_STAGES", "with_regathers"]

KEPT_STAGES = 3
"""Of a rank, those whose weights are there at a time."""


def with_regathers(layout: Layout, costs: Sequence[StageCost], share: float) -> list[StageCost]:
    """The costs of all stages, with what is gathered more than once.

    They stay as they are if the schedule does not take the layout's numbers, which its simulation reports.

    Args:
        layout: of the run.
        costs: without.
        share: of a rank's processors, what a gather takes from what it runs beside.
    """
    if len(costs) // layout.pp <= KEPT_STAGES or not any(cost.unshard.seconds for cost in costs):
        return list(costs)
    of_a_pass, short, long = layout.microbatches // layout.passes, 6 * layout.pp, 12 * layout.pp
    many = of_a_pass > long and of_a_pass % layout.pp == 0
    try:
        found = [_of_a_pass(layout, costs, m, share) for m in ((short, long) if many else (of_a_pass,))]
    except ValueError:
        return list(costs)
    gathers, waits = found[-1]
    if many:  # all but the first and the last microbatches are alike
        turns = (of_a_pass - long) / (long - short)
        gathers, waits = (
            {stage: b[stage] + turns * (b[stage] - a[stage]) for stage in b}
            for a, b in zip(*found, strict=True)
        )
    return [
        dataclasses.replace(
            cost,
            gather=waits[stage] * layout.passes,
            sent={
                **cost.sent,
                "weights": cost.sent["weights"] + (gathers[stage] - 1) * layout.passes * cost.unshard.sent,
            },
        )
        for stage, cost in enumerate(costs)
    ]


def _of_a_pass(
    layout: Layout, costs: Sequence[StageCost], microbatches: int, share: float
) -> tuple[dict[int, float], dict[int, float]]:
    """How often each stage is gathered, and the seconds that its rank loses by that."""
    stages = stages_of_ranks(layout.schedule, layout.pp, len(costs) // layout.pp)
    gathers, waits = dict.fromkeys(range(len(costs)), 1.0), dict.fromkeys(range(len(costs)), 0.0)
    gathers |= {stage: 0.0 for of_rank in stages for stage in of_rank}
    for actions in torch_order(layout.schedule, stages, microbatches, gathers=True):
        now = free = 0.0  # of the computation, and of the gathers
        ready: dict[int, float] = {}
        for kind, stage, _ in actions:
            cost = costs[stage]
            if kind == "G":
                gathers[stage] += 1
                ready[stage] = free = max(free, now) + cost.unshard.seconds
                continue
            if stage in ready:
                waited = max(ready.pop(stage) - now, 0.0)
                # The rest of the gather has run beside computation.
                lost = waited + share * max(cost.unshard.seconds - waited, 0.0)
                waits[stage] += lost
                now += lost
            now += _seconds(cost, kind)
    return gathers, waits


def _seconds(cost: StageCost, kind: Kind) -> float:
    return {"F": cost.forward, "B": cost.backward, "I": cost.input_gradient, "W": cost.weight_gradient}[kind]
