"""The processes of a run: failures, timeouts, signals, and the run's folder."""
