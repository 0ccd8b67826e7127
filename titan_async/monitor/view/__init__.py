"""The live view of a run on a terminal, from the files that its ranks write. It needs no torch."""
