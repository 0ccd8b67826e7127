"""Training with torchtitan: the trainer, its optimizers, checks before the start, CPU support.

Nothing is imported here, so that the command line can print help without loading torchtitan.
"""
