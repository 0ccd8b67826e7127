"""The faults of `faults.py`: each module makes those of one kind, and says what a run did about them."""
