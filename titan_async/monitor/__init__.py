"""Monitoring of runs: ranks record events in files, which are shown live, plotted and exported as traces."""
