"""Replay: runs a captured step again, op by op, and finds the op that produced inf or NaN."""
