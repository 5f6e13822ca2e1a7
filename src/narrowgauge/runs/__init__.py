"""Runs: trains a task in a run folder, which holds the record of the training and its checkpoints."""
