"""What a pipeline's figures come to over all ranks: how busy its stages are, how large the correction."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titan_async.pipelining.gradient_norm import share_of_squares

__all__ = ["pipeline_metrics"]


def pipeline_metrics(
    busy: Mapping[int, float], histories: Sequence[Tensor], *, stages: int, degree: int, device: torch.device
) -> dict[str, float]:
    """Gather what the ranks know. A collective over all of them, of a few numbers.

    Args:
        busy: the share of their time that stages of this rank computed.
        histories: this rank's part of what error feedback remembers; the same everywhere: some, or none.
        stages: of the pipeline.
        degree: ranks of the pipeline.
        device: for the collective.

    Returns:
        "pipeline/utilization/0" and so on for each stage, the mean over its ranks; "pipeline/bubble", the
        share of its time that a rank does not compute; "error_feedback/norm", that of the last uncorrected
        update. Without what no rank knows.
    """
    copies = dist.get_world_size() // degree
    figures = torch.zeros(1 + 2 * stages, dtype=torch.float64, device=device)
    figures[0] = share_of_squares(histories, copies, device)
    for stage, share in busy.items():
        figures[1 + stage] = share
        figures[1 + stages + stage] = 1
    dist.all_reduce(figures)
    squares, sums, counts = figures.tensor_split([1, 1 + stages])
    metrics: dict[str, float] = {}
    if bool(counts.all()):
        shares = (sums / counts).tolist()
        metrics = {f"pipeline/utilization/{stage}": share for stage, share in enumerate(shares)}
        metrics["pipeline/bubble"] = 1 - sum(shares) / degree
    if histories:
        metrics["error_feedback/norm"] = float(squares.sqrt())
    return metrics
