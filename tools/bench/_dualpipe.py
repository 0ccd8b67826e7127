"""DualPipeV with overlapped pairs; by default torch runs the two halves of a pair one after the other."""

from typing import Any

from torch.distributed.pipelining.schedules import OVERLAP_F_B, ScheduleDualPipeV

from titan_async.pipelining.overlap import Overlap

__all__ = ["overlap_pairs"]


class _SameWeights:
    """In a synchronous schedule both halves of a pair use the same weights."""

    def leave(self, half: int) -> None:
        pass

    def enter(self, half: int) -> None:
        pass


def overlap_pairs(schedule: ScheduleDualPipeV) -> None:
    """Makes a schedule of unsharded stages overlap its pairs, by torch's `register_custom_function`."""
    stages = {stage.stage_index: stage for stage in schedule._stages}
    overlap = Overlap(schedule._stages[0].device)

    def wait(received: dict[tuple[int, int], Any], stage: int, microbatch: int) -> None:
        for work in received.pop((stage, microbatch), []):
            work.wait()

    def run(action: Any, context: Any) -> None:
        (forward_stage, _, f, *_), (backward_stage, _, b, *_) = action.sub_actions
        wait(schedule.fwd_recv_ops, forward_stage, f)
        wait(schedule.bwd_recv_ops, backward_stage, b)
        of_forward, of_backward = stages[forward_stage], stages[backward_stage]
        loss = schedule._maybe_get_loss(of_backward, b)
        schedule.backward_counter[backward_stage] += 1
        last = schedule.backward_counter[backward_stage] == schedule._n_microbatches
        outputs = []

        def forward() -> None:
            outputs.append(of_forward.forward_one_chunk(f, context.arg_mbs[f], context.kwarg_mbs[f]))

        def backward() -> None:
            of_backward.backward_one_chunk(b, loss=loss, full_backward=True, last_backward=last)

        overlap.run(forward, backward, _SameWeights())
        schedule._maybe_compute_loss(of_forward, outputs[0], context.target_mbs, f, {})
        if forward_stage + 1 in stages:
            stages[forward_stage + 1].set_local_fwd_input(outputs[0], f)
        if backward_stage - 1 in stages:
            stages[backward_stage - 1].set_local_bwd_input(of_backward.get_local_bwd_output(b), b)

    schedule.register_custom_function(OVERLAP_F_B, run)
