"""Checkpoints of a run: what they hold, and how they are saved, loaded and removed."""
