"""Asynchronous pipeline parallelism (PipeDream-2BW) for pretraining language models."""

__version__ = "0.1.0"
