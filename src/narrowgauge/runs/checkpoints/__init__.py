"""Checkpoints of a run: saved atomically, verified by SHA-256, loaded on any number of ranks."""
