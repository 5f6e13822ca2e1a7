"""Predicts a step on many GPUs: shards, collectives and their overlap with computation."""
