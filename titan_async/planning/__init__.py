"""Estimates memory, time and traffic of a run without building its model, for `titan-async plan`.

The model is traced on fake tensors, one layer of each kind; the schedule is simulated task by task; hardware
is described by a few numbers.
"""
