"""Traces a training step on a GPU that is not present: every operation and every allocation."""
