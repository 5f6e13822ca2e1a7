"""Fused blocks, head and norms: parts of a transformer that run as one function with a hand-written backward."""
