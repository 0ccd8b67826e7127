"""Checkpoints as files: tensors read and written one at a time, without a process group and without a model.

A checkpoint of torch.distributed.checkpoint on one side, a folder of safetensors on the other. This layer
knows torch and safetensors alone; what the tensors are, `titan_async.huggingface` knows.
"""
