"""Training with torchtitan: the trainer, its optimizers, checks before the start, CPU support.

Nothing is imported here: what needs torchtitan says so in its own module, so that the command line
can answer without loading it.
"""
