"""The faults of `faults.py`: one module per family injects them into runs and reports the outcomes."""
