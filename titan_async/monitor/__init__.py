"""Monitoring: ranks record events in files, which are displayed live, plotted, or exported as traces."""
