"""Training with torchtitan: recipes' TOML files, the trainer and its optimizers, CPU support.

Nothing is imported here: what needs torchtitan says so in its own module, so that the command line
can answer without loading it.
"""
