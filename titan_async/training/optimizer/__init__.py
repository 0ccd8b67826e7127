"""The optimizers of a run, and the sections of a recipe that configure them."""
