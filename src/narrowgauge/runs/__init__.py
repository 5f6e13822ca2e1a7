"""Runs: the folder with the whole record of one training, its checkpoints, and the loop that fills it."""
