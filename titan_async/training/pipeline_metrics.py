"""What a pipeline's figures come to over all ranks: how busy its stages are, how large the correction."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

__all__ = ["pipeline_metrics"]


def pipeline_metrics(
    busy: Mapping[int, float],
    squares: float | None,
    *,
    stages: int,
    degree: int,
    group: dist.ProcessGroup | None,
) -> dict[str, float]:
    """Gather what the ranks know. A collective over the hosts of all of them, of a few numbers.

    Args:
        busy: the share of their time that stages of this rank computed.
        squares: this rank's share of the squares of what error feedback remembers; see
            `gradient_norm.share_of_squares`. None on all ranks where it is off.
        stages: of the pipeline.
        degree: ranks of the pipeline.
        group: of all ranks, on the CPU; None for what this rank knows.

    Returns:
        "pipeline/utilization/0" and so on for each stage, the mean over its ranks; "pipeline/bubble", the
        share of its time that a rank does not compute; "error_feedback/norm", that of the last uncorrected
        update. Without what no rank knows.
    """
    figures = torch.zeros(1 + 2 * stages, dtype=torch.float64)
    figures[0] = squares or 0.0
    for stage, share in busy.items():
        figures[1 + stage] = share
        figures[1 + stages + stage] = 1
    if group is not None:
        dist.all_reduce(figures, group=group)
    total, sums, counts = figures.tensor_split([1, 1 + stages])
    metrics: dict[str, float] = {}
    if bool(counts.all()):
        shares = (sums / counts).tolist()
        metrics = {f"pipeline/utilization/{stage}": share for stage, share in enumerate(shares)}
        metrics["pipeline/bubble"] = 1 - sum(shares) / degree
    if squares is not None:
        metrics["error_feedback/norm"] = float(total.sqrt())
    return metrics
