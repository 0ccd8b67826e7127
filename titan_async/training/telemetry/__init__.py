"""What a run reports: metrics, lines on the terminal, event files, stage times."""
