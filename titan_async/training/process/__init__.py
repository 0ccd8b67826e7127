"""What the processes of a run agree on: failures, timeouts, signals, and the run's folder."""
