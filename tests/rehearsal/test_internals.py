"""Fails if torch changes the private names that the rehearsal uses."""

import inspect


def test_private_names_exist() -> None:
    from torch.distributed.pipelining.schedules import _PipelineSchedule
    from torch.distributed.pipelining.stage import PipelineStage, _PipelineStageBase, _StageMeta

    assert list(inspect.signature(_StageMeta).parameters) == [
        "inputs",
        "outputs",
        "input_grads",
        "output_grads",
    ]
    assert "self._user_meta = _StageMeta(" in inspect.getsource(PipelineStage.__init__)
    assert "self._runtime_validate = " in inspect.getsource(_PipelineStageBase.__init__)
    # torch does not infer metadata by communication in a fake process group.
    assert "fake" in inspect.getsource(_PipelineSchedule._warmup_p2p)


def test_operators_have_the_signatures_that_fake_receives_expect() -> None:
    import torch

    names = [argument.name for argument in torch.ops.c10d.alltoall_base_.default._schema.arguments]
    assert names[:5] == [
        "output",
        "input",
        "process_group",
        "output_split_sizes",
        "input_split_sizes",
    ]
    assert torch.ops.c10d.recv_.default._schema.arguments[0].name == "tensors"
