"""What a run does: recorded by its ranks in files, and shown, drawn and exported from these."""
