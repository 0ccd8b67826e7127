"""What a stage does before its first message: infer shapes, then try one microbatch.

torch infers the shapes between stages one stage after another, with a real forward and backward. If stages
were compiled there, their compilations would add up along the pipeline. So shapes are inferred eagerly, and
afterwards all stages run a microbatch of made-up inputs at the same time. On an accelerator this also loads
kernels, tunes them and fills the allocator: all of them may wait for the whole device, and would do so for
ever once a receive is posted whose message depends on what this stage sends.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.pipelining.stage import _PipelineStageBase

from titan_async.pipelining._torch_internals import (
    WithoutFlexKernels,
    clear_chunks,
    has_compiled_parts,
    made_up_inputs,
)

__all__ = ["infer_eagerly", "needs_trial", "run_trial"]


def needs_trial(stage: _PipelineStageBase) -> bool:
    """Whether the first microbatch of a stage does what later ones do not, such as compiling it."""
    return stage.device.type != "cpu" or has_compiled_parts(stage.submod)


@contextmanager
def infer_eagerly() -> Iterator[None]:
    """Compile nothing inside, nor compute what fits into memory only where it is compiled."""
    with torch.compiler.set_stance("force_eager"), WithoutFlexKernels(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without")
        yield


def run_trial(
    stage: _PipelineStageBase, forward: Callable[[int, int], Callable[[], None]], losses: list[Tensor]
) -> None:
    """Run forward and, if the stage trains, backward of one microbatch without messages.

    Activations are random, so that routers spread them; what the user gives (inputs of the first stage,
    keyword arguments, the target) is that of the first microbatch. Random numbers drawn later are the same as
    without. Gradients and buffers are left to the caller.

    Args:
        stage: a stage that torch has initialized.
        forward: of the microbatch 0 in the slot 0.
        losses: what `forward` appends its loss to, on the last stage.

    Raises:
        RuntimeError: naming the stage, if it fails.
    """
    devices = [] if stage.device.type == "cpu" else [stage.device]
    try:
        with torch.random.fork_rng(devices, device_type=stage.device.type), made_up_inputs(stage, slot=0):
            forward(0, 0)()
            if stage.has_backward:
                stage.backward_one_chunk(0, losses[0] if stage.is_last else None)
    except Exception as error:
        cause = error.__cause__ or error
        raise RuntimeError(
            f"stage {stage.stage_index} failed on a first microbatch, before any message: "
            f"{type(cause).__name__}: {' '.join(str(cause).split())}"
        ) from error
    clear_chunks(stage)
