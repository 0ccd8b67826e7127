"""The output of a run: metrics, lines on the terminal, event files, stage times."""
