"""The faults of `faults.py`: a module a family injects them into runs and reports what the runs did."""
