"""What a recipe will need: memory, time and traffic of a run, computed without building its model.

`titan-async plan` prints it. The model is looked at on the meta device, one layer of each kind; the schedule
is simulated task by task; hardware is a few stated numbers.
"""
